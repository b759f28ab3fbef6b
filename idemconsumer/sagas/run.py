"""One run of a saga's handler: steps by name, checkpointed, replayed, and never completed by accident.

Steps are identified by their names. On a resume the handler runs from its start; a recorded step returns its stored
output without running. An error inside a step, other than a Reject, *interrupts* the run: a flag is set that no
`except`, `gather`, `wait` or `timeout` of user code can clear, each later operation raises again, and the engine
completes nothing while the flag is set or a step is in flight (L4). Nothing new begins before the replay is over (L24),
nor once the handler has ended (L26).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from idemconsumer.errors import OfTheEngine, Reject, SagaChanged, SagaMisused, SelfCancelled, UnknownEffect
from idemconsumer.message import arguments
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.rules import replay
from idemconsumer.rules.replay import Answer
from idemconsumer.rules.saga import stays
from idemconsumer.rules.values import State, StepKind, StepRow, StepState
from idemconsumer.sagas import outputs
from idemconsumer.sagas.branches import Branches, Group, NotBegun, group_of
from idemconsumer.sagas.order import TURNS
from idemconsumer.sagas.settling import Settling
from idemconsumer.sagas.step import StepSpec, is_patch
from idemconsumer.sagas.steps import Steps
from idemconsumer.sagas.waits import WaitSpec
from idemconsumer.user_code.cancellation import CancellationWatch, LateCancellations

R = TypeVar("R")

_NOTHING: Final = object()

# The run and the step whose function runs in this task, or in the one that created it.
_inside: Final[ContextVar[tuple[object, str] | None]] = ContextVar("inside a step", default=None)


class SagaInterrupted(OfTheEngine):
    """Raised in a saga's handler by every operation after the run was interrupted. Do not catch it."""


class _TooLate(SagaInterrupted):
    """The handler has ended, so nothing begins. That alone interrupts no run: it may have been rejected."""


class Replayed(Exception):
    """An undoing saga's handler has been replayed to its first unfinished step."""


