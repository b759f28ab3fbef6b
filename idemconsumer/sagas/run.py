"""One run of a saga's handler: steps by name, checkpointed, replayed, and never completed by accident.

Steps are known by their names. On a resume the handler runs from its start; a step that is recorded returns its
stored output and is not run. What goes wrong inside a step, other than a Reject, *interrupts* the run: a flag is set
that no `except`, `gather`, `wait` or `timeout` of user code can clear, each later operation raises again, and the
engine completes nothing while the flag is set or a step is in flight (L4).
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar, TypeVarTuple

from idemconsumer.errors import (
    BadMessage,
    Interrupted,
    Reject,
    SagaChanged,
    SagaMisused,
    SagaParked,
    SelfCancelled,
    Unavailable,
    UnknownEffect,
)
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.handler import Done, NotDone, Step, Tx, Unknown
from idemconsumer.ports.leases import LeasedSaga, LeaseStore
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import State, StepKind, StepRow, StepState
from idemconsumer.sagas import outputs
from idemconsumer.sagas.injection import injected
from idemconsumer.user_code.call import call_user_code
from idemconsumer.user_code.cancellation import CancellationWatch
from idemconsumer.user_code.time_limit import TimeLimit

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_LONGEST_NAME: Final = 200  # characters
_UNDO: Final = "undo:"
_NAMESPACE: Final = uuid.UUID("6f6a0f8e-6f0f-5d1b-9a57-3b1f0a7f7c11")


class SagaInterrupted(BaseException):
    """Raised in a saga's handler by every operation after the run was interrupted. Let it pass."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """What a `call` step's function is given; see `ports_sagas.Step`."""

    key: uuid.UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A step as this run's handler asked for it."""

    kind: StepKind
    fn: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    undo: Callable[..., Awaitable[object]] | None
    reconcile: Callable[..., Awaitable[Any]] | None = None


def step_key(scope: str, key: bytes, name: str, *, undo: bool = False) -> uuid.UUID:
    """The key that a remote is given: the same for every attempt of a step, another one for its undo."""
    return uuid.uuid5(_NAMESPACE, f"{len(scope)}:{scope}:{key.hex()}:{_UNDO if undo else ''}{name}")


