"""Runs a step that has no recorded outcome: its function, and the commits around it.

A `tx` step is one transaction with its checkpoint; a `call` step runs between an intent and its outcome. Both end with
a fenced write to the store, and return the output as a resume will get it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from idemconsumer.errors import Reject, SagaMisused, UnknownEffect
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.handler import Done, NotDone
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.saga import refusal
from idemconsumer.rules.values import StepKind, StepRow, StepState
from idemconsumer.sagas.children import ResultSpec, StartSpec, check_result
from idemconsumer.sagas.functions import StepFunctions
from idemconsumer.sagas.order import Order
from idemconsumer.sagas.probes import Probes
from idemconsumer.sagas.reconcile import ask_remote
from idemconsumer.sagas.recorded import Outputs
from idemconsumer.sagas.step import StepSpec, step_key
from idemconsumer.sagas.waits import FirstSpec, WaitSpec
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.user_code.call import call_in_transaction, call_user_code


class Steps:
    """The steps of one held saga. A Reject that they raise is recorded."""

    def __init__(
        self,
        store: PostgresLeases,
        saga: LeasedSaga,
        functions: StepFunctions,
        recorded: Outputs,
        probes: Probes,
        *,
        order: Order,
        fail_on: tuple[type[Exception], ...],
        at: Callable[[Point | SagaPoint, str, Sequence[bytes]], None],
    ) -> None:
        self._store = store
        self._saga = saga
        self._functions = functions
        self.recorded = recorded
        self._probes = probes
        self.order = order
        self._fail_on = fail_on
        self._tell = at

    @property
    def resources(self) -> Collection[object]:
        """What the app gives to handlers, and handlers to steps: a replay has others."""
        return self._functions.resources.values()

    async def rows(self) -> list[StepRow]:
        """What is recorded now."""
        return await self._store.steps(self._saga.key)

    async def run(self, spec: StepSpec, row: StepRow | None) -> Any:
        """Run a step that has no recorded outcome. `row` is its open intent, if there is one. Marks it as finished.
        Raises Held."""
        tracing = self._functions.tracing
        async with self._probes.trying(spec.fn, self._saga, self._fail_on):
            if spec.kind is StepKind.TX:
                with tracing.step("tx", spec.name, None):
                    return await self._transaction(spec)
            with tracing.step("call", spec.name, 1 if row is None else row.attempt + 1):
                return await self._call(spec, row)

    async def wait(self, spec: WaitSpec) -> StepRow | float:
        """Begin the wait, or look whether it is over. A float: it is not, for so many seconds. Of several the first one
        that is over closes the others, which are looked at no more (L74)."""
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
            found = await self._store.wait(
                self._saga, spec.name, spec.kind, spec.seconds, spec.signal, child=spec.child,
                overlapped=spec.overlapped, closes=closes,
            )  # fmt: skip
            sent.position = None if isinstance(found, float) else found.position
        if not isinstance(found, float):
            self._at(SagaPoint.STEP_RECORDED)
        elif isinstance(spec, ResultSpec) and spec.child is not None:
            check_result(spec, await self._store.kinship(self._saga.key, spec.child))
        return found

    async def decide(self, spec: StepSpec, value: bool) -> None:
        """Record which way the saga goes at a patch. Older records may be asked for only after it (L72)."""
        output, _ = spec.encode(value)
        await self._store.record(
            self._saga, spec.name, spec.kind, StepState.DONE, output, has_undo=False, overlapped=spec.overlapped
        )
        self._at(SagaPoint.STEP_RECORDED)

    async def _transaction(self, spec: StepSpec) -> Any:
        functions, seconds = self._functions, self._functions.seconds(spec.limits.timeout)
        self._at(SagaPoint.STEP_OPENING)
        async with self._store.step(
            self._saga, spec.name, has_undo=spec.has_undo, undo=False, timeout=seconds, arguments=spec.arguments
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
                refused = refusal(error, self._fail_on)
                if refused is None:
                    raise
            else:
                self._at(SagaPoint.STEP_COMMITTING)
                with self.order.sending(spec) as sent:
                    sent.position = await opened.finish(output, overlapped=spec.overlapped)
                spec.finished = True
                self._at(SagaPoint.STEP_COMMITTED)
                return value
        raise await self._record_refusal(spec, refused)

    async def _call(self, spec: StepSpec, row: StepRow | None) -> Any:
        saga, functions = self._saga, self._functions
        key = step_key(saga.scope, saga.key, spec.name)
        if row is not None and spec.reconcile is not None:  # an intent without outcome: the remote may have done it
            found = await ask_remote(functions, spec, functions.call(key, row.attempt), self._fail_on)
            if isinstance(found, Done):
                return await self._record_output(spec, found.result)
            if not isinstance(found, NotDone):
                raise UnknownEffect(f"step {spec.name!r}: the remote cannot say whether it was done")
        self._at(SagaPoint.INTENDING)
        attempt = await self._store.intend(
            saga,
            spec.name,
            has_undo=spec.has_undo,
            undo=False,
            overlapped=spec.overlapped,
            timeout=functions.seconds(spec.limits.timeout),
            arguments=spec.arguments,
        )
        self._at(SagaPoint.INTENDED)
        limit = functions.limit(spec.limits.timeout)
        try:
            running = functions.begin(spec.fn, functions.call(key, attempt), *spec.args, gets="step")
            value = await call_user_code(running, limit, forget=False)
        except Exception as error:
            refused = None if limit.caused(error) else refusal(error, self._fail_on)
            if refused is None:
                raise
            raise await self._record_refusal(spec, refused) from refused
        self._at(SagaPoint.CALLED)
        try:
            return await self._record_output(spec, value)
        except SagaMisused as error:  # L70
            raise UnknownEffect(f"{error}; its call was made, and is not repeated automatically") from error

    async def _record_output(self, spec: StepSpec, value: object) -> Any:
        output, value = spec.encode(value)
        await self._record(spec, StepState.DONE, output)
        return value

    async def _record_refusal(self, spec: StepSpec, refused: Reject) -> Reject:
        """Returns what a replay will raise (L71), to be raised by this run too."""
        stored = codecs.encode_refusal(refused)
        await self._record(spec, StepState.REJECTED, stored)
        again = spec.rejection(stored)
        again.__cause__ = refused
        return again.with_traceback(refused.__traceback__)

    async def _record(self, spec: StepSpec, state: StepState, output: StoredResult | None) -> None:
        with self.order.sending(spec) as sent:
            sent.position = await self._store.record(
                self._saga, spec.name, spec.kind, state, output, has_undo=spec.has_undo, overlapped=spec.overlapped,
                arguments=spec.arguments,
            )  # fmt: skip
        spec.finished = True
        self._at(SagaPoint.STEP_RECORDED)

    def _at(self, point: SagaPoint) -> None:
        self._tell(point, self._saga.handler, (self._saga.key,))
