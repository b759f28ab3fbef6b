"""Sagas: leased mode, one straight line from a claim to an end.

The claim commits first, with the message, so that any worker can go on with it. A run replays the handler over the
recorded steps; it ends completed, rejected, failed for now, interrupted, or fenced. Whatever is not known to have ended
is released to its next attempt, or put aside for a person; nothing is completed or undone on a guess.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from idemconsumer import codecs
from idemconsumer._engine import Engine, asked
from idemconsumer._machine import Verdict, judge
from idemconsumer._model import (
    Mark,
    Outcome,
    OutcomeKind,
    Point,
    Record,
    SagaPoint,
    State,
    StepKind,
    StepState,
    StoredResult,
)
from idemconsumer._work import Work, dead_letter, describe, rejection_of, where
from idemconsumer.errors import (
    CommitUnknown,
    Contention,
    Fenced,
    Reject,
    Retry,
    SagaChanged,
    StoreUnavailable,
    UnknownEffect,
)
from idemconsumer.ports import Holding, LeaseStore, Observer, Silent, StepRow
from idemconsumer.saga import Asked, SagaRun, StepCall, decode_output, step_key

log = structlog.get_logger("idemconsumer")

_STORED = (OutcomeKind.BUSY, OutcomeKind.RETRYING, OutcomeKind.FENCED, OutcomeKind.CANCELLED)
ANY_VERSION = "*"  # a person has decided that the saga may go on with whatever the handler is now


class LeasedEngine:
    """Owns every saga that this process holds. Raises StoreUnavailable when nothing could be decided."""

    def __init__(
        self,
        engine: Engine,
        leases: LeaseStore,
        observer: Observer | None = None,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._engine = engine
        self._leases = leases
        self._at = (observer or Silent()).at
        self._chance = chance
        self._active: dict[asyncio.Task[object], SagaRun | None] = {}
        self._works: set[Work] = set()
        self._lost: set[asyncio.Task[object]] = set()
        self._drained: set[asyncio.Task[object]] = set()

    def lose(self) -> None:
        """The lease is lost: every saga is interrupted as fenced, in time before another worker may take it."""
        for task, run in self._active.items():
            if run is not None:
                run.interrupt(Fenced("the lease of this worker was lost"))
            self._lost.add(task)
            task.cancel()

    def drain(self) -> None:
        """Release every saga at once, so that other workers go on with them."""
        for task in self._active:
            self._drained.add(task)
            task.cancel()

    async def run(self, work: Work, claimed: Callable[[], Awaitable[None]]) -> Outcome:
        """Claim the saga or go on with one that was taken over, and run it to an end of this attempt.

        `claimed` is awaited as soon as the message is ours, committed: the broker may be told then. When
        StoreUnavailable is raised afterwards, `work` remembers what it holds, and may be presented again.
        """
        task = asyncio.current_task()
        assert task is not None
        self._active[task] = None
        self._works.add(work)
        try:
            outcome = await self._go(work, claimed)
        except (StoreUnavailable, CommitUnknown, Contention) as error:
            work.doubt = work.holding is not None
            if isinstance(error, StoreUnavailable):
                raise
            raise StoreUnavailable(f"not decided: {error}") from error
        except Fenced:
            outcome = self._fenced(work)
        except asyncio.CancelledError:
            if task in self._lost:
                outcome = self._fenced(work)
            else:
                await self._release(work)
                if task not in self._drained:
                    raise
                outcome = Outcome(OutcomeKind.CANCELLED, state=None if work.holding is None else work.holding.state)
        finally:
            del self._active[task]
            self._works.discard(work)
            for asked_to in (self._lost, self._drained):
                if task in asked_to:
                    asked_to.discard(task)
                    task.uncancel()
        if outcome.kind in _STORED and work.handler.options.settle == "finished" and not work.resumed:
            work.holding = None
            return replace(outcome, state=None)  # the broker keeps it: held until there is an end
        return outcome

    def _fenced(self, work: Work) -> Outcome:
        log.warning("fenced", handler=work.handler.name, key=work.key.hex()[:12])
        # Cancelled before its claim was known, it may not be stored, and the broker must keep it.
        return Outcome(OutcomeKind.FENCED, state=None if work.holding is None else State.PROCESSING)

    async def _release(self, work: Work) -> None:
        """Free at once, at no cost. If that fails, the lease runs out."""
        if work.holding is not None:
            # In a task of its own: the store gives no connection to one that is being cancelled.
            await asyncio.gather(self._leases.release(work.holding, 0.0, None, count=False), return_exceptions=True)

    async def _go(self, work: Work, claimed: Callable[[], Awaitable[None]]) -> Outcome:
        if work.holding is None:
            begun = await self._begin(work)
            if isinstance(begun, Outcome):
                return begun
            work.holding = begun
        if work.call is None:
            detail = "it cannot be decoded any more" if work.refusal is None else str(work.refusal)
            return await self._park(work, work.holding, SagaChanged.reason, detail)
        if work.doubt:
            again = await self._retake(work, work.holding)
            if isinstance(again, Outcome):
                return again
            work.holding, work.doubt = again, False
        while True:
            if work.handler.options.settle == "claimed":
                await claimed()
            end = await self._attempt(work, work.holding)
            if isinstance(end, Outcome):
                return end
            work.holding = end

    async def _begin(self, work: Work) -> Holding | Outcome:
        call = work.call
        assert call is not None
        options = work.handler.options
        while True:
            try:
                found = await self._leases.begin(call.claim, work.message, work.handler.name, options.version)
            except CommitUnknown:
                if (ours := await self._leases.retake(work.key, None)) is not None:
                    return ours
                continue
            if isinstance(found, Holding):
                self._at(Point.CLAIMED, work.handler.name, (work.key,))
                return found
            if isinstance(found, Record) and judge(found, call.claim.fingerprint) is Verdict.BUSY:
                # A redelivery may be the first to notice that the owner is gone.
                # What another call of this process runs is not to be taken from it.
                held = [other.key for other in self._works if other is not work]
                taken = await self._leases.take([work.handler.name], 1, held=held, key=work.key)
                return taken[0] if taken else Outcome(OutcomeKind.BUSY, state=found.state)
            return Outcome(OutcomeKind.BUSY) if found is Mark.BUSY else await self._engine.replay(work, found)

    # ---------------------------------------------------------------------------------------------------- one attempt
    async def _attempt(self, work: Work, holding: Holding) -> Outcome | Holding:
        """One run of the handler; a Holding when a COMMIT's answer was lost and it must be run anew with that token."""
        try:
            try:
                return await self._run(work, holding)
            except (SagaChanged, UnknownEffect) as error:
                return await self._park(work, work.holding or holding, error.reason, str(error))  # may be UNDOING now
        except CommitUnknown as unknown:
            log.warning("commit unknown, taking over from oneself", handler=work.handler.name, error=str(unknown))
            return await self._retake(work, holding)

    async def _retake(self, work: Work, holding: Holding) -> Outcome | Holding:
        """A new token for what is ours, once everything under the old one has ended; else what has become of it."""
        retaken = await self._leases.retake(holding.key, holding.token)
        if retaken is not None:
            return retaken
        (record,) = await self._engine.peek([holding.key])
        if record is not None and judge(record, None) is not Verdict.BUSY:
            return await self._engine.replay(work, record)
        raise Fenced("the saga has another owner")

    async def _run(self, work: Work, holding: Holding) -> Outcome:
        options = work.handler.options
        if holding.stale and options.on_stale == "review":
            return await self._park(
                work, holding, "review", "its worker is gone, and on_stale says that a person decides"
            )
        if holding.attempt > options.max_attempts:
            return await self._park(work, holding, "killed_worker", f"{holding.attempt - 1} workers ended while it ran")
        if holding.version not in (options.version, ANY_VERSION):
            raise SagaChanged(
                f"it began with version {holding.version!r}, and the handler is version {options.version!r}"
            )
        assert work.call is not None
        run = SagaRun(
            self._leases,
            holding,
            await self._leases.steps(holding.key),
            timeout=options.timeout,
            accepted=holding.version == ANY_VERSION,
            at=self._at,
        )
        task = asyncio.current_task()
        assert task is not None
        self._active[task] = run
        try:
            value, error = await _ended(asyncio.create_task(work.handler.run(work.call, run, holding.attempt)))
        except asyncio.CancelledError:
            await run.settle()
            raise
        if isinstance(error, ExceptionGroup):
            error = _one_rejection(error, (Reject, *options.fail_on)) or error
        if isinstance(error, Reject):
            await run.siblings()
        await run.settle()
        cause = run.interruption or error
        if isinstance(cause, Fenced | StoreUnavailable | CommitUnknown | Contention | SagaChanged | UnknownEffect):
            raise cause
        if holding.state is State.UNDOING:
            return await self._undo(work, holding, run)
        if cause is None:
            run.check_complete()
            try:
                result = codecs.encode(value)
            except TypeError as unencodable:
                return await self._failed(work, holding, run, unencodable)
            return await self._complete(work, holding, result)
        # A TaskGroup cancels the steps beside a rejected one. It stays a rejection, and what they did not end is open.
        beside = run.rejected and isinstance(run.interruption, asyncio.CancelledError)
        refusal = error if beside and isinstance(error, Reject) else cause
        if isinstance(refusal, (Reject, *options.fail_on)):
            return await self._reject(work, holding, run, rejection_of(refusal))
        return await self._failed(work, holding, run, cause)

    async def _complete(self, work: Work, holding: Holding, result: StoredResult | None) -> Outcome:
        self._at(Point.SEALING, work.handler.name, (holding.key,))
        await self._leases.complete(holding, State.COMPLETED, result)
        self._at(Point.COMMITTED, work.handler.name, (holding.key,))
        return Outcome(
            OutcomeKind.APPLIED,
            result=None if result is None else result.body,
            content_type=None if result is None else result.content_type,
            state=State.COMPLETED,
            attempt=holding.attempt,
        )

    async def _failed(self, work: Work, holding: Holding, run: SagaRun, error: BaseException) -> Outcome:
        """Another attempt, or the end of all attempts. A finished step since the last one makes it the first again."""
        options = work.handler.options
        log.warning(
            "saga failed", handler=work.handler.name, key=work.key.hex()[:12], attempt=holding.attempt,
            error=type(error).__name__, where=where(error), recovery_point=run.recovery_point,
        )  # fmt: skip
        retryable = isinstance(error, Retry) or options.retry_on is None or isinstance(error, options.retry_on)
        if retryable and (run.progressed or holding.attempt < options.max_attempts):
            delay = options.backoff.delay(1 if run.progressed else holding.attempt, self._chance())
            if isinstance(error, Retry) and error.after is not None:
                delay = asked(error.after, work.handler.name)
            await self._leases.release(holding, delay, describe(error), count=True)
            self._at(SagaPoint.RELEASED, work.handler.name, (holding.key,))
            return Outcome(
                OutcomeKind.RETRYING,
                state=State.PROCESSING,
                due=delay,
                attempt=holding.attempt,
                error=type(error).__name__,
            )
        rows = await self._leases.steps(holding.key)
        if any(row.state is StepState.INTENT for row in rows):
            return await self._park(work, holding, "unknown_effect", describe(error))
        if any(row.has_undo and row.state is StepState.DONE for row in rows):
            return await self._reject(work, holding, run, ("attempts_exhausted", type(error).__name__))
        return await self._park(work, holding, "attempts_exhausted", describe(error))

    # ------------------------------------------------------------------------------------------------ rejection, undo
    async def _reject(self, work: Work, holding: Holding, run: SagaRun, code_and_body: tuple[str, object]) -> Outcome:
        rejection = codecs.encode_rejection(*code_and_body)
        self._at(Point.REJECTING, work.handler.name, (holding.key,))
        undoing = await self._leases.undo(holding, rejection)
        self._at(Point.REJECTED, work.handler.name, (holding.key,))
        if undoing is None:
            return await self._park(
                work, holding, "unknown_effect", "it was rejected while a call's outcome is unknown"
            )
        work.holding = undoing
        return await self._undo(work, undoing, run)

    async def _undo(self, work: Work, holding: Holding, run: SagaRun) -> Outcome:
        """Undo the finished steps from the last to the first, each checkpointed, then FAILED (L7)."""
        rows = [row for row in await self._leases.steps(holding.key) if row.has_undo]
        todo = [row for row in rows if row.state in (StepState.DONE, StepState.UNDO_INTENT)]
        steps = {name: step for name, step in run.asked.items() if step.undo is not None}
        if lost := [row.name for row in todo if row.name not in steps]:
            raise SagaChanged(f"step {lost[0]!r} has to be undone, and the handler no longer says how")
        progressed = False
        for row in sorted(todo, key=lambda row: row.position or 0, reverse=True):
            try:
                await self._undo_step(work, holding, row, steps[row.name])
            except (Fenced, StoreUnavailable, CommitUnknown):
                raise
            except Exception as error:  # noqa: BLE001 - whatever an undo raises is retried like a step
                if not progressed and holding.attempt >= work.handler.options.max_attempts:
                    return await self._park(work, holding, "undo_failed", f"undo of {row.name!r}: {describe(error)}")
                delay = work.handler.options.backoff.delay(holding.attempt, self._chance())
                await self._leases.release(holding, delay, describe(error), count=True)
                self._at(SagaPoint.RELEASED, work.handler.name, (holding.key,))
                return Outcome(OutcomeKind.RETRYING, state=State.UNDOING, due=delay, attempt=holding.attempt)
            progressed = True
        assert holding.rejection is not None
        rejection = StoredResult(holding.rejection)
        self._at(Point.SEALING, work.handler.name, (holding.key,))
        await self._leases.complete(holding, State.FAILED, rejection)
        self._at(Point.COMMITTED, work.handler.name, (holding.key,))
        return Outcome(
            OutcomeKind.FAILED, result=rejection.body, content_type=rejection.content_type, state=State.FAILED,
            attempt=holding.attempt,
        )  # fmt: skip

    async def _undo_step(self, work: Work, holding: Holding, row: StepRow, step: Asked) -> None:
        assert step.undo is not None
        output = decode_output(row.name, step.fn, row.output)
        timeout = work.handler.options.timeout
        self._at(SagaPoint.UNDOING, work.handler.name, (holding.key,))
        if row.kind is StepKind.TX:
            async with self._leases.step(holding, row.name, has_undo=True, undo=True) as opened:
                try:
                    async with asyncio.timeout(timeout):
                        await step.undo(opened.tx(), output, *step.args)
                    opened.check()
                except Exception as error:
                    raise opened.diagnose(error) from error
                await opened.finish(None, overlapped=False)
        else:
            attempt = await self._leases.intend(holding, row.name, has_undo=True, undo=True)
            key = step_key(holding.scope, holding.key, row.name, undo=True)
            async with asyncio.timeout(timeout):
                await step.undo(StepCall(key, attempt), output, *step.args)
            self._at(SagaPoint.CALLED, work.handler.name, (holding.key,))
            await self._leases.record(
                holding, row.name, row.kind, StepState.UNDONE, None, has_undo=True, overlapped=row.overlapped
            )
        self._at(SagaPoint.UNDONE, work.handler.name, (holding.key,))

    async def _park(self, work: Work, holding: Holding, reason: str, error: str) -> Outcome:
        """For a person: never completed, undone or run again by itself."""
        self._at(Point.DEAD_LETTERING, work.handler.name, (holding.key,))
        await self._leases.park(holding, dead_letter(work, reason, error, holding.attempt))
        self._at(Point.DEAD_LETTERED, work.handler.name, (holding.key,))
        log.error(
            "dead letter", handler=work.handler.name, key=work.key.hex()[:12], reason=reason, attempt=holding.attempt
        )
        return Outcome(OutcomeKind.DEAD, state=State.DEAD, attempt=holding.attempt, reason=reason, error=error)


async def _ended(handler: asyncio.Task[object]) -> tuple[object, BaseException | None]:
    """What the handler returned or raised. A cancellation of the caller is passed on, and raised whatever the handler
    makes of it.

    The handler has a task of its own, since what user code does to its task must end with it: before Python 3.13 a
    TaskGroup with a failed child leaves `cancelling()` raised for good.
    """
    cancelled: asyncio.CancelledError | None = None
    while not handler.done():
        try:
            await asyncio.wait([handler])
        except asyncio.CancelledError as error:
            cancelled = error
            handler.cancel()
    raised = asyncio.CancelledError() if handler.cancelled() else handler.exception()
    if cancelled is not None:
        raise cancelled
    return (None if raised is not None else handler.result()), raised


def _one_rejection(error: Exception, kinds: tuple[type[Exception], ...]) -> Exception | None:
    """The first of a TaskGroup's errors, if nothing but rejections left it."""
    if not isinstance(error, ExceptionGroup) or error.split(kinds)[1] is not None:
        return None
    first = error.exceptions[0]
    return _one_rejection(first, kinds) or first