class SagaRun:
    """See `ports_sagas.Saga`."""

    def __init__(
        self,
        store: LeaseStore,
        holding: LeasedSaga,
        rows: Sequence[StepRow],
        *,
        timeout: float,
        lease: float,
        fail_on: tuple[type[Exception], ...],
        resources: Mapping[type, object],
        accepted: bool = False,
        at: Callable[[Point | SagaPoint, str, Sequence[bytes]], None],
    ) -> None:
        self._store = store
        self._holding = holding
        self._rows = {row.name: row for row in rows}
        self._timeout = timeout
        self._lease = lease
        self._fail_on = fail_on
        self._resources = resources
        self._accepted = accepted  # a person lets it go on with a handler that asks for other steps
        self._at = at
        self._overlapped: set[str] = set()
        self._in_flight: dict[str, asyncio.Task[Any]] = {}
        self._unfinished: list[str] = []  # steps asked for, begun or not, that have not come to an end
        self._open = {row.name for row in rows if row.state is StepState.INTENT}  # calls without a known outcome
        self._over = False
        self._main: asyncio.Task[Any] | None = None
        self._met = asyncio.Event()  # another step has been asked for
        done = [row for row in rows if row.position is not None]
        self._finished_last = max(done, key=lambda row: row.position or 0).name if done else None
        self._calls: dict[str, Asked] = {}  # asked for, begun or not
        self.asked: dict[str, Asked] = {}
        self.progressed = False  # a step has finished in this run
        self.rejected = False  # a step of this run was rejected, now or before
        self.interruption: BaseException | None = None
        self._from: tuple[BaseException, str] | None = None  # an error, and the step that it came from

    # -------------------------------------------------------------------------------------------- what a handler sees
    @property
    def recovery_point(self) -> str | None:
        return self._finished_last

    def tx(
        self,
        name: str,
        fn: Callable[[Tx, *Ts], Awaitable[R]],
        /,
        *args: *Ts,
        undo: Callable[[Tx, R, *Ts], Awaitable[object]] | None = None,
    ) -> Coroutine[Any, Any, R]:
        # Noted when it is asked for and not when it begins: a task may be forgotten before its first step.
        self._unfinished.append(name)
        asked = Asked(StepKind.TX, fn, args, undo)
        return self._ask(name, asked, lambda: self._tx_step(name, asked))

    def call(
        self,
        name: str,
        fn: Callable[[Step, *Ts], Awaitable[R]],
        /,
        *args: *Ts,
        undo: Callable[[Step, R, *Ts], Awaitable[object]] | None = None,
        reconcile: Callable[[Step, *Ts], Awaitable[Done[R] | NotDone | Unknown]] | None = None,
    ) -> Coroutine[Any, Any, R]:
        self._unfinished.append(name)
        asked = Asked(StepKind.CALL, fn, args, undo, reconcile)
        given: object = name
        if isinstance(given, str):  # anything else is refused when it begins
            self._calls[given] = asked
        return self._ask(name, asked, lambda: self._call_step(name, asked))

    # -------------------------------------------------------------------------------------------------------- one step
    async def _ask(self, name: str, asked: Asked, run: Callable[[], Awaitable[Any]]) -> Any:
        if self._over or self.interruption is not None:
            raise SagaInterrupted(f"step {name!r} is asked for when the run is over") from self.interruption
        outside = CancellationWatch()
        try:
            self._meet(name, asked)
            row = self._rows.get(name)
            if row is not None and row.state is StepState.REJECTED:
                await self._let_branches_on(row)
                raise codecs.decode_rejection(row.output)
            if row is not None and row.state is not StepState.INTENT:
                output = decode_output(name, asked.fn, row.output)
            elif self._holding.state is State.UNDOING:
                await self._let_branches_on(row)
                raise Replayed(name)
            else:
                if asyncio.current_task() is self._main:  # a branch has no place among what the others ask for
                    self._check_met(finished_only=True)
                try:
                    outputs.check(asked.fn)
                except TypeError as error:  # before the remote has done what could not be stored
                    raise SagaMisused(f"step {name!r} returns what cannot be stored: {error}") from None
                output = await self._run(name, run)
            self._unfinished.remove(name)
            return output
        except Reject:
            self._unfinished.remove(name)
            self.rejected = True
            raise
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            from_outside = cancelled and outside.requested
            cause = _cancellation(error, from_outside) if cancelled else error
            self.interrupt(cause, name)
            if from_outside:
                raise
            raise SagaInterrupted(f"step {name!r}: {type(cause).__name__}") from error

    def _meet(self, name: str, asked: Asked) -> None:
        _check_name(name)
        if name in self.asked:
            raise SagaMisused(
                f"step {name!r} is asked for twice in one run, and a step is known by its name; "
                'give each one its own, in a loop with a suffix: saga.tx(f"line_{n}", …)'
            )
        self.asked[name] = asked
        self._met.set()
        row = self._rows.get(name)
        if row is not None and row.kind is not asked.kind:
            raise SagaChanged(
                f"step {name!r} was recorded as {row.kind.name.lower()}, and is now {asked.kind.name.lower()}"
            )

    def _check_met(self, *, finished_only: bool) -> None:
        """L6: nothing recorded may be passed over. What overlapped another step, or was asked for by a branch, has no
        fixed place before the end."""
        if self._accepted:
            return
        for row in self._rows.values():
            early = row.overlapped or row.state is StepState.INTENT
            if row.name not in self.asked and not (finished_only and early):
                raise SagaChanged(f"step {row.name!r} is recorded, and the handler no longer asks for it")

    async def _let_branches_on(self, row: StepRow | None) -> None:
        """Backward, the step of `row` ends the replay, which is to ask for all that is to be undone; other branches may
        not be as far yet. What had finished before this step does not depend on it, so it is asked for, unless the
        handler has changed."""
        if self._holding.state is not State.UNDOING:
            return
        branch = asyncio.current_task() is not self._main
        awaited = {
            other.name
            for other in self._rows.values()
            if other.has_undo and other.state in (StepState.DONE, StepState.UNDO_INTENT)
            if branch or other.overlapped
            if row is None or (other.position or 0) < (row.position or 0)
        }
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                while not awaited <= self.asked.keys():
                    self._met.clear()
                    await self._met.wait()

    async def _run(self, name: str, run: Callable[[], Awaitable[Any]]) -> Any:
        if self._in_flight:
            self._overlapped |= {name, *self._in_flight}
        task = asyncio.current_task()
        assert task is not None
        if task is not self._main:
            self._overlapped.add(name)  # it may as well have come at another time
        self._in_flight[name] = task
        try:
            return await run()
        finally:
            del self._in_flight[name]

    async def _tx_step(self, name: str, asked: Asked) -> Any:
        holding, has_undo = self._holding, asked.undo is not None
        self._point(SagaPoint.STEP_OPENING)
        async with self._store.step(holding, name, has_undo=has_undo, undo=False) as step:
            limit = TimeLimit(self._timeout, self._lease)
            try:
                value = await call_user_code(self.called(asked.fn, step.tx(), *asked.args, gets="tx"), limit)
                step.check()
                output, value = _stored(name, asked.fn, value)
                limit.check()
            except Exception as error:
                cause = error if isinstance(error, Reject) else limit.blame(step.diagnose(error))
                refusal = self._refusal(cause)
                if refusal is None:
                    raise cause from error
            else:
                self._point(SagaPoint.STEP_COMMITTING)
                await step.finish(output, overlapped=name in self._overlapped)
                self._finish(name)
                self._point(SagaPoint.STEP_COMMITTED)
                return value
        await self._record(
            name, StepKind.TX, StepState.REJECTED, codecs.encode_rejection(refusal.code, refusal.body), has_undo
        )
        raise refusal

    async def _call_step(self, name: str, asked: Asked) -> Any:
        holding, has_undo = self._holding, asked.undo is not None
        key = step_key(holding.scope, holding.key, name)
        row = self._rows.get(name)
        if row is not None and asked.reconcile is not None:  # an intent without outcome: the remote may have done it
            found = await self._reconcile(name, asked.reconcile, StepCall(key, row.attempt), asked.args)
            if isinstance(found, Done):
                output, result = _stored(name, asked.fn, found.result)
                await self._record(name, StepKind.CALL, StepState.DONE, output, has_undo)
                return result
            if not isinstance(found, NotDone):
                raise UnknownEffect(f"step {name!r}: the remote cannot say whether it was done")
        self._point(SagaPoint.INTENDING)
        self._open.add(name)
        attempt = await self._store.intend(holding, name, has_undo=has_undo, undo=False)
        self._point(SagaPoint.INTENDED)
        limit = TimeLimit(self._timeout)
        try:
            value = await call_user_code(self.called(asked.fn, StepCall(key, attempt), *asked.args, gets="step"), limit)
        except Exception as error:
            refusal = None if limit.caused(error) else self._refusal(error)
            if refusal is None:
                raise
            body = codecs.encode_rejection(refusal.code, refusal.body)
            await self._record(name, StepKind.CALL, StepState.REJECTED, body, has_undo)
            raise refusal from refusal.__cause__
        self._point(SagaPoint.CALLED)
        output, value = _stored(name, asked.fn, value)
        await self._record(name, StepKind.CALL, StepState.DONE, output, has_undo)
        return value

    async def _reconcile(
        self, name: str, fn: Callable[..., Awaitable[Any]], given: StepCall, args: tuple[Any, ...]
    ) -> Done[Any] | NotDone | Unknown:
        try:
            found = await call_user_code(self.called(fn, given, *args, gets="step"), TimeLimit(self._timeout))
        except Exception as error:
            if self._refusal(error) is None:
                raise
            # Not for the handler, which would take it for the end of the call that nobody knows.
            raise SagaMisused(
                f"reconcile of step {name!r} raised {type(error).__name__}, and it has nothing to refuse; "
                "return Done(result), NotDone() or Unknown()"
            ) from error
        return answered(f"reconcile of step {name!r}", found)

    def _refusal(self, error: Exception) -> Reject | None:
        """The final refusal that `error` is, if it is one. One of `fail_on` becomes what it is after a resume."""
        if isinstance(error, Reject):
            return error
        if not isinstance(error, self._fail_on) or isinstance(
            error, (Unavailable, Interrupted, SagaParked, SelfCancelled)
        ):
            return None
        refusal = Reject(type(error).__name__)
        refusal.__cause__ = error
        return refusal

    async def _record(
        self, name: str, kind: StepKind, state: StepState, output: StoredResult | None, has_undo: bool
    ) -> None:
        overlapped = name in self._overlapped
        await self._store.record(self._holding, name, kind, state, output, has_undo=has_undo, overlapped=overlapped)
        self._finish(name)
        self._point(SagaPoint.STEP_RECORDED)

    def _finish(self, name: str) -> None:
        self.progressed, self._finished_last = True, name
        self._open.discard(name)

    def _point(self, point: SagaPoint) -> None:
        self._at(point, self._holding.handler, (self._holding.key,))

    # ------------------------------------------------------------------------------------------------ the engine
    async def main(self, handler: Callable[[], Awaitable[object]]) -> object:
        """Run the handler in this task. What it asks for has a place among the steps; other tasks are branches (L13),
        which come to theirs in any order."""
        self._main = asyncio.current_task()
        return await handler()

    def interrupt(self, error: BaseException, step: str | None = None) -> None:
        """End this run. The first cause stays."""
        if self.interruption is None:
            self.interruption = error
            self._from = None if step is None else (error, step)

    def called(self, fn: Callable[..., Awaitable[Any]], *args: object, gets: str) -> Awaitable[Any]:
        """Call the function of a step with its arguments and the resources that it asks for, and say what to write
        where it cannot be called like that. `gets`: what it is given before the step's own arguments."""
        more = injected(fn, len(args), self._resources)
        try:
            running: object = fn(*args, **more)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise TypeError(
                f"{error}; it is called with {gets}, and then with the arguments of the step, "
                "and by name with the app's resources (@app.resource) whose types its other parameters have"
            ) from None
        if not inspect.isawaitable(running):
            name = getattr(fn, "__qualname__", type(fn).__name__)
            raise TypeError(f"{name} is not async, it returned {type(running).__name__}; write async def")
        return running

    def step_of(self, error: BaseException) -> str | None:
        """The name of the step that `error` came from, where its text does not say so."""
        ours = isinstance(error, SagaMisused | SagaParked)
        return self._from[1] if self._from is not None and self._from[0] is error and not ours else None

    async def settle(self, *, rejected: bool = False) -> None:
        """The handler has ended: steps that it left in flight interrupt the run, are cancelled and waited for; so do
        those that it never let begin, unless it was `rejected`: nothing of them is open then. What is asked for from
        now on is refused."""
        if self._in_flight:
            names = ", ".join(map(repr, self._in_flight))
            self.interrupt(SagaMisused(f"the handler ended while step {names} was in flight; await every step"))
            for task in self._in_flight.values():
                task.cancel()
            await asyncio.wait(self._in_flight.values())
        elif self._unfinished and not rejected:
            names = ", ".join(map(repr, self._unfinished))
            self.interrupt(
                SagaMisused(f"the handler ended before step {names}, which it had asked for; await every step")
            )
        self._over = True

    async def siblings(self) -> None:
        """A Reject has left the handler: let the steps beside it come to their own end (L7)."""
        if self._in_flight:
            await asyncio.wait(self._in_flight.values())

    async def resolve(self, rows: Sequence[StepRow]) -> None:
        """A rejection cut off calls beside it. Learn how each ended: from its reconcile, or by the same call with the
        same key (L4). Raises UnknownEffect when that cannot be known, or what the call raises."""
        self._rows = {row.name: row for row in rows}
        for name, row in self._rows.items():
            if row.state is not StepState.INTENT:
                continue
            if (asked := self._calls.get(name)) is None:
                raise UnknownEffect(f"it was rejected while nobody knows how step {name!r} ended")
            self.asked[name] = asked
            try:
                await self._call_step(name, asked)
            except Reject:  # recorded, so that it is known
                continue
            except Exception as error:
                self._from = error, name
                raise

    def check_complete(self) -> None:
        """Before completion every recorded step must have been asked for, and every call must have a known end."""
        self._check_met(finished_only=False)
        if self._open:
            raise UnknownEffect(f"the handler has ended, and nobody knows how step {min(self._open)!r} did")


