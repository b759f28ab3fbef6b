"""One attempt of a saga that this worker holds: run its handler, and end the attempt by the result.

An attempt ends with the saga completed; rejected and undone; released for another attempt; or parked as a dead letter
for a person. While the outcome of a call is unknown, nothing is completed or undone on a guess.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from msgspec.structs import replace

from idemconsumer.engine.blame import describe, rejection_of
from idemconsumer.engine.evidence import Contended, LostConnections
from idemconsumer.engine.work import Work
from idemconsumer.errors import (
    ConnectionLost,
    Contention,
    RunEagerly,
    SagaChanged,
    SagaMisused,
    SelfCancelled,
    UnknownEffect,
)
from idemconsumer.handlers.handler import Call
from idemconsumer.message import codecs
from idemconsumer.ports.observer import Point
from idemconsumer.rules import saga as rules
from idemconsumer.rules.replay import PATCH, ordered
from idemconsumer.rules.saga import ANY_VERSION, LastResort, Start
from idemconsumer.rules.values import Outcome, State
from idemconsumer.rules.verdicts import MAX_CONTENTION, contention_pause, refused
from idemconsumer.sagas.activity import OnlyWaits
from idemconsumer.sagas.children import Children, ChildRuns
from idemconsumer.sagas.comparison import Comparison, both_lists
from idemconsumer.sagas.order import Order
from idemconsumer.sagas.outputs import WINDOW, Outputs
from idemconsumer.sagas.probes import NotCalled
from idemconsumer.sagas.run import Replayed, SagaRun
from idemconsumer.sagas.saga_endings import SagaEndings, describe_in
from idemconsumer.sagas.step import step_key
from idemconsumer.sagas.steps import StepFunctions, Steps
from idemconsumer.sagas.undo import NotUndone, undo_all
from idemconsumer.sagas.users_saga import UsersSaga
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.user_code.cancellation import from_cancellation, run_isolated, uninterrupted

_LOST: Final = (UnknownEffect.reason, "its worker was lost")


class _Overdue(Exception):
    """The saga has reached its `max_duration`."""


class Attempt:
    """Owns the saga of `work` until `go` returns. Meanwhile `work.leased` follows the saga's phase; `run` is set once
    the handler runs."""

    def __init__(
        self,
        work: Work,
        endings: SagaEndings,
        functions: StepFunctions,
        contended: Contended,
        lost_connections: LostConnections,
        progressed: Callable[[], None],
    ) -> None:
        """`functions` calls the functions of the steps. `progressed` is called whenever a step has finished."""
        self._work = work
        self._handler = work.handler
        self._options = work.handler.options
        self._endings = endings
        self._leases = endings.leases
        self._functions = functions
        self._contended = contended
        self._lost_connections = lost_connections
        self._progressed = progressed
        self._code = rules.CANCELLED
        self.run: SagaRun | None = None

    async def go(self) -> Outcome:
        """Raises Fenced, StoreUnavailable, CommitUnknown and RunEagerly; then no outcome is decided."""
        try:
            if self._lost_connections and (loss := await self._lost_connections.judge(self._saga.key)) is not None:
                return await self._lost_again(loss)
            outcome = await self._go()
            self._contended.ended(self._saga.key)
            self._lost_connections.ended(self._saga.key)
            return outcome
        except ConnectionLost as loss:
            self._lost_connections.lost(self._saga.key, loss)
            raise
        except SagaChanged as error:
            if (left := await self._endings.leave(error)) is not None:
                return left
            asked = None if self.run is None else self.run.compared.asked
            both = both_lists(await self._leases.steps(self._saga.key), asked)
            return await self._endings.put_aside(error.reason, f"{error}; {both}")
        except UnknownEffect as error:
            return await self._endings.put_aside(error.reason, str(error))
        except Contention as collision:
            return await self._collided(collision)

    @property
    def _saga(self) -> LeasedSaga:
        return self._endings.saga

    def unaware_of_cancel(self, keys: Collection[bytes]) -> bool:
        """Whether its saga is one of `keys`, and was taken before the request to cancel it."""
        return self._saga.key in keys and self._saga.state is State.PROCESSING and self._saga.cancel is None

    async def _go(self) -> Outcome:
        if self._endings.left() == 0.0 and (end := await self._end_overdue()) is not None:
            return end
        if self._cancelling and (end := await self._cancel_at_once()) is not None:
            return end
        call, saga = self._work.call, self._saga
        match start := self._start():
            case Start.KILLED_WORKER:
                why = "its last workers died, and it has no attempt left"
                return await self._endings.put_aside("killed_worker", why)
            case Start.OTHER_VERSION:
                raise SagaChanged(
                    f"it began with version {saga.version!r}, and the handler now has version {self._options.version!r}"
                )
        if (end := await self._endings.unread()) is not None:
            return end
        if call is None:
            raise SagaChanged(str(self._work.refusal or "its message no longer decodes"))
        asked = call, self._functions
        if start is Start.RECONCILE and (end := await self._endings.reconciled(*asked, *_LOST)) is not None:
            return end
        run = await self._open_run()
        if (end := await self._endings.unread()) is not None:
            return end
        value, error = await self._run_handler(run, call)
        return await self._end(run, value, error)

    def _overdue(self) -> _Overdue:
        return _Overdue(f"it has taken longer than its `max_duration`, {self._options.max_duration:g} s")

    def _start(self) -> Start:
        saga, options = self._saga, self._options
        return rules.start(
            stale=saga.stale,
            phase=saga.state,
            reconciles=self._handler.reconciles,
            suspect=saga.suspect,
            attempt=saga.attempt,
            max_attempts=options.max_attempts,
            begun_with=saga.version,
            version=options.version,
            cancelled=self._cancelling,
        )

    # ------------------------------------------------------------------------------------------------------- one run
    async def _open_run(self) -> SagaRun:
        rows = [] if self._saga.new else await self._leases.steps(self._saga.key, WINDOW)
        saga = self._endings.saga = replace(self._saga, stale=False, new=False)
        accepted, timeout = saga.version == ANY_VERSION, self._options.timeout
        steps = Steps(
            self._leases,
            saga,
            self._functions,
            Outputs(self._leases, saga.key, rows),
            self._endings.probes,
            Order([] if accepted else ordered(rows), timeout),
            self._options.fail_on,
            self._endings.at,
        )
        patched = any(row.name.startswith(PATCH) for row in rows)
        compared = Comparison(
            rows,
            self._functions.resources.values(),
            accepted=accepted,
            superseded=patched and await self._leases.superseded(self._handler.app, saga),
        )
        phase = State.UNDOING if self._cancelling else saga.state  # if it is to be cancelled, nothing new is run
        self.run = SagaRun(steps, phase, compared, self._progressed, timeout=timeout)
        return self.run

    async def _run_handler(self, run: SagaRun, call: Call) -> tuple[object, BaseException | None]:
        """The result or the error of the handler, once none of its steps is in flight."""
        try:
            children = Children(self._handler.app, self._handler.starter, self._saga)
            saga = UsersSaga(run, children, self._options.timeout)
            handler = partial(self._handler.run, call, saga, self._saga.attempt)
            activity = run.activity
            if (left := self._endings.left()) is not None:
                activity.end_in(left, self._overdue())
            value, error = await run_isolated(run.main(handler), leave=activity.left, cancelling=activity.cancelled)
            if isinstance(error, Exception):
                error = rules.out_of_group(error, self._options.fail_on)
            if error is self._cause(run, error) and refused(error, self._options.fail_on):
                await run.siblings()
            await run.settle(raised=error is not None)
        except asyncio.CancelledError:
            await uninterrupted(run.settle(raised=True))
            raise
        return value, error

    async def _end(self, run: SagaRun, value: object, error: BaseException | None) -> Outcome:
        cause = self._cause(run, error)
        if isinstance(cause, OnlyWaits):
            return await self._endings.pause(cause.waits)
        if isinstance(cause, NotCalled):
            return await self._endings.release(cause.seconds, held=True)
        if isinstance(cause, RunEagerly):
            raise cause
        if cause is not None and cause is run.interruption and (rules.undecided(cause) or rules.parked(cause)):
            raise cause
        if isinstance(cause, _Overdue):  # the next attempt begins with the knowledge that it is overdue
            return await self._endings.again(cause, str(cause), failures=1, count=False)
        if self._saga.state is State.UNDOING:
            return await self._undo(run, cause)
        if self._cancelling:
            return await self._cancel(run, cause)
        if cause is None:
            run.compared.check_complete()
            try:
                result = codecs.encode_result(value, compared=False)
            except TypeError as unencodable:
                return await self._unencodable(run, unencodable)
            return await self._endings.finish(State.COMPLETED, result)
        if refused(cause, self._options.fail_on):
            return await self._reject(run, rejection_of(cause), cause)
        return await self._failed(run, cause)

    def _cause(self, run: SagaRun, error: BaseException | None) -> BaseException | None:
        """Why the run ended. An error of the handler may have made a TaskGroup, or the end of the run, cancel other
        steps: then that error is the cause, so a rejection stays a rejection, and the cut-off steps stay open. A
        rejection also stays the cause if another step fails afterwards."""
        interruption = run.interruption
        if isinstance(interruption, asyncio.CancelledError):
            apart = isinstance(error, Exception) and not isinstance(error, SelfCancelled)
            hidden = apart and not from_cancellation(error)
        else:
            hidden = run.refused and _is_failure(interruption)
        return error if hidden else interruption or error

    # -------------------------------------------------------------------------------------------------- after a failure
    async def _failed(self, run: SagaRun, error: BaseException) -> Outcome:
        """Another attempt, or the end of all attempts."""
        step, endings = run.step_of(error), self._endings
        text = describe_in(step and f"step {step!r}", error)
        key = None if step is None else str(step_key(self._saga.scope, self._saga.key, step))
        endings.warn("saga failed", error, recovery_point=run.recovery_point, step=step, step_key=key)
        if (
            again := await self._endings.try_again(error, text, run.spec_of(error), progressed=run.progressed)
        ) is not None:
            return again
        misused = isinstance(error, SagaMisused)
        rows = await self._leases.steps(self._saga.key)
        match rules.after_last_attempt(rows, run.compared.undoable, misused=misused):
            case LastResort.UNKNOWN_EFFECT:
                return await endings.put_aside(UnknownEffect.reason, text, error)
            case LastResort.EXHAUSTED:
                return await endings.put_aside("attempts_exhausted", text, error)
            case LastResort.UNDO:
                return await self._reject(run, ("attempts_exhausted", type(error).__name__, None), error)

    async def _unencodable(self, run: SagaRun, error: TypeError) -> Outcome:
        """All steps of the saga are done, but its result cannot be stored. That is no reason to undo them (L27)."""
        self._endings.warn("saga failed", error, recovery_point=run.recovery_point)
        text = describe(error)
        again = await self._endings.try_again(error, text, progressed=run.progressed)
        return again or await self._endings.put_aside("result_unencodable", text, error)

    async def _reject(self, run: SagaRun, refusal: tuple[str, object, int | None], cause: BaseException) -> Outcome:
        """Commit the phase UNDOING first, once the outcome of every call is known (L7)."""
        try:
            rejection = codecs.encode_rejection(*refusal)
        except TypeError as unencodable:
            return await self._failed(run, unencodable)
        self._endings.at(Point.REJECTING)
        undoing = await self._leases.undo(self._saga, rejection, run.compared.undos_added())
        if undoing is None:
            if (end := await self._resolve(run)) is not None:
                return end
            undoing = await self._leases.undo(self._saga, rejection, run.compared.undos_added())
        self._endings.at(Point.REJECTED)
        if undoing is None:
            raise UnknownEffect("it was rejected while a call's outcome is unknown")
        if not isinstance(cause, Replayed):
            self._endings.rejected(cause)
        self._endings.saga = undoing
        return await self._undo(run, cause, fresh=True)

    async def _resolve(self, run: SagaRun) -> Outcome | None:
        """Determine how the open calls ended. None: their outcomes are known now."""
        _, error = await run_isolated(run.resolve(await self._leases.steps(self._saga.key)))
        if error is None:
            return None
        if isinstance(error, NotCalled):
            return await self._endings.release(error.seconds, held=True)
        if rules.undecided(error) or rules.parked(error):
            raise error
        return await self._failed(run, error)

    async def _undo(self, run: SagaRun, cause: BaseException | None, *, fresh: bool = False) -> Outcome:
        """Undo the finished steps, then end as FAILED. `cause` ended the run with the undos; `fresh`: it ran
        forward."""
        saga, endings = self._saga, self._endings
        ended = cause is None or isinstance(cause, Replayed) or refused(cause, self._options.fail_on)
        replayed = ended and not isinstance(run.interruption, asyncio.CancelledError)  # else branches may be cut off
        if fresh and not replayed and run.compared.unasked:  # its present undos are not all known (L25)
            assert cause is not None
            return await endings.again(cause, describe(cause), failures=1, count=False)
        try:
            steps = dataclasses.replace(run.steps, saga=saga)
            await undo_all(steps, run.compared.asked, None if replayed else cause)
        except NotCalled as held:
            return await endings.release(held.seconds, held=True)
        except ChildRuns as runs:
            return await endings.pause_undo(runs.child)
        except NotUndone as failed:
            return await self._not_undone(failed)
        assert saga.rejection is not None
        return await endings.finish(State.FAILED, codecs.stored_rejection(saga.rejection))

    # ------------------------------------------------------------------------------------------------- cancelled (L50)
    @property
    def _cancelling(self) -> bool:
        """A cancellation is requested, and the saga's end is not committed yet."""
        return self._saga.cancel is not None and self._saga.state is State.PROCESSING

    async def _cancel_at_once(self) -> Outcome | None:
        """Commit FAILED, or UNDOING, without the handler, unless a call has an unknown outcome. None: go on."""
        rows = await self._leases.steps(self._saga.key)
        if rules.unknown_calls(rows):
            return None
        if not self._saga.cancel:
            return await self._end_as_it_is()
        undoing = await self._leases.undo(self._saga, codecs.encode_rejection(self._code, None))
        if undoing is not None:
            self._endings.saga = replace(undoing, stale=False)
        return None

    async def _cancel(self, run: SagaRun, cause: BaseException | None) -> Outcome:
        """End a saga that is to be cancelled. `run` has only replayed the handler, and `cause` ended it."""
        if not (cause is None or isinstance(cause, Replayed) or refused(cause, self._options.fail_on)):
            return await self._failed(run, cause)
        if self._saga.cancel:
            return await self._reject(run, (self._code, None, None), cause or Replayed())
        return await self._resolve(run) or await self._end_as_it_is()

    async def _end_as_it_is(self) -> Outcome:
        rejection = codecs.encode_rejection(self._code, None)
        return await self._endings.finish(State.FAILED, rejection)

    async def _not_undone(self, failed: NotUndone) -> Outcome:
        endings, error, spec, text = self._endings, failed.error, failed.spec, describe_in(failed.place, failed.error)
        endings.warn("undo failed", error, step=None if spec is None else spec.name)
        again = await endings.try_again(error, text, spec, undoing=True, progressed=failed.progressed)
        return again or await endings.put_aside("undo_failed", text, error)

    async def _collided(self, collision: Contention) -> Outcome:
        """A contention costs no attempt (B3) unless the saga has made no other progress for an hour (B15)."""
        saga = self._saga
        # Another worker may have made progress between two collisions here.
        progress = (saga.state, saga.attempt, None if self.run is None else self.run.recovery_point)
        streak = self._contended.collided(saga.key, saga.handler, progress)
        if streak.seconds >= MAX_CONTENTION:
            return await self._endings.put_aside("contended", streak.describe(collision))
        # The saga is released for the pause and its lane stays free: the lane would treat the contention as an outage.
        pause = contention_pause(streak.collisions, self._endings.chance())
        return await self._endings.release(pause, describe(collision), collision)

    async def _lost_again(self, loss: ConnectionLost) -> Outcome:
        """The saga's functions have lost their connection so often in a row that this counts as their failure (B13)."""
        if self._work.call is None:
            return await self._go()
        if self._saga.state is State.UNDOING:
            return await self._not_undone(NotUndone("undo", loss))
        if self._endings.left() == 0.0 and self._asks:
            return await self._endings.unanswered(loss, rules.MAX_DURATION)
        if self._start() is Start.RECONCILE:
            return await self._endings.unanswered(loss, UnknownEffect.reason)
        return await self._failed(await self._open_run(), loss)

    # ------------------------------------------------------------------- after a lost worker, or too long a time (L58)
    @property
    def _asks(self) -> bool:
        """Whether the handler's `reconcile` can be asked about the saga."""
        can_run = self._start() in (Start.RUN, Start.RECONCILE)
        return can_run and self._handler.reconciles and self._work.call is not None

    async def _end_overdue(self) -> Outcome | None:
        """End a saga that has reached its `max_duration`. None: `reconcile` reports it as not done, so undo it."""
        why = str(self._overdue())
        if (end := await self._endings.unread()) is not None:
            return end
        if not self._asks:
            return await self._endings.put_aside(rules.MAX_DURATION, why)
        assert self._work.call is not None
        asked = self._work.call, self._functions
        if (end := await self._endings.reconciled(*asked, rules.MAX_DURATION, why)) is not None:
            return end
        self._endings.saga = replace(self._saga, cancel=True)
        self._code = rules.MAX_DURATION
        return None


def _is_failure(error: BaseException | None) -> bool:
    """Whether the error leads to another attempt and to nothing else."""
    decides = rules.undecided(error) or rules.parked(error) or isinstance(error, _Overdue)
    return isinstance(error, Exception) and not decides
