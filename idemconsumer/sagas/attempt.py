"""One attempt of a saga that this worker holds: run its handler, and end the attempt by what came of it.

An attempt ends completed, rejected and undone, released for another attempt, or put aside for a person. While the
outcome of a call is unknown, nothing is completed or undone on a guess.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from idemconsumer.engine import reading
from idemconsumer.engine.blame import Telling, describe, rejection_of
from idemconsumer.engine.evidence import Contended, LostConnections
from idemconsumer.engine.failing import Function
from idemconsumer.engine.work import Work
from idemconsumer.errors import (
    ConnectionLost,
    Contention,
    NotReadNow,
    RunEagerly,
    SagaChanged,
    SagaMisused,
    SelfCancelled,
    UnknownEffect,
)
from idemconsumer.handlers.handler import Call
from idemconsumer.message import codecs
from idemconsumer.ports.handler import Done, NotDone
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.ports.observer import Point
from idemconsumer.rules import saga as rules
from idemconsumer.rules.replay import PATCH, ordered
from idemconsumer.rules.saga import ANY_VERSION, LastResort, Start
from idemconsumer.rules.values import Outcome, OutcomeKind, State, StepRow
from idemconsumer.rules.verdicts import MAX_CONTENTION, refused
from idemconsumer.sagas.children import Children, ChildRuns
from idemconsumer.sagas.endings import At, Endings, describe_in
from idemconsumer.sagas.functions import StepFunctions
from idemconsumer.sagas.limits import NONE
from idemconsumer.sagas.order import Order
from idemconsumer.sagas.probes import Held, Probes
from idemconsumer.sagas.reconcile import complete_if_done
from idemconsumer.sagas.recorded import WINDOW, Outputs
from idemconsumer.sagas.run import Replayed, SagaRun
from idemconsumer.sagas.step import StepSpec, step_key
from idemconsumer.sagas.steps import Steps
from idemconsumer.sagas.undo import NotAskedFor, NotUndone, Undo
from idemconsumer.sagas.users_saga import UsersSaga
from idemconsumer.sagas.waits import Paused
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.user_code.cancellation import from_cancellation, run_isolated, uninterrupted

_MOST_NAMES: Final = 50  # in the error of a dead letter
_LOST: Final = (UnknownEffect.reason, "its worker was lost")


class _Overdue(Exception):
    """The saga has taken as long as it may."""


class Attempt:
    """Owns the saga of `work` until `go` returns. Meanwhile `work.leased` follows the saga's phase; `run` is set once
    the handler runs."""

    def __init__(
        self,
        work: Work,
        leases: PostgresLeases,
        at: At,
        functions: StepFunctions,
        chance: Callable[[], float],
        contended: Contended,
        lost_connections: LostConnections,
        probes: Probes,
        telling: Telling,
        progressed: Callable[[], None],
    ) -> None:
        """`functions` calls those of the steps. `progressed` is called whenever a step has finished."""
        self._work = work
        self._held = work.of_saga
        self._handler = work.handler
        self._options = work.handler.options
        self._leases = leases
        self._tell = at
        self._functions = functions
        self._endings = Endings(work, leases, at, chance, telling)
        self._contended = contended
        self._lost_connections = lost_connections
        self._probes = probes
        self._progressed = progressed
        self._code = rules.CANCELLED
        self.run: SagaRun | None = None

    async def go(self) -> Outcome:
        """Raises Fenced, StoreUnavailable, CommitUnknown and RunEagerly; no outcome is decided then."""
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
            return await self._endings.put_aside(error.reason, f"{error}; {await self._both_lists()}")
        except UnknownEffect as error:
            return await self._endings.put_aside(error.reason, str(error))
        except Contention as collision:
            return await self._collided(collision)

    @property
    def _saga(self) -> LeasedSaga:
        assert self._held.leased is not None
        return self._held.leased

    def unaware_of_cancel(self, keys: Collection[bytes]) -> bool:
        """Whether its saga is one of `keys`, and was taken before it was to be cancelled."""
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
        if (end := await self._not_read()) is not None:
            return end
        if call is None:
            raise SagaChanged(str(self._work.refusal or "its message no longer decodes"))
        if start is Start.RECONCILE and (end := await self._reconcile(call, *_LOST)) is not None:
            return end
        run = await self._open_run()
        if (end := await self._not_read()) is not None:
            return end
        value, error = await self._run_handler(run, call)
        return await self._end(run, value, error)

    async def _not_read(self) -> Outcome | None:
        """Its end for now, if its message is not to be read now: another attempt at no cost (D26)."""
        work, refusal = self._work, self._work.refusal
        if work.call is not None and self._handler.decodes:
            try:
                await reading.renew(self._handler, work.call)
            except NotReadNow as not_now:
                refusal = not_now
        if not isinstance(refusal, NotReadNow):
            return None
        return await self._endings.read_later(refusal.error)

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
        saga = self._work.of_saga.leased = replace(self._saga, stale=False, new=False)
        recorded = Outputs(self._leases, saga.key, rows)
        accepted = saga.version == ANY_VERSION
        order = Order([] if accepted else ordered(rows), self._options.timeout)
        steps = Steps(
            self._leases, saga, self._functions, recorded, self._probes, order=order, fail_on=self._options.fail_on,
            at=self._tell,
        )  # fmt: skip
        self.run = SagaRun(
            steps,
            replace(saga, state=State.UNDOING) if self._cancelling else saga,  # nothing new is run
            rows,
            self._progressed,
            timeout=self._options.timeout,
            accepted=accepted,
            superseded=any(row.name.startswith(PATCH) for row in rows) and await self._superseded(),
        )
        return self.run

    async def _superseded(self) -> bool:
        """Whether a worker of another build runs the saga's version, and may know what this one does not."""
        return await self._leases.superseded(self._handler.app, self._saga)

    async def _run_handler(self, run: SagaRun, call: Call) -> tuple[object, BaseException | None]:
        """What the handler returned or raised, once none of its steps is in flight."""
        try:
            children = Children(self._handler.app, self._handler.starter, self._saga)
            saga = UsersSaga(run, children, self._options.timeout)
            handler = partial(self._handler.run, call, saga, self._saga.attempt)
            if (left := self._endings.left()) is not None:
                run.body.end_in(left, self._overdue())
            body = run.body
            value, error = await run_isolated(run.main(handler), leave=body.left, cancelling=body.cancelled)
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
        if isinstance(cause, Paused):
            return await self._endings.pause(cause.waits)
        if isinstance(cause, Held):
            return await self._endings.hold(cause.seconds)
        if isinstance(cause, RunEagerly):
            raise cause
        if cause is not None and cause is run.interruption and (rules.undecided(cause) or rules.parked(cause)):
            raise cause
        if isinstance(cause, _Overdue):  # what is to follow begins with a run that knows it
            return await self._endings.release(cause, str(cause), failures=1, count=False)
        if self._saga.state is State.UNDOING:
            return await self._undo(run, cause)
        if self._cancelling:
            return await self._cancel(run, cause)
        if cause is None:
            run.check_complete()
            try:
                result = codecs.encode_result(value, compared=False)
            except TypeError as unencodable:
                return await self._unencodable(run, unencodable)
            return await self._endings.finish(OutcomeKind.APPLIED, State.COMPLETED, result)
        if refused(cause, self._options.fail_on):
            return await self._reject(run, rejection_of(cause), cause)
        return await self._failed(run, cause)

    def _cause(self, run: SagaRun, error: BaseException | None) -> BaseException | None:
        """Why the run ended. Where an error made a TaskGroup, or the end of the run, cancel the steps beside it, that
        is why: a rejection is still one, and what was cut off stays open. So is one beside which a step fails then."""
        interruption = run.interruption
        if isinstance(interruption, asyncio.CancelledError):
            apart = isinstance(error, Exception) and not isinstance(error, SelfCancelled)
            hidden = apart and not from_cancellation(error)
        else:
            hidden = run.refused and _is_failure(interruption)
        return error if hidden else interruption or error

    # ------------------------------------------------------------------------------------- what a failure leads to
    async def _failed(self, run: SagaRun, error: BaseException) -> Outcome:
        """Another attempt, or the end of all attempts."""
        step, endings = run.step_of(error), self._endings
        text = describe_in(step and f"step {step!r}", error)
        key = None if step is None else str(step_key(self._saga.scope, self._saga.key, step))
        endings.warn("saga failed", error, recovery_point=run.recovery_point, step=step, step_key=key)
        if (again := await self._again(run, error, text)) is not None:
            return again
        misused = isinstance(error, SagaMisused)
        match rules.after_last_attempt(await self._leases.steps(self._saga.key), run.undoable, misused=misused):
            case LastResort.UNKNOWN_EFFECT:
                return await endings.put_aside(UnknownEffect.reason, text, error)
            case LastResort.EXHAUSTED:
                return await endings.put_aside("attempts_exhausted", text, error)
            case LastResort.UNDO:
                return await self._reject(run, ("attempts_exhausted", type(error).__name__, None), error)

    async def _again(self, run: SagaRun, error: BaseException, text: str) -> Outcome | None:
        """Another attempt, if one may follow."""
        options, attempt, spec = self._options, self._saga.attempt, run.spec_of(error)
        own = NONE if spec is None else spec.limits
        most = rules.attempts_of_step(own.max_attempts, options.max_attempts)
        failures = 1 if run.progressed else attempt
        if spec is not None and self._is_spared(spec.fn, error, most, first=failures == 1):
            return await self._endings.spare(error, text, self._probes.seconds(spec.fn))
        if not rules.may_try_again(attempt=attempt, max_attempts=most, progressed=run.progressed):
            return None
        return await self._endings.release(error, text, failures=failures, backoff=own.backoff)

    def _is_spared(self, fn: Function, error: BaseException, max_attempts: int, *, first: bool) -> bool:
        """Whether this failure costs no attempt (D17)."""
        free = self._probes.failed(fn, self._saga, error, first=first)
        return free and max_attempts > 1 and not self._saga.suspect

    async def _unencodable(self, run: SagaRun, error: TypeError) -> Outcome:
        """All that it was to do is done. That its result cannot be stored is no reason to undo that (L27)."""
        self._endings.warn("saga failed", error, recovery_point=run.recovery_point)
        text = describe(error)
        return await self._again(run, error, text) or await self._endings.put_aside("result_unencodable", text, error)

    async def _reject(self, run: SagaRun, refusal: tuple[str, object, int | None], cause: BaseException) -> Outcome:
        """Commit UNDOING first, once the outcome of every call is known (L7)."""
        try:
            rejection = codecs.encode_rejection(*refusal)
        except TypeError as unencodable:
            return await self._failed(run, unencodable)
        self._endings.at(Point.REJECTING)
        undoing = await self._leases.undo(self._saga, rejection, run.undos_added())
        if undoing is None:
            if (end := await self._resolve(run)) is not None:
                return end
            undoing = await self._leases.undo(self._saga, rejection, run.undos_added())
        self._endings.at(Point.REJECTED)
        if undoing is None:
            raise UnknownEffect("it was rejected while a call's outcome is unknown")
        if not isinstance(cause, Replayed):
            self._endings.rejected(cause)
        self._work.of_saga.leased = undoing
        return await self._undo(run, cause, fresh=True)

    async def _resolve(self, run: SagaRun) -> Outcome | None:
        """Learn how its open calls ended. None: that is known now."""
        _, error = await run_isolated(run.resolve(await self._leases.steps(self._saga.key)))
        if error is None:
            return None
        if isinstance(error, Held):
            return await self._endings.hold(error.seconds)
        if rules.undecided(error) or rules.parked(error):
            raise error
        return await self._failed(run, error)

    async def _undo(self, run: SagaRun, cause: BaseException | None, *, fresh: bool = False) -> Outcome:
        """Undo what is to be undone, then FAILED. `cause` ended the run with the undos; `fresh`: it ran forward."""
        saga, endings = self._saga, self._endings
        ended = cause is None or isinstance(cause, Replayed) or refused(cause, self._options.fail_on)
        replayed = ended and not isinstance(run.interruption, asyncio.CancelledError)  # else branches may be cut off
        if fresh and not replayed and not run.asked_for_all:  # what it has an undo for now is not known (L25)
            assert cause is not None
            return await endings.release(cause, describe(cause), failures=1, count=False)
        try:
            undo = Undo(self._leases, saga, self._functions, self._probes, endings.at)
            await undo.run(run.asked, replayed=replayed)
        except Held as held:
            return await endings.hold(held.seconds)
        except NotAskedFor as missing:
            assert cause is not None
            return await self._not_undone(f"the handler, before step {missing.name!r}", cause)
        except ChildRuns as runs:
            return await endings.pause_undo(runs.child)
        except NotUndone as failed:
            place = f"undo of {failed.spec.name!r}"
            return await self._not_undone(place, failed.error, failed.spec, progressed=failed.progressed)
        assert saga.rejection is not None
        return await endings.finish(OutcomeKind.FAILED, State.FAILED, codecs.stored_rejection(saga.rejection))

    # ------------------------------------------------------------------------------------------------- cancelled (L50)
    @property
    def _cancelling(self) -> bool:
        """It is to be cancelled, and how it ends is not committed yet."""
        return self._saga.cancel is not None and self._saga.state is State.PROCESSING

    async def _cancel_at_once(self) -> Outcome | None:
        """FAILED, or UNDOING, without the handler, unless there is a call of unknown outcome. None: go on."""
        rows = await self._leases.steps(self._saga.key)
        if rules.unknown_calls(rows):
            return None
        if not self._saga.cancel:
            return await self._end_as_it_is()
        undoing = await self._leases.undo(self._saga, codecs.encode_rejection(self._code, None))
        if undoing is not None:
            self._work.of_saga.leased = replace(undoing, stale=False)
        return None

    async def _cancel(self, run: SagaRun, cause: BaseException | None) -> Outcome:
        """`run` has only replayed the handler. `cause` ended it."""
        if not (cause is None or isinstance(cause, Replayed) or refused(cause, self._options.fail_on)):
            return await self._failed(run, cause)
        if self._saga.cancel:
            return await self._reject(run, (self._code, None, None), cause or Replayed())
        return await self._resolve(run) or await self._end_as_it_is()

    async def _end_as_it_is(self) -> Outcome:
        rejection = codecs.encode_rejection(self._code, None)
        return await self._endings.finish(OutcomeKind.FAILED, State.FAILED, rejection)

    async def _not_undone(
        self, place: str, error: BaseException, spec: StepSpec | None = None, *, progressed: bool = False
    ) -> Outcome:
        attempt, endings, text = self._saga.attempt, self._endings, describe_in(place, error)
        endings.warn("undo failed", error, step=None if spec is None else spec.name)
        own = NONE if spec is None else spec.limits
        most = rules.attempts_of_undo(own.max_attempts, self._options.max_attempts)
        undo, first = None if spec is None else spec.undo, progressed or attempt == 1
        if undo is not None and self._is_spared(undo, error, most, first=first):
            return await endings.spare(error, text, self._probes.seconds(undo))
        if rules.may_try_again(attempt=attempt, max_attempts=most, progressed=progressed):
            return await endings.release(error, text, failures=attempt, backoff=own.backoff)
        return await endings.put_aside("undo_failed", text, error)

    async def _collided(self, collision: Contention) -> Outcome:
        """It costs no attempt (B3), until the saga has done nothing else for an hour (B15)."""
        saga = self._saga
        # Between two collisions here, another worker may have brought it further.
        progress = (saga.state, saga.attempt, None if self.run is None else self.run.recovery_point)
        streak = self._contended.collided(saga.key, saga.handler, progress)
        if streak.seconds >= MAX_CONTENTION:
            return await self._endings.put_aside("contended", streak.describe(collision))
        return await self._endings.collided(collision, streak.collisions)

    async def _lost_again(self, loss: ConnectionLost) -> Outcome:
        """Its functions have lost their connection so often in a row that it is their failure (B13)."""
        if self._work.call is None:
            return await self._go()
        if self._saga.state is State.UNDOING:
            return await self._not_undone("undo", loss)
        if self._endings.left() == 0.0 and self._asks:
            return await self._unanswered(loss, rules.MAX_DURATION)
        if self._start() is Start.RECONCILE:
            return await self._unanswered(loss, UnknownEffect.reason)
        return await self._failed(await self._open_run(), loss)

    # ------------------------------------------------------------------- after a lost worker, or too long a time (L58)
    @property
    def _asks(self) -> bool:
        """Whether the handler can be asked what became of its saga."""
        can_run = self._start() in (Start.RUN, Start.RECONCILE)
        return can_run and self._handler.reconciles and self._work.call is not None

    async def _end_overdue(self) -> Outcome | None:
        """Of a saga that has taken as long as it may. None: it is not done, so it is to be undone."""
        why = str(self._overdue())
        if (end := await self._not_read()) is not None:
            return end
        if not self._asks:
            return await self._endings.put_aside(rules.MAX_DURATION, why)
        assert self._work.call is not None
        if (end := await self._reconcile(self._work.call, rules.MAX_DURATION, why)) is not None:
            return end
        self._work.of_saga.leased = replace(self._saga, cancel=True)
        self._code = rules.MAX_DURATION
        return None

    async def _reconcile(self, call: Call, reason: str, why: str) -> Outcome | None:
        """Ask the handler's `reconcile` whether it is done. None: it is not. If that cannot tell, a person is to, for
        this reason."""
        saga, endings = self._saga, self._endings
        try:
            answer = await complete_if_done(self._leases, saga, self._handler, call, self._functions, endings.at)
        except Exception as error:
            if rules.undecided(error):
                raise
            return await self._unanswered(error, reason)
        if isinstance(answer, Done):
            return endings.finished(OutcomeKind.APPLIED, State.COMPLETED, answer.result)
        if isinstance(answer, NotDone):
            await self._leases.note(saga.key, "reconciled", "not done")
            return None
        return await endings.put_aside(reason, f"{why}, and reconcile cannot tell whether it was done")

    async def _unanswered(self, error: Exception, reason: str) -> Outcome:
        """`reconcile` failed, so it is not known yet whether the saga is done."""
        saga, endings, text = self._saga, self._endings, describe_in("reconcile", error)
        endings.warn("reconcile failed", error)
        if rules.may_try_again(attempt=saga.attempt, max_attempts=self._options.max_attempts):
            return await endings.release(error, text, failures=saga.attempt, overdue=reason == rules.MAX_DURATION)
        return await endings.put_aside(reason, text, error)

    async def _both_lists(self) -> str:
        """What a person compares to decide about a changed handler."""
        return both_lists(await self._leases.steps(self._saga.key), self.run)


def _is_failure(error: BaseException | None) -> bool:
    """Whether another attempt is all that it leads to."""
    decides = rules.undecided(error) or rules.parked(error) or isinstance(error, _Overdue)
    return isinstance(error, Exception) and not decides


def both_lists(rows: Sequence[StepRow], run: SagaRun | None) -> str:
    """The steps that are recorded, and those that the handler has asked for."""
    asked_for = "nothing, it did not run" if run is None else _names(list(run.asked))
    return f"recorded: {_names([row.name for row in rows])}; requested: {asked_for}"


def _names(steps: Sequence[str]) -> str:
    more = f" and {len(steps) - _MOST_NAMES} more" if len(steps) > _MOST_NAMES else ""
    return (", ".join(steps[:_MOST_NAMES]) or "no step") + more
