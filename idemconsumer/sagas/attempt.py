"""One attempt of a saga that this worker holds: run its handler, and end the attempt by what came of it.

An attempt ends completed, rejected and undone, released for another attempt, or put aside for a person. While the
outcome of a call is unknown, nothing is completed or undone on a guess.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from idemconsumer.engine.blame import describe, rejection_of
from idemconsumer.engine.work import Work
from idemconsumer.errors import Contention, Reject, SagaChanged, UnknownEffect
from idemconsumer.handlers.handler import Call
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.handler import Done, NotDone
from idemconsumer.ports.leases import LeasedSaga, LeaseStore
from idemconsumer.ports.observer import Point
from idemconsumer.rules import saga as rules
from idemconsumer.rules.saga import ANY_VERSION, UNDECIDED, LastResort, Start
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.rules.verdicts import retryable
from idemconsumer.sagas.endings import At, Endings, describe_in
from idemconsumer.sagas.functions import StepFunctions
from idemconsumer.sagas.reconcile import complete_if_done
from idemconsumer.sagas.run import Replayed, SagaRun
from idemconsumer.sagas.steps import Steps
from idemconsumer.sagas.undo import NotAskedFor, NotUndone, Undo
from idemconsumer.user_code.cancellation import run_isolated, uninterrupted

_MOST_NAMES: Final = 50  # in the error of a dead letter


class Attempt:
    """Owns the saga of `work` until `go` returns. Meanwhile `work.leased` follows the saga's phase; `run` is set once
    the handler runs."""

    def __init__(self, work: Work, leases: LeaseStore, at: At, lease: float, chance: Callable[[], float]) -> None:
        self._work = work
        self._handler = work.handler
        self._options = work.handler.options
        self._leases = leases
        self._tell = at
        self._functions = StepFunctions(work.handler.resources, work.handler.options.timeout, lease)
        self._endings = Endings(work, leases, at, chance)
        self.run: SagaRun | None = None

    async def go(self) -> Outcome:
        """Raises Fenced, StoreUnavailable and CommitUnknown; no outcome is decided then."""
        try:
            return await self._go()
        except SagaChanged as error:
            return await self._endings.put_aside(error.reason, f"{error}; {await self._both_lists()}")
        except UnknownEffect as error:
            return await self._endings.put_aside(error.reason, str(error))
        except Contention as collision:
            # The saga waits, not its lane: the lane would treat this as an outage.
            return await self._endings.release(collision, describe(collision), failures=1, count=False)

    @property
    def _saga(self) -> LeasedSaga:
        leased = self._work.leased
        assert leased is not None
        return leased

    async def _go(self) -> Outcome:
        call, saga = self._work.call, self._saga
        if call is None:
            raise SagaChanged(str(self._work.refusal or "its message no longer decodes"))
        match self._start():
            case Start.REVIEW:
                why = "its worker was lost, and on_stale says that a person decides"
                return await self._endings.put_aside("review", why)
            case Start.KILLED_WORKER:
                why = f"{saga.attempt - 1} workers died while it ran"
                return await self._endings.put_aside("killed_worker", why)
            case Start.OTHER_VERSION:
                raise SagaChanged(
                    f"it began with version {saga.version!r}, and the handler now has version {self._options.version!r}"
                )
            case Start.RECONCILE:
                if (end := await self._reconcile(call)) is not None:
                    return end
        run = await self._open_run()
        value, error = await self._run_handler(run, call)
        return await self._end(run, value, error)

    def _start(self) -> Start:
        saga, options = self._saga, self._options
        return rules.start(
            stale=saga.stale,
            phase=saga.state,
            reconciles=self._handler.reconciles,
            review=options.on_stale == "review",
            attempt=saga.attempt,
            max_attempts=options.max_attempts,
            begun_with=saga.version,
            version=options.version,
        )

    # ------------------------------------------------------------------------------------------------------- one run
    async def _open_run(self) -> SagaRun:
        rows = [] if self._saga.new else await self._leases.steps(self._saga.key)
        saga = self._work.of_saga.leased = replace(self._saga, stale=False, new=False)
        steps = Steps(self._leases, saga, self._functions, fail_on=self._options.fail_on, at=self._tell)
        accepted = saga.version == ANY_VERSION
        self.run = SagaRun(steps, saga, rows, patience=self._options.timeout, accepted=accepted)
        return self.run

    async def _run_handler(self, run: SagaRun, call: Call) -> tuple[object, BaseException | None]:
        """What the handler returned or raised, once none of its steps is in flight."""
        try:
            handler = partial(self._handler.run, call, run, self._saga.attempt)
            value, error = await run_isolated(run.main(handler))
            if isinstance(error, Exception):
                error = rules.sole_refusal(error, (Reject, *self._options.fail_on))
            if isinstance(error, Reject):
                await run.siblings()
            await run.settle(rejected=isinstance(error, Reject))
        except asyncio.CancelledError:
            await uninterrupted(run.settle())
            raise
        return value, error

    async def _end(self, run: SagaRun, value: object, error: BaseException | None) -> Outcome:
        cause = run.interruption or error
        if isinstance(cause, (*UNDECIDED, SagaChanged, UnknownEffect)):
            raise cause
        if self._saga.state is State.UNDOING:
            return await self._undo(run, cause)
        if cause is None:
            run.check_complete()
            try:
                result = codecs.encode(value)
            except TypeError as unencodable:
                return await self._failed(run, unencodable)
            return await self._endings.finish(OutcomeKind.APPLIED, State.COMPLETED, result)
        # A TaskGroup cancels the steps beside a rejected one. The saga is still rejected, and those cut off stay open.
        beside = run.rejected and isinstance(run.interruption, asyncio.CancelledError)
        refused = error if beside and isinstance(error, Reject) else cause
        if isinstance(refused, (Reject, *self._options.fail_on)):
            return await self._reject(run, rejection_of(refused), refused)
        return await self._failed(run, cause)

    # ------------------------------------------------------------------------------------- what a failure leads to
    async def _failed(self, run: SagaRun, error: BaseException) -> Outcome:
        """Another attempt, or the end of all attempts."""
        options, attempt, endings = self._options, self._saga.attempt, self._endings
        step = run.step_of(error)
        text = describe_in(step and f"step {step!r}", error)
        endings.warn("saga failed", error, recovery_point=run.recovery_point, step=step)
        again = rules.may_try_again(attempt=attempt, max_attempts=options.max_attempts, progressed=run.progressed)
        if again and retryable(error, options.retry_on):
            return await endings.release(error, text, failures=1 if run.progressed else attempt)
        match rules.after_last_attempt(await self._leases.steps(self._saga.key)):
            case LastResort.UNKNOWN_EFFECT:
                return await endings.put_aside(UnknownEffect.reason, text)
            case LastResort.EXHAUSTED:
                return await endings.put_aside("attempts_exhausted", text)
            case LastResort.UNDO:
                return await self._reject(run, ("attempts_exhausted", type(error).__name__), error)

    async def _reject(self, run: SagaRun, code_and_body: tuple[str, object], cause: BaseException) -> Outcome:
        """Commit UNDOING first, once the outcome of every call is known (L7)."""
        try:
            rejection = codecs.encode_rejection(*code_and_body)
        except TypeError as unencodable:
            return await self._failed(run, unencodable)
        self._endings.at(Point.REJECTING)
        undoing = await self._leases.undo(self._saga, rejection)
        if undoing is None:
            _, error = await run_isolated(run.resolve(await self._leases.steps(self._saga.key)))
            if error is not None:
                if isinstance(error, (*UNDECIDED, SagaChanged, UnknownEffect)):
                    raise error
                return await self._failed(run, error)
            undoing = await self._leases.undo(self._saga, rejection)
        self._endings.at(Point.REJECTED)
        if undoing is None:
            raise UnknownEffect("it was rejected while a call's outcome is unknown")
        self._work.of_saga.leased = undoing
        return await self._undo(run, cause, fresh=True)

    async def _undo(self, run: SagaRun, cause: BaseException | None, *, fresh: bool = False) -> Outcome:
        """Undo what is to be undone, then FAILED. `cause` ended the run with the undos; `fresh`: it ran forward."""
        saga, endings = self._saga, self._endings
        replayed = cause is None or isinstance(cause, (Replayed, Reject, *self._options.fail_on))
        try:
            await Undo(self._leases, saga, self._functions, endings.at).run(run.asked, replayed=replayed)
        except NotAskedFor as missing:
            assert cause is not None
            if fresh:
                return await endings.release(cause, describe(cause), failures=1, count=False)
            return await self._not_undone(f"the handler, before step {missing.name!r}", cause)
        except NotUndone as failed:
            return await self._not_undone(f"undo of {failed.name!r}", failed.error, progressed=failed.progressed)
        assert saga.rejection is not None
        return await endings.finish(OutcomeKind.FAILED, State.FAILED, StoredResult(saga.rejection))

    async def _not_undone(self, place: str, error: BaseException, *, progressed: bool = False) -> Outcome:
        attempt, endings, text = self._saga.attempt, self._endings, describe_in(place, error)
        endings.warn("undo failed", error)
        if rules.may_try_again(attempt=attempt, max_attempts=self._options.max_attempts, progressed=progressed):
            return await endings.release(error, text, failures=attempt)
        return await endings.put_aside("undo_failed", text)

    # -------------------------------------------------------------------------------------------- after a lost worker
    async def _reconcile(self, call: Call) -> Outcome | None:
        """Ask the handler's `reconcile` whether the lost worker got it done. None: not done, so it is to run."""
        saga, options, endings = self._saga, self._options, self._endings
        try:
            answer = await complete_if_done(self._leases, saga, self._handler, call, self._functions, endings.at)
        except UNDECIDED:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it raises, the answer is not known yet
            text = describe_in("reconcile", error)
            endings.warn("reconcile failed", error)
            if rules.may_try_again(attempt=saga.attempt, max_attempts=options.max_attempts):
                return await endings.release(error, text, failures=saga.attempt)
            return await endings.put_aside(UnknownEffect.reason, text)
        if isinstance(answer, Done):
            return endings.finished(OutcomeKind.APPLIED, State.COMPLETED, answer.result)
        if isinstance(answer, NotDone):
            await self._leases.note(saga.key, "reconciled", "not done")
            return None
        reason = "review" if options.on_stale == "review" else UnknownEffect.reason
        return await endings.put_aside(reason, "its worker was lost, and reconcile cannot tell whether it was done")

    async def _both_lists(self) -> str:
        """What a person compares to decide about a changed handler."""
        recorded = _names([row.name for row in await self._leases.steps(self._saga.key)])
        asked_for = "nothing, it did not run" if self.run is None else _names(list(self.run.asked))
        return f"recorded: {recorded}; requested: {asked_for}"


def _names(steps: Sequence[str]) -> str:
    more = f" and {len(steps) - _MOST_NAMES} more" if len(steps) > _MOST_NAMES else ""
    return (", ".join(steps[:_MOST_NAMES]) or "no step") + more
