"""One run of a saga's handler: steps by name, checkpointed, replayed, and never completed by accident.

Steps are identified by their names. On a resume the handler runs from its start; a recorded step returns its stored
output without running. An error inside a step, other than a Reject, *interrupts* the run: a flag is set that no
`except`, `gather`, `wait` or `timeout` of user code can clear, each later operation raises again, and the engine
completes nothing while the flag is set or a step is in flight (L4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

from idemconsumer.errors import Reject, SagaChanged, SagaMisused, SagaParked, SelfCancelled, UnknownEffect
from idemconsumer.message import codecs
from idemconsumer.ports.handler import Done, NotDone, Step, Tx, Unknown
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.rules import replay
from idemconsumer.rules.replay import Answer
from idemconsumer.rules.values import State, StepKind, StepRow, StepState
from idemconsumer.sagas.step import StepSpec
from idemconsumer.sagas.steps import Steps
from idemconsumer.user_code.cancellation import CancellationWatch

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class SagaInterrupted(BaseException):
    """Raised in a saga's handler by every operation after the run was interrupted. Do not catch it."""


class Replayed(Exception):
    """An undoing saga's handler has been replayed to its first unfinished step."""


class SagaRun:
    """See `ports.handler.Saga`."""

    def __init__(
        self, steps: Steps, saga: LeasedSaga, rows: Sequence[StepRow], *, patience: float, accepted: bool = False
    ) -> None:
        """`accepted`: a person lets it continue with a handler that asks for other steps. `patience`: how many seconds
        a replay, at its end, waits for the handler's other branches."""
        self._steps = steps
        self._saga = saga
        self._rows = {row.name: row for row in rows}
        self._patience = patience
        self._accepted = accepted
        self._in_flight: dict[str, asyncio.Task[Any]] = {}
        self._unfinished: list[str] = []  # steps asked for, begun or not, that have not ended
        self._open = {row.name for row in rows if row.state is StepState.INTENT}  # calls without a known outcome
        self._over = False
        self._main: asyncio.Task[Any] | None = None
        self._step_requested = asyncio.Event()
        self._recovery_point = replay.recovery_point(rows)
        self._calls: dict[str, StepSpec] = {}  # asked for, begun or not
        self.asked: dict[str, StepSpec] = {}
        self.progressed = False  # a step has finished in this run
        self.rejected = False  # a step of this run was rejected, now or before
        self.interruption: BaseException | None = None
        self._from: tuple[BaseException, str] | None = None  # an error, and the step that it came from

    # -------------------------------------------------------------------------------------------- what a handler sees
    @property
    def recovery_point(self) -> str | None:
        return self._recovery_point

    def tx(
        self,
        name: str,
        fn: Callable[[Tx, *Ts], Awaitable[R]],
        /,
        *args: *Ts,
        undo: Callable[[Tx, R, *Ts], Awaitable[object]] | None = None,
    ) -> Coroutine[Any, Any, R]:
        # Recorded when it is asked for, not when it begins: its task may be dropped before it first runs.
        self._unfinished.append(name)
        return self._ask(StepSpec(name, StepKind.TX, fn, args, undo))

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
        spec = StepSpec(name, StepKind.CALL, fn, args, undo, reconcile)
        given: object = name
        if isinstance(given, str):  # anything else is refused when it begins
            self._calls[given] = spec
        return self._ask(spec)

    # -------------------------------------------------------------------------------------------------------- one step
    async def _ask(self, spec: StepSpec) -> Any:
        name = spec.name
        if self._over or self.interruption is not None:
            raise SagaInterrupted(f"step {name!r} is requested after the run has ended") from self.interruption
        outside = CancellationWatch()
        try:
            self._register_step(spec)
            output = await self._replay_or_run(spec, self._rows.get(name))
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

    def _register_step(self, spec: StepSpec) -> None:
        spec.check_name()
        name = spec.name
        if name in self.asked:
            raise SagaMisused(
                f"step {name!r} is requested twice in one run, and a step is identified by its name; "
                'give each one its own, in a loop with a suffix: saga.tx(f"line_{n}", …)'
            )
        self.asked[name] = spec
        self._step_requested.set()
        row = self._rows.get(name)
        if row is not None and row.kind is not spec.kind:
            raise SagaChanged(
                f"step {name!r} was recorded as {row.kind.name.lower()}, and is now {spec.kind.name.lower()}"
            )

    async def _replay_or_run(self, spec: StepSpec, row: StepRow | None) -> Any:
        answer = replay.answer(row, self._saga.state)
        if answer is Answer.RUN:
            if asyncio.current_task() is self._main:  # a branch's steps have no fixed place
                self._check_nothing_passed_over(at_end=False)
            spec.check_output_type()
            return await self._run_in_flight(spec, row)
        if answer is Answer.END:
            await self._await_other_branches(row)
            raise Replayed(spec.name)
        assert row is not None
        if answer is Answer.REJECTION:
            await self._await_other_branches(row)
            raise codecs.decode_rejection(row.output)
        return spec.decode(row.output)

    def _check_nothing_passed_over(self, *, at_end: bool) -> None:
        if self._accepted:
            return
        if (row := replay.passed_over(self._rows.values(), self.asked, at_end=at_end)) is not None:
            raise SagaChanged(f"step {row.name!r} is recorded, and the handler no longer requests it")

    async def _await_other_branches(self, row: StepRow | None) -> None:
        """When undoing, the step of `row` ends the replay. By then every step to undo must be asked for, but
        other branches may not have got that far."""
        if self._saga.state is not State.UNDOING:
            return
        in_branch = asyncio.current_task() is not self._main
        awaited = replay.asked_by_branches(self._rows.values(), row, in_branch=in_branch)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while not awaited <= self.asked.keys():
                    self._step_requested.clear()
                    await self._step_requested.wait()

    async def _run_in_flight(self, spec: StepSpec, row: StepRow | None) -> Any:
        name, task = spec.name, asyncio.current_task()
        assert task is not None
        for other in self._in_flight:
            self.asked[other].overlapped = spec.overlapped = True
        if task is not self._main:
            spec.overlapped = True  # it could have come at another time
        self._in_flight[name] = task
        try:
            return await self._run(spec, row)
        finally:
            del self._in_flight[name]

    async def _run(self, spec: StepSpec, row: StepRow | None) -> Any:
        if spec.kind is StepKind.CALL:
            self._open.add(spec.name)
        try:
            return await self._steps.run(spec, row)
        finally:
            if spec.finished:  # also if it was refused, or cut off after its commit
                self.progressed, self._recovery_point = True, spec.name
                self._open.discard(spec.name)

    # ------------------------------------------------------------------------------------------------ the engine
    async def main(self, handler: Callable[[], Awaitable[object]]) -> object:
        """Run the handler in this task. Steps asked for in it have a fixed order; other tasks are branches (L13), which
        may reach their steps in any order."""
        self._main = asyncio.current_task()
        return await handler()

    def interrupt(self, error: BaseException, step: str | None = None) -> None:
        """End this run. The first cause is kept."""
        if self.interruption is None:
            self.interruption = error
            self._from = None if step is None else (error, step)

    def step_of(self, error: BaseException) -> str | None:
        """The name of the step that `error` came from, unless its text already says so."""
        ours = isinstance(error, SagaMisused | SagaParked)
        return self._from[1] if self._from is not None and self._from[0] is error and not ours else None

    async def settle(self, *, rejected: bool = False) -> None:
        """Close the run once the handler has ended. Steps that it left in flight interrupt the run, and are cancelled
        and awaited. Steps that never began interrupt it too, unless it was `rejected`: then they leave nothing open.
        Steps asked for from now on are refused."""
        if self._in_flight:
            names = ", ".join(map(repr, self._in_flight))
            self.interrupt(SagaMisused(f"the handler ended while step {names} was in flight; await every step"))
            for task in self._in_flight.values():
                task.cancel()
            await asyncio.wait(self._in_flight.values())
        elif self._unfinished and not rejected:
            names = ", ".join(map(repr, self._unfinished))
            self.interrupt(
                SagaMisused(f"the handler ended before step {names}, which it had requested; await every step")
            )
        self._over = True

    async def siblings(self) -> None:
        """The handler raised Reject: let the steps still in flight finish (L7)."""
        if self._in_flight:
            await asyncio.wait(self._in_flight.values())

    async def resolve(self, rows: Sequence[StepRow]) -> None:
        """A rejection cut off calls beside it. Learn how each ended: from its reconcile, or by the same call with the
        same key (L4). Raises UnknownEffect when neither can tell, or what the call raises."""
        self._rows = {row.name: row for row in rows}
        for name, row in self._rows.items():
            if row.state is not StepState.INTENT:
                continue
            if (spec := self._calls.get(name)) is None:
                raise UnknownEffect(f"it was rejected while the outcome of step {name!r} is unknown")
            self.asked[name] = spec
            try:
                await self._run(spec, row)
            except Reject:  # recorded, so that it is known
                continue
            except Exception as error:
                self._from = error, name
                raise

    def check_complete(self) -> None:
        """Before completion every recorded step must have been asked for, and every call must have a known outcome."""
        self._check_nothing_passed_over(at_end=True)
        if self._open:
            raise UnknownEffect(f"the handler has ended, and the outcome of step {min(self._open)!r} is unknown")


def _cancellation(error: BaseException, from_outside: bool) -> BaseException:
    """The error to report for a step that ended with CancelledError."""
    cause: BaseException
    if from_outside:
        cause = asyncio.CancelledError("the handler cancelled it, itself or by a timeout or a TaskGroup around it")
    else:
        cause = SelfCancelled()
    return cause.with_traceback(error.__traceback__)