class SagaRun(Settling):
    """Answers what the handler requests by its `UsersSaga`."""

    def __init__(
        self,
        steps: Steps,
        saga: LeasedSaga,
        rows: Sequence[StepRow],
        finished: Callable[[], None],
        *,
        timeout: float,
        accepted: bool = False,
        superseded: bool = False,
    ) -> None:
        """`finished` is called whenever a step has. `accepted`: a person lets it continue with a handler that asks for
        other steps. `superseded`: a worker of another build may run it, and may know patches that this one does not.
        `timeout`: the handler's, in seconds; a step waits as long for what the handler's other branches ask for."""
        super().__init__(saga.handler, rows, steps.order, timeout=timeout, accepted=accepted, superseded=superseded)
        self._steps = steps
        self._saga = saga
        self._finished = finished
        self.longest = timeout  # seconds that a step of this run may take, of those asked for (L45)
        self._requests: WeakKeyDictionary[Coroutine[Any, Any, Any], StepSpec] = WeakKeyDictionary()
        self._main: asyncio.Task[Any] | None = None
        self.recovery_point = replay.recovery_point(rows)
        self._calls: dict[str, StepSpec] = {}  # asked for, begun or not
        self._watches: dict[StepSpec, CancellationWatch] = {}  # of the steps that were requested and have not ended
        self._late = LateCancellations()
        self._refusals = False  # one has been given out
        self._order.ending = self._ending
        self._order.replayed = self._wake.set
        self.progressed = False  # a step has finished in this run

    # -------------------------------------------------------------------------------------------------------- requests
    def request(self, spec: StepSpec) -> Coroutine[Any, Any, Any]:
        """What the handler awaits. Recorded when it is asked for, not when it begins: its task may be dropped before it
        first runs."""
        name: object = spec.name
        if spec.kind is StepKind.CALL:
            self.longest = max(self.longest, spec.limits.timeout or 0.0)
            if isinstance(name, str):  # anything else is refused when it begins
                self._calls[name] = spec
        self._unfinished.append(spec.name)
        asking = self._ask(spec)
        self._requests[asking] = spec
        return asking

    def spec_of_request(self, request: Coroutine[Any, Any, Any]) -> StepSpec | None:
        """None: it is none of this run's."""
        return self._requests.get(request)

    def withdraw(self, request: Coroutine[Any, Any, Any]) -> None:
        """It is requested in another way."""
        self._mark(request, False)
        request.close()

    async def all(self, branches: Iterable[Coroutine[Any, Any, R]], limit: int) -> list[R]:
        """See `ports.handler.Saga`."""
        outer = group_of(self)
        group = Group(self, outer, self._stopped)
        running = Branches(branches, limit, group, lambda: bool(self._unasked), self._mark)
        complete = await running.run()
        if group.rejection is not None:
            await self._await_other_branches(group.rejection)
        if complete:
            return running.outputs()
        if outer is not None:
            raise outer.refuse(group.end or "all", end=group.end is not None)
        if group.end is None:
            raise _TooLate("saga.all runs in a task that the handler has not awaited")
        await self._await_other_branches(None)
        ended = Replayed(group.end)
        self.interrupt(ended)
        raise SagaInterrupted("the replay has ended") from ended

    def _mark(self, request: Coroutine[Any, Any, Any], begun: bool) -> None:
        """A step that was requested is not to be missed until it is `begun`."""
        if (spec := self._requests.get(request)) is None:
            return
        if begun and spec.name not in self._unfinished:
            self._unfinished.append(spec.name)
        elif not begun and spec.name in self._unfinished:
            self._unfinished.remove(spec.name)

    def _stopped(self) -> None:
        """A group of branches has: what rests in it, or has not begun, looks whether it goes on."""
        self._waits.moves()
        self._wake.set()

    # -------------------------------------------------------------------------------------------------------- one step
    async def _ask(self, spec: StepSpec) -> Any:
        name = spec.name
        self.body.check_loop()
        if self._over or self.interruption is not None:
            refused = SagaInterrupted(f"step {name!r} is requested after the run has ended")
            await self.body.refuse(refused)
            raise refused from self.interruption
        outside = self._watches[spec] = self._late.watch()
        self.body.step_begins()
        if (task := asyncio.current_task()) is not self._main:
            self._waits.branch(task)
        try:
            for each in spec.parts:
                self._register_step(each)
            output = await self._outcome(spec, outside)
            self._unfinished.remove(name)
            spec.forget_arguments()
            self._late.defer(outside)
            return output
        except Reject:
            self._refusals = True
            self._unfinished.remove(name)
            self._late.defer(outside)
            raise
        except NotBegun:
            self._unfinished.remove(name)
            for each in spec.parts:
                if each.name not in self._rows:  # else its outcome may have to be learnt (L50)
                    del self.asked[each.name]
            raise
        except _TooLate as late:
            await self.body.refuse(late)
            raise
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            from_outside = cancelled and outside.requested
            if from_outside and self._refusals and name not in self._open:  # so it is in each replay (L75)
                self._unfinished.remove(name)
                raise
            cause = _cancellation(error, from_outside) if cancelled else error
            self.interrupt(cause, name)
            if from_outside:
                raise
            raise SagaInterrupted(f"step {name!r}: {type(cause).__name__}") from error
        finally:
            del self._watches[spec]
            if outside.requested:
                self._order.ended()
            self.body.step_ends()
            self._waits.moves()

    async def _outcome(self, spec: StepSpec, outside: CancellationWatch) -> Any:
        """What a step gets, in its turn. Once it has finished, a cancellation waits for that: each run is given what is
        recorded, whatever else it sees (L75)."""
        row, output, refused = spec.row(self._rows), _NOTHING, None
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
        """What is recorded of a step that was cancelled, if it has finished all the same."""
        if row is not None and row.position is not None:
            return row
        unanswered = [each for each in spec.parts if self._order.unanswered(each.name)]
        if not unanswered and not self._order.finished(spec.recorded_as):
            return None
        reading = asyncio.create_task(self._steps.rows())
        while not reading.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([reading])
        rows = {each.name: each for each in reading.result() if each.position is not None}
        for each in unanswered:
            self._order.found(each, rows[each.name].position if each.name in rows else None)
        row = spec.row(rows)
        if row is not None and not spec.finished:
            spec.finished = True
            self._open.discard(spec.name)
            self._finish(row.name)
        return row

    def _ending(self) -> bool:
        """Whether a step that was cancelled has not come to its end, and none waits for its turn."""
        return any(
            outside.requested and not self._order.finished(spec.recorded_as) for spec, outside in self._watches.items()
        )

    def _register_step(self, spec: StepSpec) -> None:
        spec.check_name()
        name = spec.name
        if name in self.asked:
            raise SagaMisused(
                f"step {name!r} is requested twice in one run, and a step is identified by its name; "
                'give each one its own, in a loop with a suffix: saga.tx(f"line_{n}", …)'
            )
        if (outer := _inside.get()) is not None and outer[0] is self:
            raise SagaMisused(
                f"step {name!r} is requested inside step {outer[1]!r}; a step's function takes no steps, so call them "
                "one after another in the handler"
            )
        self.asked[name] = spec
        self._unasked.ask(name)
        self._wake.set()
        spec.digest_arguments(self._steps.resources)
        if (row := self._rows.get(name)) is not None:
            self._compare(spec, row)

    def _compare(self, spec: StepSpec, row: StepRow) -> None:
        """Raises SagaChanged for another step under its name, or other arguments (L73)."""
        name = spec.name
        if row.kind is not spec.kind:
            raise SagaChanged(
                f"step {name!r} was recorded as {row.kind.name.lower()}, and is now {spec.kind.name.lower()}"
            )
        other = replay.other_argument(row.arguments, spec.arguments, arguments.SIZE)
        if other is None or self._accepted:
            return
        its = f"{outputs.parameter(spec.fn, other + 1)} (its argument {other + 1})"
        elsewhere = [each.name for each in self._rows.values() if each.arguments and each.arguments == spec.arguments]
        hint = f"; what it is given now was recorded for step {elsewhere[0]!r}" if elsewhere else ""
        raise SagaChanged(
            f"step {name!r} was recorded with another {its}{hint}. A handler that runs again must request the same "
            "steps with the same arguments: sort what has no order, such as a set, take times and random numbers from "
            "a step's output, or write args_may_differ=True"
        )

    async def _turn(self, spec: StepSpec, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Until all that finished before this step has been given out (L72)."""
        name = spec.recorded_as
        missing = await self._order.turn(name, last)
        if missing is not None and missing not in self.asked and self._saga.state is State.PROCESSING:
            raise SagaChanged(f"step {missing!r} finished before {name!r}, and the handler no longer requests it")

    async def _calls_in_flight(self) -> None:
        """A refusal is about to be raised, and a TaskGroup would cut off these calls, in each run again (L75)."""
        for _ in range(TURNS):
            if self._unasked.calls:  # of a task within a task, which has yet to begin
                await asyncio.sleep(0)
        calls = [ended for name, (_, ended) in self._in_flight.items() if name in self._rows]
        if calls:
            await asyncio.wait(calls)

    async def _replay_or_run(self, spec: StepSpec, row: StepRow | None) -> Any:
        answer, group = replay.answer(row, self._saga.state), group_of(self)
        end = answer is Answer.END
        if group is not None and group.ends_before(row, answer, ended=self._ended) and not (end and is_patch(spec)):
            raise group.refuse(spec.name, end=end)
        if row is None and is_patch(spec):
            return await self._decide(spec)
        if answer is Answer.RUN:
            if asyncio.current_task() is self._main:  # a branch's steps have no fixed place
                self._check_nothing_passed_over(at_end=False)
            if (row is None or row.waits) and self._replaying:
                await self._end_of_replay(spec.name, group)
            if group is not None and group.ends_before(row, answer, ended=self._ended):
                raise group.refuse(spec.name, end=False)
            if self._ended:
                raise _TooLate(f"step {spec.name!r} is requested after the handler has ended")
            spec.check_functions()
            return await (self._wait(spec) if isinstance(spec, WaitSpec) else self._run_in_flight(spec, row))
        if end:
            await self._await_other_branches(row)
            raise Replayed(spec.name)
        assert row is not None
        if answer is Answer.REJECTION:
            if group is None:
                await self._await_other_branches(row)
            else:  # it asks for what else it has first
                group.rejected(row)
            raise spec.rejection(await self._steps.recorded.of(row))
        return spec.decode(await self._steps.recorded.of(row))

    async def _decide(self, spec: StepSpec) -> bool:
        """A saga that has been beyond this place goes on as it was begun (L30). While it is undone nothing is recorded:
        then what is recorded no longer changes, and neither does the answer."""
        new = not self._unasked
        if self._saga.state is State.PROCESSING:
            if self._ended:
                raise _TooLate(f"{spec.name!r} is requested after the handler has ended")
            spec.overlapped = asyncio.current_task() is not self._main
            await self._steps.decide(spec, new)
        return new

    @property
    def _replaying(self) -> bool:
        """Whether something that is recorded has not been requested, or given out."""
        return not self._accepted and (bool(self._unasked) or self._order.replaying)

    async def _end_of_replay(self, name: str, group: Group | None) -> None:
        """Nothing new begins before all that is recorded was requested, and given out: nothing of that depends on it,
        and what cut it off in an earlier run does so again (L24)."""

        def going() -> bool:
            stopped = group is not None and group.stopped
            return self._replaying and not (stopped or self._ended or self.interruption is not None)

        moved = None
        while going() and moved != (moved := (len(self.asked), self._order.given)):
            await self._until(lambda: not going())
        if self.interruption is not None:
            raise SagaInterrupted(f"step {name!r} has not begun") from self.interruption
        if going() and (calls := self._unasked.calls):
            raise SagaChanged(
                f"the outcome of step {min(calls)!r} is unknown, and the handler requests {name!r} without it"
            )
        if going():
            self._check_nothing_passed_over(at_end=True)

    async def _await_other_branches(self, row: StepRow | None) -> None:
        """The step of `row` ends the replay. By then every step to undo must be asked for, but other branches may not
        have got that far."""
        in_branch = asyncio.current_task() is not self._main
        names = replay.asked_by_branches(self._rows.values(), row, in_branch=in_branch)
        if self._saga.state is State.UNDOING:  # of a saga that is to be cancelled, these are learnt first (L50)
            names |= self._open
        await self._await_asked(names)

    async def _run_in_flight(self, spec: StepSpec, row: StepRow | None) -> Any:
        name, task = spec.name, asyncio.current_task()
        assert task is not None
        self._place(spec, task)
        ended = asyncio.get_running_loop().create_future()
        self._in_flight[name] = task, ended
        try:
            return await self._run(spec, row)
        finally:
            del self._in_flight[name]
            ended.set_result(None)

    def _place(self, spec: StepSpec, task: asyncio.Task[Any] | None) -> None:
        for other in (*self._in_flight, *self._waits.open):
            self.asked[other].overlapped = spec.overlapped = True
        if task is not self._main:
            spec.overlapped = True  # it could have come at another time

    async def _wait(self, spec: WaitSpec) -> Any:
        """Until it is over, or until the run ends here (L41)."""
        self._place(spec, asyncio.current_task())
        group = group_of(self)
        names = {each.name for each in spec.parts}
        self._waits.begun |= names
        try:
            while isinstance(found := await self._steps.wait(spec), float):
                await self._waits.rest(spec.name, found, partial(self._stays, group))
                if group is not None and group.stopped:
                    raise group.refuse(spec.name, end=False)
                if self.interruption is not None:
                    raise SagaInterrupted(f"step {spec.name!r} is not over") from self.interruption
                if self._ended:
                    raise _TooLate(f"step {spec.name!r} was waiting when the handler ended")
        finally:
            self._waits.begun -= names
        self._finish(spec.recorded_as)
        if found.state is StepState.REJECTED:
            raise spec.rejection(found.output)
        return spec.decode(found.output)

    def _stays(self, group: Group | None, quiet: float) -> float | None:
        """For how long this run goes on, though it has waits that are not over; None: it has ended, or the wait's
        group has."""
        if self._ended or self.interruption is not None or (group is not None and group.stopped):
            return None
        return stays(
            steps=bool(self._in_flight),
            branches=len(self._unfinished) > len(self._waits.open) or self._waits.branches(),
            main=self._main not in self._waits.open.values(),
            quiet=quiet,
            patience=self._timeout,
        )

    def _finish(self, name: str) -> None:
        self.progressed, self.recovery_point = True, name
        self._finished()

    async def _run(self, spec: StepSpec, row: StepRow | None) -> Any:
        if spec.kind is StepKind.CALL:
            self._open.add(spec.name)
        inside = _inside.set((self, spec.name))
        try:
            return await self._steps.run(spec, row)
        finally:
            _inside.reset(inside)
            if spec.finished:  # also if it was refused, or cut off after its commit
                self._open.discard(spec.name)
                self._finish(spec.name)

    # ------------------------------------------------------------------------------------------------ the engine
    async def main(self, handler: Callable[[], Awaitable[object]]) -> object:
        """Run the handler in this task. Steps asked for in it have a fixed order; other tasks are branches (L13), which
        may reach their steps in any order."""
        self._main = asyncio.current_task()
        self.body.begin()
        try:
            return await handler()
        finally:
            self._ended = True
            self._wake.set()
            self._waits.moves()

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
            spec.digest_arguments(self._steps.resources)
            self._compare(spec, row)
            try:
                await self._run(spec, row)
            except Reject:  # recorded, so that it is known
                continue
            except Exception as error:
                self._from = error, name
                raise


def _cancellation(error: BaseException, from_outside: bool) -> BaseException:
    """The error to report for a step that ended with CancelledError."""
    cause: BaseException
    if from_outside:
        cause = asyncio.CancelledError("the handler cancelled it, itself or by a timeout or a TaskGroup around it")
    else:
        cause = SelfCancelled()
    return cause.with_traceback(error.__traceback__)
