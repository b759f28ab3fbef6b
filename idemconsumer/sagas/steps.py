"""Runs a step that has no recorded outcome, and undoes one that has: its function, and the commits around it.

A `tx` step is one transaction with its checkpoint; a `call` step runs between an intent and its outcome. Both end with
a fenced write to the store, and return the output as a resume will get it. Undos work in the same way, under a key of
their own. Each function is called by `StepFunctions.begin`, with the app's resources, and awaited within its timeout by
`user_code.call`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, TypeAlias
from uuid import UUID
from weakref import WeakKeyDictionary

from idemconsumer.errors import Reject, SagaMisused, UnknownEffect
from idemconsumer.handlers.arguments import Done, NotDone, Unknown
from idemconsumer.logs import log
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.ports.tracing import NO_TRACING, Tracing
from idemconsumer.rules.habits import Habits
from idemconsumer.rules.saga import refusal
from idemconsumer.rules.values import StepKind, StepRow, StepState
from idemconsumer.sagas.children import ResultSpec, StartSpec, check_result
from idemconsumer.sagas.order import Order
from idemconsumer.sagas.outputs import Outputs, function_of, resolved
from idemconsumer.sagas.probes import Probes
from idemconsumer.sagas.step import FirstSpec, StepCall, StepSpec, WaitSpec, step_key
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.user_code.call import call_in_transaction, call_user_code, without_exit
from idemconsumer.user_code.cancellation import run_mortal
from idemconsumer.user_code.time_limit import TimeLimit

At: TypeAlias = Callable[[Point | SagaPoint], None]
_Parameters: TypeAlias = tuple[tuple[str, int | None, type], ...]  # name, position (None: keyword-only), type

GRACE: Final = 5.0  # seconds for a cancelled function to clean up
_BACKWARDS: Final = "step and the step's output"
_known: WeakKeyDictionary[FunctionType, _Parameters] = WeakKeyDictionary()


def left_behind(function: object) -> None:
    """Log that user code swallowed its cancellation and is no longer awaited (L34)."""
    name = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
    log.error("function still runs after cancellation, abandoned; does it catch CancelledError?", function=name)


@dataclass(frozen=True, slots=True)
class StepFunctions:
    """Calls the functions of steps. `timeout` and `lease` are in seconds; the lease limits functions in a transaction
    (L5). `habits`: the pipelining of steps in a transaction; None: every statement waits for its result (J26)."""

    resources: Mapping[type, object]
    timeout: float
    lease: float
    habits: Habits | None = None
    tracing: Tracing = NO_TRACING

    def seconds(self, own: float | None = None) -> float:
        """For how long a step's function may run, in seconds. `own`: the step's `timeout`, if it has one (L45)."""
        return self.timeout if own is None else own

    def limit(self, own: float | None = None) -> TimeLimit:
        """The limit outside a transaction."""
        return TimeLimit(self.seconds(own))

    def limit_in_transaction(self, own: float | None = None) -> TimeLimit:
        return TimeLimit(self.seconds(own), self.lease)

    def call(self, key: UUID, attempt: int) -> StepCall:
        """The first argument for the function of a call."""
        return StepCall(key, attempt, self.tracing.carried({}))

    def begin(self, fn: Callable[..., Awaitable[Any]], *args: object, gets: str) -> Awaitable[Any]:
        """Call a step's function with `args` and the resources that it requests; it runs once it is awaited. If it goes
        on after its cancellation, it is left behind.

        If the function cannot be called like that, raises a TypeError that describes the right signature. `gets` says
        in that text which arguments come before the step's own ones.
        """
        more = injected(fn, len(args), self.resources)
        try:
            running: object = fn(*args, **more)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise TypeError(
                f"{error}; it is called with {gets}, then with the step's arguments, "
                "and by name with the app's resources (@app.resource) that match the types of its other parameters"
            ) from None
        if not inspect.isawaitable(running):
            name = getattr(fn, "__qualname__", type(fn).__name__)
            raise TypeError(f"{name} is not async, it returned {type(running).__name__}; write async def")
        return run_mortal(without_exit(running), GRACE, partial(left_behind, fn))


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one held saga. A Reject that they raise is recorded."""

    store: PostgresLeases
    saga: LeasedSaga
    functions: StepFunctions
    recorded: Outputs
    probes: Probes
    order: Order
    fail_on: tuple[type[Exception], ...]
    at: At

    async def rows(self) -> list[StepRow]:
        """The steps that are recorded now."""
        return await self.store.steps(self.saga.key)

    async def run(self, spec: StepSpec, row: StepRow | None) -> Any:
        """Run a step that has no recorded outcome. `row` is its open intent, if there is one. Marks the step as
        finished. Raises NotCalled."""
        tracing = self.functions.tracing
        async with self.probes.trying(spec.fn, self.saga, self.fail_on):
            if spec.kind is StepKind.TX:
                with tracing.step("tx", spec.name, None):
                    return await self._transaction(spec)
            with tracing.step("call", spec.name, 1 if row is None else row.attempt + 1):
                return await self._call(spec, row)

    async def undo(self, spec: StepSpec, row: StepRow, recorded: Outputs) -> None:
        """Undo a finished step. Raises NotCalled, ChildRuns, and whatever its undo raises."""
        output = spec.decode(await recorded.of(row))
        self.at(SagaPoint.UNDOING)
        if isinstance(spec, StartSpec):
            spec = await spec.stop(self.store, self.saga, output)
        assert spec.undo is not None
        attempt = None if row.kind is StepKind.TX else row.attempt + 1
        async with self.probes.trying(spec.undo, self.saga):
            with self.functions.tracing.step("undo", row.name, attempt):
                if row.kind is StepKind.TX:
                    await self._undo_transaction(spec, spec.undo, output)
                else:
                    await self._undo_call(spec, spec.undo, row, output)
        self.at(SagaPoint.UNDONE)

    # ---------------------------------------------------------------------------------------------------- waits (L40)
    async def wait(self, spec: WaitSpec) -> StepRow | float:
        """Begin the wait, or check whether it is over. A float: it is not over, for so many seconds. Of several waits
        the first one that is over closes the others, which are not checked any more (L74)."""
        left = list[float]()
        for each in spec.parts:
            each.overlapped = spec.overlapped
            found = await self._look(each, [other.name for other in spec.parts if other is not each])
            if not isinstance(found, float):
                if isinstance(spec, FirstSpec):
                    spec.over = each
                return found
            left.append(found)
        return min(left)

    async def _look(self, spec: WaitSpec, closes: Sequence[str]) -> StepRow | float:
        with self.order.sending(spec) as sent:
            found = await self.store.wait(
                self.saga, spec.name, spec.kind, spec.seconds, spec.signal, child=spec.child,
                overlapped=spec.overlapped, closes=closes,
            )  # fmt: skip
            sent.position = None if isinstance(found, float) else found.position
        if not isinstance(found, float):
            self.at(SagaPoint.STEP_RECORDED)
        elif isinstance(spec, ResultSpec) and spec.child is not None:
            check_result(spec, await self.store.kinship(self.saga.key, spec.child))
        return found

    async def decide(self, spec: StepSpec, value: bool) -> None:
        """Record the decision at a patch. The handler may request older records only after it (L72)."""
        output, _ = spec.encode(value)
        await self.store.record(
            self.saga, spec.name, spec.kind, StepState.DONE, output, has_undo=False, overlapped=spec.overlapped
        )
        self.at(SagaPoint.STEP_RECORDED)

    # ------------------------------------------------------------------------------------------------ in a transaction
    async def _transaction(self, spec: StepSpec) -> Any:
        functions, seconds = self.functions, self.functions.seconds(spec.limits.timeout)
        self.at(SagaPoint.STEP_OPENING)
        async with self.store.step(
            self.saga, spec.name, has_undo=spec.has_undo, undo=False, timeout=seconds, arguments=spec.arguments
        ) as opened:

            def accept(value: object) -> tuple[StoredResult | None, Any]:
                opened.check()
                return spec.encode(value)

            try:
                if isinstance(spec, StartSpec):
                    await spec.begin(opened)
                running = functions.begin(spec.fn, opened.tx(functions.habits), *spec.args, gets="tx")
                limit = functions.limit_in_transaction(spec.limits.timeout)
                output, value = await call_in_transaction(opened.claims, running, limit, accept, forget=False)
            except Exception as error:
                refused = refusal(error, self.fail_on)
                if refused is None:
                    raise
            else:
                self.at(SagaPoint.STEP_COMMITTING)
                with self.order.sending(spec) as sent:
                    sent.position = await opened.finish(output, overlapped=spec.overlapped)
                spec.finished = True
                self.at(SagaPoint.STEP_COMMITTED)
                return value
        raise await self._record_refusal(spec, refused)

    async def _undo_transaction(self, spec: StepSpec, undo: Callable[..., Awaitable[object]], output: object) -> None:
        functions, gets = self.functions, "tx and the step's output"
        seconds = functions.seconds(spec.limits.timeout)
        async with self.store.step(self.saga, spec.name, has_undo=True, undo=True, timeout=seconds) as opened:
            undoing = functions.begin(undo, opened.tx(functions.habits), output, *spec.args, gets=gets)
            limit = functions.limit_in_transaction(spec.limits.timeout)
            await call_in_transaction(opened.claims, undoing, limit, lambda _: opened.check())
            await opened.finish(None, overlapped=False)

    # ---------------------------------------------------------------------------------------------------------- a call
    async def _call(self, spec: StepSpec, row: StepRow | None) -> Any:
        saga, functions = self.saga, self.functions
        key = step_key(saga.scope, saga.key, spec.name)
        if row is not None and spec.reconcile is not None:  # an open intent: the remote system may have done it
            found = await self._reconcile(spec, spec.reconcile, functions.call(key, row.attempt))
            if isinstance(found, Done):
                return await self._record_output(spec, found.result)
        self.at(SagaPoint.INTENDING)
        attempt = await self.store.intend(
            saga,
            spec.name,
            has_undo=spec.has_undo,
            undo=False,
            overlapped=spec.overlapped,
            timeout=functions.seconds(spec.limits.timeout),
            arguments=spec.arguments,
        )
        self.at(SagaPoint.INTENDED)
        limit = functions.limit(spec.limits.timeout)
        try:
            running = functions.begin(spec.fn, functions.call(key, attempt), *spec.args, gets="step")
            value = await call_user_code(running, limit, forget=False)
        except Exception as error:
            refused = None if limit.caused(error) else refusal(error, self.fail_on)
            if refused is None:
                raise
            raise await self._record_refusal(spec, refused) from refused
        self.at(SagaPoint.CALLED)
        try:
            return await self._record_output(spec, value)
        except SagaMisused as error:  # L70: the value is not a valid output, but the call had its effect
            raise UnknownEffect(f"{error}; its call was made, and is not repeated automatically") from error

    async def _undo_call(
        self, spec: StepSpec, undo: Callable[..., Awaitable[object]], row: StepRow, output: object
    ) -> None:
        saga, functions, seconds = self.saga, self.functions, self.functions.seconds(spec.limits.timeout)
        key = step_key(saga.scope, saga.key, row.name, undo=True)
        found: Done[Any] | NotDone = NotDone()
        if row.state is StepState.UNDO_INTENT and spec.reconcile_undo is not None:  # it may have been undone
            call = functions.call(key, row.attempt)
            asking = functions.begin(spec.reconcile_undo, call, output, *spec.args, gets=_BACKWARDS)
            answer = await call_user_code(asking, functions.limit(spec.limits.timeout))
            found = _certain(f"reconcile_undo of step {row.name!r}", f"undo of step {row.name!r}", answer)
        if not isinstance(found, Done):
            attempt = await self.store.intend(saga, row.name, has_undo=True, undo=True, timeout=seconds)
            undoing = functions.begin(undo, functions.call(key, attempt), output, *spec.args, gets=_BACKWARDS)
            await call_user_code(undoing, functions.limit(spec.limits.timeout))
            self.at(SagaPoint.CALLED)
        await self.store.record(
            saga, row.name, row.kind, StepState.UNDONE, None, has_undo=True, overlapped=row.overlapped
        )

    async def _reconcile(
        self, spec: StepSpec, reconcile: Callable[..., Awaitable[object]], call: StepCall
    ) -> Done[Any] | NotDone:
        """Whether the remote system has done the call. Raises what `reconcile` raises, and SagaMisused if it raises a
        rejection: the handler would take that for the outcome of the call, which is still unknown."""
        asked = f"reconcile of step {spec.name!r}"
        try:
            asking = self.functions.begin(reconcile, call, *spec.args, gets="step")
            answer = await call_user_code(asking, self.functions.limit(spec.limits.timeout))
        except Exception as error:
            if refusal(error, self.fail_on) is None:
                raise
            raise SagaMisused(
                f"{asked} raised {type(error).__name__}, but a reconcile cannot refuse; "
                "return Done(result), NotDone() or Unknown()"
            ) from error
        return _certain(asked, f"step {spec.name!r}", answer)

    # ---------------------------------------------------------------------------------------------------------- records
    async def _record_output(self, spec: StepSpec, value: object) -> Any:
        output, value = spec.encode(value)
        await self._record(spec, StepState.DONE, output)
        return value

    async def _record_refusal(self, spec: StepSpec, refused: Reject) -> Reject:
        """Record a refusal, and return the exception that a replay will raise (L71), for this run to raise too."""
        stored = codecs.encode_refusal(refused)
        await self._record(spec, StepState.REJECTED, stored)
        again = spec.rejection(stored)
        again.__cause__ = refused
        return again.with_traceback(refused.__traceback__)

    async def _record(self, spec: StepSpec, state: StepState, output: StoredResult | None) -> None:
        with self.order.sending(spec) as sent:
            sent.position = await self.store.record(
                self.saga, spec.name, spec.kind, state, output, has_undo=spec.has_undo, overlapped=spec.overlapped,
                arguments=spec.arguments,
            )  # fmt: skip
        spec.finished = True
        self.at(SagaPoint.STEP_RECORDED)


