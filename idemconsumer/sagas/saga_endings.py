"""How an attempt of a saga ends: with a result, with another attempt, or parked for a person.

Each ending is one fenced commit of the store, and returns the outcome for the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from idemconsumer.engine import decoding as reading
from idemconsumer.engine.blame import Telling, describe
from idemconsumer.engine.dead_letter import dead_letter
from idemconsumer.engine.work import Work
from idemconsumer.errors import NotReadNow, Retry
from idemconsumer.handlers.arguments import Done, NotDone, Unknown
from idemconsumer.handlers.durations import retry_delay
from idemconsumer.handlers.handler import Call
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.redaction import traceback_text
from idemconsumer.rules.backoff import MAX_UNSETTLED, Backoff
from idemconsumer.rules.saga import (
    MAX_DURATION,
    attempts_of_step,
    attempts_of_undo,
    may_try_again,
    overdue_in,
    undecided,
)
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.sagas.probes import Probes
from idemconsumer.sagas.step import NONE, StepSpec
from idemconsumer.sagas.steps import GRACE, At, StepFunctions, checked_answer, left_behind
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.user_code.call import call_in_transaction
from idemconsumer.user_code.cancellation import run_isolated, run_mortal

_UNTIL_OTHERS: Final = 5.0  # seconds reserved for workers of other builds; then any worker may take the saga


class SagaEndings:
    """The ways in which an attempt of the saga in `work` ends."""

    def __init__(
        self,
        work: Work,
        leases: PostgresLeases,
        at: At,
        chance: Callable[[], float],
        telling: Telling,
        probes: Probes,
    ) -> None:
        self.leases = leases
        self.probes = probes
        self.at = at
        self.chance = chance
        self._work = work
        self._held = work.of_saga
        self._handler = work.handler
        self._telling = telling

    @property
    def saga(self) -> LeasedSaga:
        """The saga as it is held now."""
        assert self._held.leased is not None
        return self._held.leased

    @saga.setter
    def saga(self, saga: LeasedSaga) -> None:
        self._held.leased = saga

    def left(self) -> float | None:
        """For how many seconds the saga may go on (L58). None: without limit, or because its end is decided already."""
        saga, most = self.saga, self._handler.options.max_duration
        if saga.state is not State.PROCESSING or saga.cancel is not None:
            return None
        return overdue_in(now=time.monotonic(), begun=saga.begun, max_duration=most)

    async def finish(self, state: State, result: StoredResult | None) -> Outcome:
        """End as COMPLETED or FAILED, with the result that is stored for duplicates."""
        saga = self.saga
        self.at(Point.SEALING)
        await self.leases.complete(saga, state, result)
        self.at(Point.COMMITTED)
        return self._finished(state, result)

    def _finished(self, state: State, result: StoredResult | None) -> Outcome:
        """The outcome of an ending that is already committed."""
        return Outcome(
            OutcomeKind.APPLIED if state is State.COMPLETED else OutcomeKind.FAILED,
            result=None if result is None else result.body,
            content_type=None if result is None else result.content_type,
            state=state,
            attempt=self.saga.attempt,
        )

    async def try_again(
        self,
        error: BaseException,
        text: str,
        spec: StepSpec | None = None,
        *,
        undoing: bool = False,
        progressed: bool = False,
        overdue: bool = False,
    ) -> Outcome | None:
        """Release the saga for another attempt, if one may follow; None otherwise. `spec`: the step that failed, or
        with `undoing` the step whose undo failed. `progressed`: another step was finished, or undone, before it in this
        attempt."""
        saga, own, options = self.saga, NONE if spec is None else spec.limits, self._handler.options
        allowed = attempts_of_undo if undoing else attempts_of_step
        most = allowed(own.max_attempts, options.max_attempts)
        if spec is not None and (fn := spec.undo if undoing else spec.fn) is not None:
            free = self.probes.failed(fn, saga, error, first=progressed or saga.attempt == 1)
            if free and most > 1 and not saga.suspect:  # it fails in all sagas (D17)
                return await self.release(self.probes.seconds(fn), text, error, held=True)
        if not may_try_again(attempt=saga.attempt, max_attempts=most, progressed=progressed):
            return None
        failures = 1 if progressed and not undoing else saga.attempt
        return await self.again(error, text, failures=failures, backoff=own.backoff, overdue=overdue)

    async def again(
        self,
        error: BaseException,
        text: str,
        *,
        failures: int,
        count: bool = True,
        backoff: Backoff | None = None,
        overdue: bool = False,
    ) -> Outcome:
        """Another attempt, after the backoff for this many `failures`, or after the delay of a Retry. `backoff`: that
        of the failed step, if it has its own. The other arguments are those of `release`."""
        return await self.release(self._delay(error, failures, backoff), text, error, count=count, overdue=overdue)

    def _delay(self, error: BaseException, failures: int, backoff: Backoff | None = None) -> float:
        delay = (backoff or self._handler.options.backoff).delay(failures, self.chance())
        if isinstance(error, Retry) and error.after is not None:
            delay = retry_delay(error.after, self._handler.name)
        if self._handler.options.settle == "finished":  # its delivery stays unsettled meanwhile
            delay = min(delay, MAX_UNSETTLED)
        return delay

    async def unread(self) -> Outcome | None:
        """If the message cannot be read now, release the saga for another attempt at no cost (D26); else None."""
        refusal = self._work.refusal
        if self._work.call is not None and self._handler.decodes:
            try:
                await reading.renew(self._handler, self._work.call)
            except NotReadNow as not_now:
                refusal = not_now
        if not isinstance(refusal, NotReadNow):
            return None
        error = refusal.error
        self.warn("decoding deferred", error)
        delay, overdue = self._delay(error, 1), self.left() == 0.0
        return await self.release(delay, describe(error), error, held=True, overdue=overdue)

    async def release(
        self,
        delay: float,
        text: str | None = None,
        error: BaseException | None = None,
        *,
        count: bool = False,
        held: bool = False,
        overdue: bool = False,
    ) -> Outcome:
        """Another attempt, on any worker, in `delay` seconds. This attempt counts only with `count`. `text` goes into
        the saga's history. `held`: a function fails in all sagas (D17), or the message cannot be read now (D26).
        `overdue`: the saga has already reached its `max_duration`."""
        saga, left = self.saga, None if overdue else self.left()
        delay = delay if left is None else min(delay, left)
        await self.leases.release(saga, delay, text, count=count, held=held)
        self.at(SagaPoint.RELEASED)
        kind = None if error is None else type(error).__name__
        return Outcome(OutcomeKind.RETRYING, state=saga.state, due=delay, attempt=saga.attempt, error=kind)

    async def leave(self, error: BaseException) -> Outcome | None:
        """Leave the saga to a worker of another build, at no cost: such a worker may know recorded steps that this one
        does not (L29). None if there is no such worker."""
        due = await self.leases.leave(self._handler.app, self.saga, describe(error), _UNTIL_OTHERS)
        if due is None:
            return None
        self.warn("saga left to a worker of another build", error)
        self.at(SagaPoint.RELEASED)
        kind, saga = OutcomeKind.RETRYING, self.saga
        return Outcome(kind, state=saga.state, due=due, attempt=saga.attempt, error=type(error).__name__)

    async def pause(self, waits: Sequence[str]) -> Outcome:
        """Only waits are left of this run: any worker may take the saga when one of them is over (L41), or when the
        saga reaches its `max_duration`."""
        self.at(SagaPoint.PAUSING)
        return self._paused(await self.leases.pause(self.saga, waits, self.left()))

    async def pause_undo(self, child: bytes) -> Outcome:
        """Any worker may go on with the undo when this child has ended (L49)."""
        self.at(SagaPoint.PAUSING)
        return self._paused(await self.leases.pause_undo(self.saga, child))

    def _paused(self, seconds: float) -> Outcome:
        saga = self.saga
        self.at(SagaPoint.PAUSED)
        return Outcome(OutcomeKind.BUSY, state=saga.state, due=max(0.0, seconds), attempt=saga.attempt)

    # ---------------------------------------------------------------------------- after a lost worker (L8), or too long
    async def reconciled(self, call: Call, functions: StepFunctions, reason: str, why: str) -> Outcome | None:
        """End the saga if the handler's `reconcile` reports that it is done. None: it is not done. If `reconcile`
        cannot tell, the saga is parked for this `reason`."""
        try:
            answer = await self._complete_if_done(call, functions)
        except Exception as error:
            if undecided(error):
                raise
            return await self.unanswered(error, reason)
        if isinstance(answer, Done):
            return self._finished(State.COMPLETED, answer.result)
        if isinstance(answer, NotDone):
            await self.leases.note(self.saga.key, "reconciled", "not done")
            return None
        return await self.put_aside(reason, f"{why}, and reconcile cannot tell whether it was done")

    async def _complete_if_done(
        self, call: Call, functions: StepFunctions
    ) -> Done[StoredResult | None] | NotDone | Unknown:
        """Complete the saga with the result that `reconcile` returns. `reconcile` runs in the transaction that
        completes the saga (L16), so that no other worker can continue it meanwhile."""
        saga, reconcile = self.saga, self._handler.reconcile
        async with self.leases.completion(saga) as opened:

            def accept(ended: tuple[object, BaseException | None]) -> Done[Any] | NotDone | Unknown:
                given, error = ended
                if isinstance(error, Exception):
                    raise error
                answer = checked_answer("reconcile", given if error is None else error)
                opened.check()
                return answer

            asking = run_isolated(reconcile(call, opened.tx(), saga.attempt))
            asking = run_mortal(asking, GRACE, partial(left_behind, reconcile))
            answer = await call_in_transaction(opened.claims, asking, functions.limit_in_transaction(), accept)
            if not isinstance(answer, Done):
                return answer
            result = codecs.encode(answer.result, compared=False)
            self.at(Point.SEALING)
            await opened.finish(result)
            self.at(Point.COMMITTED)
            return Done(result)

    async def unanswered(self, error: Exception, reason: str) -> Outcome:
        """`reconcile` failed, so it is not known yet whether the saga is done: another attempt, or park the saga."""
        text = describe_in("reconcile", error)
        self.warn("reconcile failed", error)
        again = await self.try_again(error, text, overdue=reason == MAX_DURATION)
        return again or await self.put_aside(reason, text, error)

    # ---------------------------------------------------------------------------------------------------- for a person
    async def put_aside(self, reason: str, text: str, error: BaseException | None = None) -> Outcome:
        """Park the saga for a person: it is never completed, undone or run again automatically. `text` gives the
        reason; `error` is the exception that it describes, if there is one."""
        saga = self.saga
        traceback = None if error is None else traceback_text(error)
        self.at(Point.DEAD_LETTERING)
        letter = await self.leases.park(saga, dead_letter(self._work, reason, text, saga.attempt, traceback))
        self.at(Point.DEAD_LETTERED)
        self._telling.dead(self._work, saga.attempt, reason, letter, text, error)
        kind, state = OutcomeKind.DEAD, State.DEAD
        return Outcome(kind, state=state, attempt=saga.attempt, reason=reason, error=text)

    def warn(self, event: str, error: BaseException, *, step: str | None = None, **its: object) -> None:
        kind: dict[str, object] | None = None if step is None else {"step": step}
        self._telling.failed(event, self._work, self.saga.attempt, error, kind, **its)

    def rejected(self, error: BaseException) -> None:
        """Report a rejection, which is committed."""
        self._telling.rejected(self._work, self.saga.attempt, error)


def describe_in(place: str | None, error: BaseException) -> str:
    """An error for the saga's history, with the `place` where it occurred, if one is given."""
    return describe(error) if place is None else f"{place}: {describe(error)}"