def answered(who: str, answer: object) -> Done[Any] | NotDone | Unknown:
    """What a reconcile has said. Raises SagaMisused for what is no answer."""
    if isinstance(answer, Done | NotDone | Unknown):
        return answer
    said = f"the class {answer.__name__}" if isinstance(answer, type) else type(answer).__name__
    raise SagaMisused(f"{who} returned {said}; return Done(result), NotDone() or Unknown()")


def _cancellation(error: BaseException, from_outside: bool) -> BaseException:
    """What is told of a step that ended by CancelledError."""
    cause: BaseException
    if from_outside:
        cause = asyncio.CancelledError("the handler cancelled it, itself or by a timeout or a TaskGroup around it")
    else:
        cause = SelfCancelled()
    return cause.with_traceback(error.__traceback__)


class Replayed(Exception):
    """An undoing saga's handler has been replayed to its first unfinished step."""


def _check_name(name: object) -> None:
    """Raises SagaMisused for what could not be stored, shown, or told from an undo."""
    if not isinstance(name, str):
        raise SagaMisused(f'a step\'s name is {name!r}; write a text, such as saga.tx("ride_created", …)')
    if not name or not name.isprintable() or name != name.strip() or len(name) > _LONGEST_NAME:
        shown = repr(name if len(name) <= _LONGEST_NAME else f"{name[:40]}…")
        raise SagaMisused(f"a step's name is {shown}; write a printable text of 1 to {_LONGEST_NAME} characters")
    if name.startswith(_UNDO):
        raise SagaMisused(
            f"step {name!r}: names that start with {_UNDO!r} are reserved, since undos have their keys by them; "
            f"choose another, such as {name.replace(':', '_')!r}"
        )


def _stored(name: str, fn: Callable[..., Any], value: object) -> tuple[StoredResult | None, Any]:
    try:
        return outputs.encode(fn, value)
    except TypeError as error:
        raise SagaMisused(f"step {name!r}: {error}") from error


def decode_output(name: str, fn: Callable[..., Any], output: StoredResult | None) -> object:
    try:
        return outputs.decode(fn, output)
    except (BadMessage, TypeError) as error:
        raise SagaChanged(f"the stored output of step {name!r} no longer decodes: {error}") from error
