"""One run of a saga's handler: steps by name, checkpointed, replayed, and never completed by accident.

Steps are identified by their names. On a resume the handler runs from its start; a recorded step returns its stored
output without running. An error inside a step, other than a Reject, *interrupts* the run: a flag is set that no
`except`, `gather`, `wait` or `timeout` of user code can clear, and each later operation raises again (L4). Nothing new
begins before the replay is over (L24), or after the handler has ended (L26). A run may be completed or rejected only
without an interruption, when all recorded steps have been requested (L6, L25), nothing is in flight, and each call has
a known outcome (L4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, NoReturn

from idemconsumer.errors import OfTheEngine, Reject, SagaChanged, SagaMisused, SagaParked, SelfCancelled, UnknownEffect
from idemconsumer.rules import replay
from idemconsumer.rules.replay import StepAnswer
from idemconsumer.rules.saga import unknown_calls
from idemconsumer.rules.values import State, StepKind, StepRow, StepState
from idemconsumer.sagas.activity import Activity
from idemconsumer.sagas.branches import Group, NotBegun, group_of
from idemconsumer.sagas.comparison import Comparison
from idemconsumer.sagas.order import TURNS
from idemconsumer.sagas.step import StepSpec, WaitSpec, is_patch
from idemconsumer.sagas.steps import Steps
from idemconsumer.user_code.cancellation import CancellationWatch, LateCancellations

_NOTHING: Final = object()

# The run and the step whose function runs in this task, or in a task that created this one.
_inside: Final[ContextVar[tuple[object, str] | None]] = ContextVar("inside a step", default=None)


class SagaInterrupted(OfTheEngine):
    """Raised in a saga's handler by every operation after the run was interrupted. Do not catch it."""


class _TooLate(SagaInterrupted):
    """The handler has ended, so nothing begins. That alone does not interrupt the run: it may have rejected."""


class Replayed(Exception):
    """An undoing saga's handler has been replayed to its first unfinished step."""


