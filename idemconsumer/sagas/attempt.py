"""One attempt of a saga that this worker holds: run its handler, and bring what comes of it to an end.

An attempt ends completed, rejected and undone, released to its next one, or put aside for a person. Whatever is not
known to have ended is never completed or undone on a guess.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from idemconsumer.engine.blame import describe, rejection_of, where
from idemconsumer.engine.work import Work, dead_letter
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
from idemconsumer.handlers.durations import retry_delay
from idemconsumer.handlers.handler import Call
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.handler import Done, NotDone
from idemconsumer.ports.leases import LeasedSaga, LeaseStore
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.saga import ANY_VERSION
from idemconsumer.rules.values import Outcome, OutcomeKind, State, StepKind, StepRow, StepState
from idemconsumer.rules.verdicts import retryable
from idemconsumer.sagas.run import (
    Asked,
    Replayed,
    SagaInterrupted,
    SagaRun,
    StepCall,
    answered,
    decode_output,
    step_key,
)
from idemconsumer.user_code.call import call_user_code
from idemconsumer.user_code.cancellation import run_isolated, uninterrupted
from idemconsumer.user_code.time_limit import TimeLimit

log = structlog.get_logger("idemconsumer")

_UNDECIDED: Final = (Fenced, StoreUnavailable, CommitUnknown, Contention)
_MOST_NAMES: Final = 50  # in the error of a dead letter
At = Callable[[Point | SagaPoint, str, Sequence[bytes]], None]


class Attempt:
    """Owns what `work` holds until `go` ends. `work.holding` follows the saga's phase meanwhile; `run` is there once
    the handler runs."""

    def __init__(self, work: Work, leases: LeaseStore, at: At, lease: float, chance: Callable[[], float]) -> None:
        self._work = work
        self._handler = work.handler
        self._options = work.handler.options
        self._leases = leases
        self._tell = at
        self._lease = lease
        self._chance = chance
        self.run: SagaRun | None = None

    async def go(self) -> Outcome:
        """Raises Fenced, StoreUnavailable and CommitUnknown: nothing is decided, then."""
        try:
            return await self._go()
        except SagaChanged as error:
            return await self._park(error.reason, f"{error}; {await self._both_lists()}")
        except UnknownEffect as error:
            return await self._park(error.reason, str(error))
        except Contention as collision:
            # The saga waits instead of its lane, which would take this for an outage.
            return await self._again(collision, self._pause(1), count=False)

    @property
    def _holding(self) -> LeasedSaga:
        assert self._work.holding is not None
        return self._work.holding

    async def _go(self) -> Outcome:
        holding, options, call = self._holding, self._options, self._work.call
        if call is None:
            raise SagaChanged(str(self._work.refusal or "it cannot be decoded any more"))
        # What an undoing saga is to come to is known, so nothing is asked about it (L8).
        asks = holding.stale and holding.state is State.PROCESSING and self._handler.reconciles
        if holding.stale and options.on_stale == "review" and not asks:
            return await self._park("review", "its worker is gone, and on_stale says that a person decides")
        if holding.attempt > options.max_attempts:
            return await self._park("killed_worker", f"{holding.attempt - 1} workers ended while it ran")
        if holding.version not in (options.version, ANY_VERSION):
            raise SagaChanged(
                f"it began with version {holding.version!r}, and the handler is version {options.version!r}"
            )
        if asks and (end := await self._reconcile(call)) is not None:
            return end
        steps = [] if holding.new else await self._leases.steps(holding.key)
        holding = self._work.holding = replace(holding, stale=False, new=False)
        run = self.run = SagaRun(
            self._leases,
            holding,
            steps,
            timeout=options.timeout,
            lease=self._lease,
            fail_on=options.fail_on,
            resources=self._handler.resources,
            accepted=holding.version == ANY_VERSION,
            at=self._tell,
        )
        try:
            handler = partial(self._handler.run, call, run, holding.attempt)
            value, error = await run_isolated(run.main(handler))
            if isinstance(error, ExceptionGroup):
                error = _one_rejection(error, (Reject, *options.fail_on)) or error
            if isinstance(error, Reject):
                await run.siblings()
            await run.settle(rejected=isinstance(error, Reject))
        except asyncio.CancelledError:
            await uninterrupted(run.settle())
            raise
        cause = run.interruption or error
        if isinstance(cause, (*_UNDECIDED, SagaChanged, UnknownEffect)):
            raise cause
        if holding.state is State.UNDOING:
            return await self._undo(run, cause)
        if cause is None:
            run.check_complete()
            try:
                return await self._end(OutcomeKind.APPLIED, State.COMPLETED, codecs.encode(value))
            except TypeError as unencodable:
                return await self._failed(run, unencodable)
        # A TaskGroup cancels the steps beside a rejected one. It stays a rejection, and what they did not end is open.
        beside = run.rejected and isinstance(run.interruption, asyncio.CancelledError)
        refusal = error if beside and isinstance(error, Reject) else cause
        if isinstance(refusal, (Reject, *options.fail_on)):
            return await self._reject(run, rejection_of(refusal), refusal)
        return await self._failed(run, cause)

    # ----------------------------------------------------------------------------------------------------------- ends
    async def _end(self, kind: OutcomeKind, state: State, result: StoredResult | None) -> Outcome:
        holding = self._holding
        self._at(Point.SEALING)
        await self._leases.complete(holding, state, result)
        self._at(Point.COMMITTED)
        return _outcome(kind, holding, state, result)

    async def _failed(self, run: SagaRun, error: BaseException) -> Outcome:
        """Another attempt, or the end of all attempts. A finished step since the last one makes it the first again."""
        options, attempt = self._options, self._holding.attempt
        step = run.step_of(error)
        told = _told(error, step and f"step {step!r}")
        self._warn("saga failed", error, recovery_point=run.recovery_point, step=step)
        if retryable(error, options.retry_on) and (run.progressed or attempt < options.max_attempts):
            return await self._again(error, self._pause(1 if run.progressed else attempt), told)
        rows = await self._leases.steps(self._holding.key)
        if any(row.state is StepState.INTENT for row in rows):
            return await self._park(UnknownEffect.reason, told)
        if any(row.has_undo and row.state is StepState.DONE for row in rows):
            return await self._reject(run, ("attempts_exhausted", type(error).__name__), error)
        return await self._park("attempts_exhausted", told)

    async def _again(
        self, error: BaseException, delay: float, told: str | None = None, *, count: bool = True
    ) -> Outcome:
        """Another attempt, by whoever takes the saga after `delay` seconds, or as long as the error asks for."""
        holding = self._holding
        if isinstance(error, Retry) and error.after is not None:
            delay = retry_delay(error.after, self._handler.name)
        await self._leases.release(holding, delay, told or describe(error), count=count)
        self._at(SagaPoint.RELEASED)
        kind = type(error).__name__
        return Outcome(OutcomeKind.RETRYING, state=holding.state, due=delay, attempt=holding.attempt, error=kind)

    async def _park(self, reason: str, error: str) -> Outcome:
        """For a person: never completed, undone or run again by itself."""
        holding = self._holding
        self._at(Point.DEAD_LETTERING)
        await self._leases.park(holding, dead_letter(self._work, reason, error, holding.attempt))
        self._at(Point.DEAD_LETTERED)
        log.error("dead letter", reason=reason, **self._named())
        return Outcome(OutcomeKind.DEAD, state=State.DEAD, attempt=holding.attempt, reason=reason, error=error)

    # -------------------------------------------------------------------------------------------- after a lost worker
    async def _reconcile(self, call: Call) -> Outcome | None:
        """Ask the handler's `reconcile` what the lost worker has left behind. None: not done, so it is to run again.

        Asked in the transaction that completes the saga (L16), so that nobody else can go on with it meanwhile.
        """
        holding = self._holding
        try:
            async with self._leases.completion(holding) as opened:
                limit = TimeLimit(self._options.timeout, self._lease)
                try:
                    asking = asyncio.create_task(self._handler.reconcile(call, opened.tx(), holding.attempt))
                    said, wrong = await call_user_code(run_isolated(asking), limit)
                    if isinstance(wrong, Exception):
                        raise wrong
                    answer = answered("reconcile", said if wrong is None else wrong)
                    opened.check()
                except Exception as error:
                    raise limit.blame(opened.diagnose(error)) from error
                if isinstance(answer, Done):
                    result = codecs.encode(answer.result)
                    self._at(Point.SEALING)
                    await opened.finish(result)
                    self._at(Point.COMMITTED)
                    return _outcome(OutcomeKind.APPLIED, holding, State.COMPLETED, result)
        except _UNDECIDED:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it raises, nobody knows the answer yet
            self._warn("reconcile failed", error)
            told = _told(error, "reconcile")
            if holding.attempt < self._options.max_attempts:
                return await self._again(error, self._pause(holding.attempt), told)
            return await self._park(UnknownEffect.reason, told)
        if isinstance(answer, NotDone):
            await self._leases.note(holding.key, "reconciled", "not done")
            return None
        reason = "review" if self._options.on_stale == "review" else UnknownEffect.reason
        return await self._park(reason, "its worker is gone, and reconcile cannot say whether it was done")

    # ------------------------------------------------------------------------------------------------ rejection, undo
    async def _reject(self, run: SagaRun, code_and_body: tuple[str, object], cause: BaseException) -> Outcome:
        """UNDOING first, once it is known how every call has ended (L7)."""
        holding = self._holding
        try:
            rejection = codecs.encode_rejection(*code_and_body)
        except TypeError as unencodable:
            return await self._failed(run, unencodable)
        self._at(Point.REJECTING)
        undoing = await self._leases.undo(holding, rejection)
        if undoing is None:
            resolving = asyncio.create_task(run.resolve(await self._leases.steps(holding.key)))
            if (error := (await run_isolated(resolving))[1]) is not None:
                if isinstance(error, (*_UNDECIDED, SagaChanged, UnknownEffect)):
                    raise error
                return await self._failed(run, error)
            undoing = await self._leases.undo(holding, rejection)
        self._at(Point.REJECTED)
        if undoing is None:
            raise UnknownEffect("it was rejected while a call's outcome is unknown")
        self._work.holding = undoing
        return await self._undo(run, cause, fresh=True)

    async def _undo(self, run: SagaRun, cause: BaseException | None, *, fresh: bool = False) -> Outcome:
        """Undo the finished steps from the last to the first, each checkpointed, then FAILED (L7).

        `cause` is what ended the run that tells how to undo them; `fresh`: it was not yet run for that.
        """
        holding = self._holding
        rows = [row for row in await self._leases.steps(holding.key) if row.has_undo]
        todo = [row for row in rows if row.state in (StepState.DONE, StepState.UNDO_INTENT)]
        steps = {name: step for name, step in run.asked.items() if step.undo is not None}
        if lost := [row.name for row in todo if row.name not in steps]:
            said_all = cause is None or isinstance(cause, (Replayed, Reject, *self._options.fail_on))
            if said_all or lost[0] in run.asked:
                raise SagaChanged(f"step {lost[0]!r} has to be undone, and the handler no longer says how")
            assert cause is not None
            if fresh:
                return await self._again(cause, self._pause(1), count=False)
            return await self._not_undone(f"the handler, before step {lost[0]!r}", cause)
        progressed = False
        for row in sorted(todo, key=lambda row: row.position or 0, reverse=True):
            _, error = await run_isolated(self._undo_step(run, row, steps[row.name]))
            if isinstance(error, _UNDECIDED) or not isinstance(error, Exception | SagaInterrupted | None):
                raise error
            if error is not None:
                return await self._not_undone(f"undo of {row.name!r}", error, progressed=progressed)
            progressed = True
        assert holding.rejection is not None
        return await self._end(OutcomeKind.FAILED, State.FAILED, StoredResult(holding.rejection))

    async def _not_undone(self, what: str, error: BaseException, *, progressed: bool = False) -> Outcome:
        attempt = self._holding.attempt
        self._warn("undo failed", error)
        told = _told(error, what)
        if not progressed and attempt >= self._options.max_attempts:
            return await self._park("undo_failed", told)
        return await self._again(error, self._pause(attempt), told)

    async def _undo_step(self, run: SagaRun, row: StepRow, step: Asked) -> None:
        assert step.undo is not None
        holding, timeout = self._holding, self._options.timeout
        output = decode_output(row.name, step.fn, row.output)
        self._at(SagaPoint.UNDOING)
        if row.kind is StepKind.TX:
            async with self._leases.step(holding, row.name, has_undo=True, undo=True) as opened:
                limit = TimeLimit(timeout, self._lease)
                try:
                    undoing = run.called(step.undo, opened.tx(), output, *step.args, gets="tx and the step's output")
                    await call_user_code(undoing, limit)
                    opened.check()
                    limit.check()
                except Exception as error:
                    raise limit.blame(opened.diagnose(error)) from error
                await opened.finish(None, overlapped=False)
        else:
            attempt = await self._leases.intend(holding, row.name, has_undo=True, undo=True)
            key = step_key(holding.scope, holding.key, row.name, undo=True)
            undoing = run.called(
                step.undo, StepCall(key, attempt), output, *step.args, gets="step and the step's output"
            )
            await call_user_code(undoing, TimeLimit(timeout))
            self._at(SagaPoint.CALLED)
            await self._leases.record(
                holding, row.name, row.kind, StepState.UNDONE, None, has_undo=True, overlapped=row.overlapped
            )
        self._at(SagaPoint.UNDONE)

    # -------------------------------------------------------------------------------------------------------- helpers
    async def _both_lists(self) -> str:
        """What is to be compared by whoever decides about a changed handler."""
        recorded = _names([row.name for row in await self._leases.steps(self._holding.key)])
        asked_for = "nothing, it did not run" if self.run is None else _names(list(self.run.asked))
        return f"recorded: {recorded}; asked for: {asked_for}"

    def _pause(self, attempt: int) -> float:
        return self._options.backoff.delay(attempt, self._chance())

    def _at(self, point: Point | SagaPoint) -> None:
        self._tell(point, self._handler.name, (self._holding.key,))

    def _named(self) -> dict[str, object]:
        holding = self._holding
        return {"handler": self._handler.name, "key": holding.key.hex()[:12], "attempt": holding.attempt}

    def _warn(self, event: str, error: BaseException, **more: object) -> None:
        log.warning(event, error=type(error).__name__, where=where(error), **self._named(), **more)


def _names(steps: Sequence[str]) -> str:
    more = f" and {len(steps) - _MOST_NAMES} more" if len(steps) > _MOST_NAMES else ""
    return (", ".join(steps[:_MOST_NAMES]) or "no step") + more


def _told(error: BaseException, what: str | None) -> str:
    """An error for whoever reads the saga's history."""
    return describe(error) if what is None else f"{what}: {describe(error)}"


def _outcome(kind: OutcomeKind, holding: LeasedSaga, state: State, result: StoredResult | None) -> Outcome:
    return Outcome(
        kind,
        result=None if result is None else result.body,
        content_type=None if result is None else result.content_type,
        state=state,
        attempt=holding.attempt,
    )


def _one_rejection(error: Exception, kinds: tuple[type[Exception], ...]) -> Exception | None:
    """The first of a TaskGroup's errors, if nothing but rejections left it."""
    if not isinstance(error, ExceptionGroup) or error.split(kinds)[1] is not None:
        return None
    first = error.exceptions[0]
    return _one_rejection(first, kinds) or first