def _certain(asked: str, of: str, answer: object) -> Done[Any] | NotDone:
    """The answer of the reconcile that `asked` names. Raises UnknownEffect if the remote system cannot tell, and
    SagaMisused for an invalid answer."""
    checked = checked_answer(asked, answer)
    if isinstance(checked, Unknown):
        raise UnknownEffect(f"{of}: the remote cannot say whether it was done")
    return checked


def injected(fn: Callable[..., Any], given: int, resources: Mapping[type, object]) -> dict[str, object]:
    """Keyword arguments for parameters that have the type of a resource and are not among the `given` positional
    ones."""
    if not resources:
        return {}
    if isinstance(fn, MethodType):  # a bound method is a new object each time; its function is not
        fn, given = fn.__func__, given + 1
    return {
        name: resources[wanted]
        for name, place, wanted in _parameters(fn)
        if wanted in resources and (place is None or place >= given)
    }


def _parameters(fn: Callable[..., Any]) -> _Parameters:
    function = function_of(fn)
    if function is None:
        return ()
    if fn is not function:  # a partial or a callable object has other parameter positions
        return _read(fn, function)
    if (known := _known.get(function)) is None:
        known = _known[function] = _read(fn, function)
    return known


def _read(fn: Callable[..., Any], function: FunctionType) -> _Parameters:
    found = []
    bound = fn.keywords if isinstance(fn, partial) else ()
    for place, parameter in enumerate(inspect.signature(fn).parameters.values()):
        if parameter.name in bound:
            continue
        wanted = _annotated(function, parameter.annotation)
        if isinstance(wanted, type) and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            by_name = parameter.kind is parameter.KEYWORD_ONLY
            found.append((parameter.name, None if by_name else place, wanted))
    return tuple(found)


def _annotated(function: FunctionType, annotation: Any) -> Any:
    try:
        return resolved(function, annotation) if isinstance(annotation, str) else annotation
    except (NameError, SyntaxError, TypeError, AttributeError):  # the annotation may be meant for type checkers only
        return None


def checked_answer(asked: str, answer: object) -> Done[Any] | NotDone | Unknown:
    """The answer of the reconcile that `asked` names. Raises SagaMisused for anything else."""
    if isinstance(answer, Done | NotDone | Unknown):
        return answer
    given = f"the class {answer.__name__}" if isinstance(answer, type) else type(answer).__name__
    raise SagaMisused(f"{asked} returned {given}; return Done(result), NotDone() or Unknown()")