class SagaRun:
    """Answers the requests of the handler's `UsersSaga`. The engine closes it."""

    def __init__(
        self, steps: Steps, phase: State, compared: Comparison, finished: Callable[[], None], *, timeout: float
    ) -> None:
        """`phase`: UNDOING if nothing new may run. `finished` is called whenever a step has finished. `timeout`: the
        handler's, in seconds; a step waits as long for requests of the handler's other branches."""
        self.steps = steps
        self._phase = phase
        self._finished = finished
        self.compared = compared
        self.recovery_point = replay.recovery_point(compared.rows.values())
        self.longest = timeout  # seconds that a requested step of this run may take (L45)
        self.progressed = False  # a step has finished in this run
        self.interruption: BaseException | None = None
        self.refused = False  # the handler has rejected, before anything interrupted the run
        self.activity = Activity(steps.saga.handler, timeout, self.interrupt)
        self._calls: dict[str, StepSpec] = {}  # requested calls, begun or not
        self._watches: dict[StepSpec, CancellationWatch] = {}  # of the requested steps that have not ended
        self._late = LateCancellations()
        self._refusals = False  # a refusal of a step has been raised in the handler
        self._ended = False  # the handler has ended, so nothing new begins
        self._over = False
        self._from: tuple[BaseException, str] | None = None  # an error, and the step that raised it
        self._order = steps.order
        self._order.ending = self._ending
        self._order.replayed = self.activity.wake.set

    def interrupt(self, error: BaseException, step: str | None = None) -> None:
        """End this run. The first cause is kept."""
        if self.interruption is None:
            self.interruption = error
            self._from = None if step is None else (error, step)
            self.activity.look_again()
            self._order.close()

    # -------------------------------------------------------------------------------------------------------- requests
    def request(self, spec: StepSpec) -> Coroutine[Any, Any, Any]:
        """The coroutine that the handler awaits. The request is recorded now and not when the coroutine first runs: its
        task may be dropped before."""
        name: object = spec.name
        if spec.kind is StepKind.CALL:
            self.longest = max(self.longest, spec.limits.timeout or 0.0)
            if isinstance(name, str):  # any other type is refused when the step begins
                self._calls[name] = spec
        self.activity.unfinished.append(spec.name)
        return self._ask(spec)

    # -------------------------------------------------------------------------------------------------------- one step
    async def _ask(self, spec: StepSpec) -> Any:
        name = spec.name
        self.activity.check_loop()
        if self._over or self.interruption is not None:
            refused = SagaInterrupted(f"step {name!r} is requested after the run has ended")
            await self.activity.refuse(refused)
            raise refused from self.interruption
        outside = self._watches[spec] = self._late.watch()
        self.activity.step_begins()
        try:
            inside = _inside.get()
            for each in spec.parts:
                self.activity.wake.set()
                self.compared.ask(each, inside[1] if inside is not None and inside[0] is self else None)
            output = await self._outcome(spec, outside)
            self.activity.unfinished.remove(name)
            spec.forget_arguments()
            self._late.defer(outside)
            return output
        except Reject:
            self._refusals = True
            self.activity.unfinished.remove(name)
            self._late.defer(outside)
            raise
        except NotBegun:
            self.activity.unfinished.remove(name)
            self.compared.forget(spec.parts)
            raise
        except _TooLate as late:
            await self.activity.refuse(late)
            raise
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            from_outside = cancelled and outside.requested
            if from_outside and self._refusals and name not in self.compared.open:  # as in each replay (L75)
                self.activity.unfinished.remove(name)
                raise
            cause = error
            if cancelled:
                by = "the handler cancelled it, itself or by a timeout or a TaskGroup around it"
                cut = asyncio.CancelledError(by) if from_outside else SelfCancelled()
                cause = cut.with_traceback(error.__traceback__)
            self.interrupt(cause, name)
            if from_outside:
                raise
            raise SagaInterrupted(f"step {name!r}: {type(cause).__name__}") from error
        finally:
            del self._watches[spec]
            if outside.requested:
                self._order.ended()
            self.activity.step_ends()

    async def _outcome(self, spec: StepSpec, outside: CancellationWatch) -> Any:
        """The output of a step, in its turn. Once the step has finished, a cancellation is delayed until its output is
        handed out: every run gets the recorded outputs, whatever else it sees (L75)."""
        row, output, refused = spec.row(self.compared.rows), _NOTHING, None
        if outside.requested and (row is None or row.position is None):
            raise asyncio.CancelledError(f"step {spec.name!r} has not begun")
        while True:
            try:
                if output is _NOTHING:
                    try:
                        output = await self._replay_or_run(spec, row)
                    except Reject as error:
                        output = refused = error
                if refused is not None or not self._order.gives(spec.recorded_as):
                    await self._turn(spec, None if refused is None else self._calls_in_flight)
                break
            except asyncio.CancelledError:
                if not outside.requested or self.interruption is not None:
                    raise
                if output is _NOTHING and (row := await self._finished_row(spec, row)) is None:
                    raise
        if refused is not None:
            raise refused
        return output

    async def _finished_row(self, spec: StepSpec, row: StepRow | None) -> StepRow | None:
        """The record of a cancelled step, if it has finished all the same."""
        if row is not None and row.position is not None:
            return row
        unanswered = [each for each in spec.parts if self._order.unanswered(each.name)]
        if not unanswered and not self._order.finished(spec.recorded_as):
            return None
        reading = asyncio.create_task(self.steps.rows())
        while not reading.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([reading])
        rows = {each.name: each for each in reading.result() if each.position is not None}
        for each in unanswered:
            self._order.found(each, rows[each.name].position if each.name in rows else None)
        row = spec.row(rows)
        if row is not None and not spec.finished:
            spec.finished = True
            self.compared.open.discard(spec.name)
            self._finish(row.name)
        return row

    def _ending(self) -> bool:
        """Whether a cancelled step is still running: it has not ended, and is not waiting for its turn."""
        cancelled = [spec for spec, outside in self._watches.items() if outside.requested]
        return any(not self._order.finished(spec.recorded_as) for spec in cancelled)

    async def _turn(self, spec: StepSpec, last: Callable[[], Awaitable[None]] | None) -> None:
        """Wait until all steps that finished before this one have been handed out (L72)."""
        name = spec.recorded_as
        missing = await self._order.turn(name, last)
        if missing is not None and missing not in self.compared.asked and self._phase is State.PROCESSING:
            raise SagaChanged(f"step {missing!r} finished before {name!r}, and the handler no longer requests it")

    async def _calls_in_flight(self) -> None:
        """Wait for calls that a TaskGroup would cut off at the coming refusal, in each run again (L75)."""
        for _ in range(TURNS):
            if self.compared.unasked.calls:  # of a task within a task, which may not have begun yet
                await asyncio.sleep(0)
        await self.activity.end_of_flight(self.compared.rows)

    async def _replay_or_run(self, spec: StepSpec, row: StepRow | None) -> Any:
        answer, group = replay.answer(row, self._phase), group_of(self)
        end = answer is StepAnswer.END
        if group is not None and group.ends_before(row, answer, ended=self._ended) and not (end and is_patch(spec)):
            raise group.refuse(spec.name, end=end)
        if row is None and is_patch(spec):
            return await self._decide(spec)
        if answer is StepAnswer.RUN:
            if not self.activity.in_branch:  # the steps of a branch have no fixed place
                self.compared.check_nothing_passed_over(at_end=False)
            if (row is None or row.waits) and self._replaying:
                await self._end_of_replay(spec.name, group)
            if group is not None and group.ends_before(row, answer, ended=self._ended):
                raise group.refuse(spec.name, end=False)
            if self._ended:
                raise _TooLate(f"step {spec.name!r} is requested after the handler has ended")
            spec.check_functions()
            return await (self._wait(spec) if isinstance(spec, WaitSpec) else self._run_in_flight(spec, row))
        if end:
            await self.await_other_branches(row)
            raise Replayed(spec.name)
        assert row is not None
        if answer is StepAnswer.REJECTION:
            if group is None:
                await self.await_other_branches(row)
            else:  # the group requests its other recorded steps first
                group.rejected(row)
            raise spec.rejection(await self.steps.recorded.of(row))
        return spec.decode(await self.steps.recorded.of(row))

    async def _decide(self, spec: StepSpec) -> bool:
        """Decide a patch. A saga that has been beyond this place goes on as it was begun (L30). During an undo nothing
        is recorded: the records do not change any more, so the decision does not either."""
        new = not self.compared.unasked
        if self._phase is State.PROCESSING:
            if self._ended:
                raise _TooLate(f"{spec.name!r} is requested after the handler has ended")
            spec.overlapped = self.activity.in_branch
            await self.steps.decide(spec, new)
        return new

    @property
    def _replaying(self) -> bool:
        """Whether a recorded step has not been requested or not been handed out."""
        return not self.compared.accepted and (bool(self.compared.unasked) or self._order.replaying)

    async def _end_of_replay(self, name: str, group: Group | None) -> None:
        """Wait for the end of the replay. Nothing new begins before all recorded steps have been requested and handed
        out: they cannot depend on it, and what cut it off in an earlier run does so again (L24)."""

        def going() -> bool:
            stopped = group is not None and group.stopped
            return self._replaying and not (stopped or self._ended or self.interruption is not None)

        moved = None
        while going() and moved != (moved := (len(self.compared.asked), self._order.given)):
            await self.activity.until(lambda: not going())
        if self.interruption is not None:
            raise SagaInterrupted(f"step {name!r} has not begun") from self.interruption
        if going() and (calls := self.compared.unasked.calls):
            raise SagaChanged(
                f"the outcome of step {min(calls)!r} is unknown, and the handler requests {name!r} without it"
            )
        if going():
            self.compared.check_nothing_passed_over(at_end=True)

    async def await_other_branches(self, row: StepRow | None) -> None:
        """The step of `row` ends the replay. By then every step to undo must have been requested, but other branches
        may not have got that far."""
        names = replay.asked_by_branches(self.compared.rows.values(), row, in_branch=self.activity.in_branch)
        if self._phase is State.UNDOING:  # if it is to be cancelled, its open calls are resolved first (L50)
            names |= self.compared.open
        await self._await_asked(names)

    async def end_replay(self, name: str | None) -> NoReturn:
        """All branches of a `saga.all` have ended before the step `name`, which has no record. None: before none."""
        if name is None:
            raise _TooLate("saga.all runs in a task that the handler has not awaited")
        await self.await_other_branches(None)
        ended = Replayed(name)
        self.interrupt(ended)
        raise SagaInterrupted("the replay has ended") from ended

    async def _run_in_flight(self, spec: StepSpec, row: StepRow | None) -> Any:
        self._place(spec)
        self.activity.takes_off(spec.name)
        try:
            return await self._run(spec, row)
        finally:
            self.activity.lands(spec.name)

    def _place(self, spec: StepSpec) -> None:
        for other in (*self.activity.in_flight, *self.activity.resting):
            self.compared.asked[other].overlapped = spec.overlapped = True
        if self.activity.in_branch:
            spec.overlapped = True  # it could have been requested at another time

    async def _wait(self, spec: WaitSpec) -> Any:
        """Wait until the wait is over, or until the run ends here (L41)."""
        self._place(spec)
        group = group_of(self)
        names = {each.name for each in spec.parts}

        def stopped() -> bool:
            return self._ended or self.interruption is not None or (group is not None and group.stopped)

        self.activity.waits |= names
        try:
            while isinstance(found := await self.steps.wait(spec), float):
                await self.activity.rest(spec.name, found, stopped)
                if group is not None and group.stopped:
                    raise group.refuse(spec.name, end=False)
                if self.interruption is not None:
                    raise SagaInterrupted(f"step {spec.name!r} is not over") from self.interruption
                if self._ended:
                    raise _TooLate(f"step {spec.name!r} was waiting when the handler ended")
        finally:
            self.activity.waits -= names
        self._finish(spec.recorded_as)
        if found.state is StepState.REJECTED:
            raise spec.rejection(found.output)
        return spec.decode(found.output)

    def _finish(self, name: str) -> None:
        self.progressed, self.recovery_point = True, name
        self._finished()

    async def _run(self, spec: StepSpec, row: StepRow | None) -> Any:
        if spec.kind is StepKind.CALL:
            self.compared.open.add(spec.name)
        inside = _inside.set((self, spec.name))
        try:
            return await self.steps.run(spec, row)
        finally:
            _inside.reset(inside)
            if spec.finished:  # also after a refusal, or after a cancellation that came after the commit
                self.compared.open.discard(spec.name)
                self._finish(spec.name)

    # ------------------------------------------------------------------------------------------------ the engine
    async def main(self, handler: Callable[[], Awaitable[object]]) -> object:
        """Run the handler in this task. Steps requested in it have a fixed order; other tasks are branches (L13), which
        may reach their steps in any order."""
        self.activity.begin()
        try:
            return await handler()
        finally:
            self._ended = True
            self.activity.look_again()

    async def settle(self, *, raised: bool = False) -> None:
        """Close the run once the handler has ended. Steps left in flight are awaited, so that their outcome is known
        (L75); if the handler `raised` an error, they are cancelled first. If the handler left steps unfinished, begun
        or not, without an error, the run is interrupted; otherwise its error says more. Later requests are refused."""
        if self.activity.in_flight:
            if not raised:
                names = ", ".join(map(repr, self.activity.in_flight))
                self.interrupt(SagaMisused(f"the handler ended while step {names} was in flight; await every step"))
            for task in self.activity.in_flight.values() if raised else ():
                task.cancel()
            await self.activity.end_of_flight()
        elif self.activity.unfinished and not raised:
            names = ", ".join(map(repr, self.activity.unfinished))
            wrong = f"the handler ended before step {names}, which it had requested; await every step"
            self.interrupt(SagaMisused(wrong))
        self._over = True
        self._order.close()
        self.activity.close()

    async def siblings(self) -> None:
        """The handler has rejected: let the steps in flight finish (L7). No step begins any more (L26), but recorded
        steps are still requested, and with them their undos (L25)."""
        self.refused = self.interruption is None
        await self.activity.end_of_flight()
        await self._await_asked(replay.asked_by_branches(self.compared.rows.values(), None, in_branch=False))

    async def resolve(self, rows: Sequence[StepRow]) -> None:
        """A rejection cut off other calls. Determine how each ended: from its reconcile, or by the same call with the
        same key (L4). Raises UnknownEffect if neither can tell, or what the call raises."""
        self.compared.rows = {row.name: row for row in rows}
        for name in unknown_calls(rows):
            if (spec := self._calls.get(name)) is None:
                raise UnknownEffect(f"it was rejected while the outcome of step {name!r} is unknown")
            self.compared.compare(spec)
            try:
                await self._run(spec, self.compared.rows[name])
            except Reject:  # the refusal is recorded, so the outcome is known
                continue
            except Exception as error:
                self._from = error, name
                raise

    def spec_of(self, error: BaseException) -> StepSpec | None:
        """The step that raised `error`, if a step did."""
        name: object = self._from[1] if self._from is not None and self._from[0] is error else None
        return self.compared.asked.get(name) if isinstance(name, str) else None  # any other type was refused as a name

    def step_of(self, error: BaseException) -> str | None:
        """The name of that step, unless the text of the error already has it."""
        spec = None if isinstance(error, SagaMisused | SagaParked) else self.spec_of(error)
        return None if spec is None else spec.name

    async def _await_asked(self, names: set[str]) -> None:
        await self.activity.until(lambda: self.compared.asked.keys() >= names or self.interruption is not None)
