"""How an attempt ends that is not applied: replayed, tried again, rejected, or as a dead letter.

Whatever is written here has a commit of its own, after the group's transaction has ended.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from idemconsumer.engine.blame import Telling, describe, rejection_of
from idemconsumer.engine.dead_letter import dead_letter
from idemconsumer.engine.evidence import Contended
from idemconsumer.engine.failing import Failing, Subject
from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import BadMessage, ConnectionLost, Contention, Fenced, NotReadNow, Retry
from idemconsumer.handlers.durations import retry_delay
from idemconsumer.logs import log
from idemconsumer.message import codecs
from idemconsumer.ports.observer import Point
from idemconsumer.redaction import traceback_text
from idemconsumer.rules import breaker as rules
from idemconsumer.rules.backoff import MAX_UNSETTLED
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Found, Outcome, OutcomeKind, Record, State
from idemconsumer.rules.verdicts import (
    MAX_CONTENTION,
    Failure,
    Verdict,
    after_failure,
    contention_pause,
    final,
    refused,
)
from idemconsumer.stores.columns import NextAttempt
from idemconsumer.stores.decided import decided
from idemconsumer.stores.joined import PostgresStore

T = TypeVar("T")

DOUBT: Final = 0.5  # seconds in which other messages may show that they cannot be read either


@dataclass(slots=True)
class FailedBehind:
    """A message that failed at the end of a group. The group's commit counts the failure, which saves a commit (G9).

    `attempts`: how many it has after that commit. `in_doubt`: the answer to that commit was lost; `counted`: the commit
    had succeeded all the same.
    """

    claim: Claim
    error: str
    attempts: int = 0
    in_doubt: bool = False
    counted: bool = False


class Endings:
    """The endings of one engine. Raises StoreUnavailable if nothing could be decided."""

    def __init__(
        self,
        store: PostgresStore,
        at: Callable[[Point, str, Sequence[bytes]], None],
        chance: Callable[[], float],
        failing: Failing,
        telling: Telling,
        *,
        in_worker: bool,
    ) -> None:
        self.failing = failing
        self.telling = telling
        self._in_worker = in_worker
        self._store = store
        self._at = at
        self._chance = chance
        self.contended = Contended()

    async def replay(self, work: Work, found: Found) -> Outcome:
        """The outcome of a delivery whose key has a record already, or is held by a rival (another worker)."""
        match work.judge(found):
            case Verdict.CONFLICT:
                return await self.bury(work, "conflict", "the same key arrived before with another payload")
            case Verdict.DEAD:  # O6: the arrival is counted with its dead letter
                letter, reason = await self._store.count_dead(work.key) or (None, None)
                self.telling.dead_again(work, reason, letter)
                kind = OutcomeKind.DEAD
                return Outcome(kind, state=State.DEAD, attempt=work.attempt, reason=reason, letter=letter)
            case Verdict.DUPLICATE if isinstance(found, Record):
                return final(OutcomeKind.DUPLICATE, found.state, found.result, attempt=work.attempt)
            case _:
                return Outcome(OutcomeKind.BUSY, attempt=work.attempt)

    def would_end(self, work: Work, error: Exception) -> bool:
        """Whether this failure, not counted yet, ends the message: a rejection, or the last of its attempts."""
        return refused(error, work.handler.options.fail_on) or self.ends(work, work.attempts + 1)

    def ends(self, work: Work, attempts: int) -> bool:
        """Whether so many counted failures end the message. Other processes may have counted attempts too."""
        return after_failure(attempts=attempts, max_attempts=work.handler.options.max_attempts) is Failure.DEAD

    async def failed(self, work: Work, error: Exception) -> Outcome:
        """Count the failure (B1), and decide between another attempt, a rejection and a dead letter."""
        if refused(error, work.handler.options.fail_on):
            try:
                outcome = await self._reject(work, error)
            except TypeError as unencodable:
                error = unencodable
            else:
                self.failing.succeeded(Subject.handler(work.handler), [work.identity], [work.tenant])  # it has decided
                return outcome
        if self.is_spared(work, error):  # D17: all messages of its handler fail, so this one is not to blame
            self.contended.ended(work.key)
            work.spared += 1
            backoff = work.handler.options.backoff.delay(work.attempts + work.spared, self._chance())
            return _retrying("failing", work.attempt - 1, min(MAX_UNSETTLED, backoff), error)
        counted = work.suspicion is Suspicion.COUNTED
        if not counted and not self.would_end(work, error) and (later := await self._put_off(work, error)) is not None:
            return later
        await self.count(work, error)
        return await self.conclude(work, error)

    def is_spared(self, work: Work, error: Exception) -> bool:
        """Report this failure to the circuit breaker. Returns whether it costs no attempt (D17)."""
        handler = Subject.handler(work.handler)
        free = self.failing.failed(handler, work.identity, error, first=not work.attempts, tenant=work.tenant)
        return free and work.handler.options.max_attempts > 1 and work.suspicion is not Suspicion.COUNTED

    async def count(self, work: Work, error: Exception, behind: FailedBehind | None = None) -> None:
        """Count the failure (B1), unless the commit of the group before it has counted it."""
        text = describe(error)
        self.contended.ended(work.key)
        if behind is not None and behind.attempts:
            work.failed(behind.attempts)
        elif work.suspicion is Suspicion.COUNTED or (behind is not None and behind.counted):
            work.failed(await self._store.note_error(work.claim, text))
        else:
            work.failed(await self._store.count_attempt(work.claim, text))
        self._counted(work, error)

    def _counted(self, work: Work, error: Exception) -> None:
        self._at(Point.ATTEMPT_COUNTED, work.handler.name, (work.key,))
        self.telling.failed("handler failed", work, work.attempts, error)

    async def lost(self, work: Work, loss: ConnectionLost) -> Outcome:
        """The message lost its connection once more, in a run that was counted beforehand (B13)."""
        if work.attempts >= work.handler.options.max_attempts:
            return await self.bury(work, "lost_connection", describe(loss), loss)
        await self.count(work, loss)
        due = min(MAX_UNSETTLED, self._pause(work, loss, work.attempts)[0])
        return _retrying("retry", work.attempts, due, loss)

    async def conclude(self, work: Work, error: Exception) -> Outcome:
        """Decide what follows from a failure that is counted."""
        if self.ends(work, work.attempts):
            return await self.bury(work, "attempts_exhausted", describe(error), error)
        later = await self._put_off(work, error, counted=True)
        return later or _retrying("retry", work.attempts, self._pause(work, error, work.attempts)[0], error)

    def _pause(self, work: Work, error: Exception, attempts: int) -> tuple[float, bool]:
        """Seconds until the attempt after `attempts` failed ones, and whether a worker stores the message meanwhile
        (D7)."""
        if isinstance(error, Retry) and error.after is not None:
            due = retry_delay(error.after, work.handler.name)
            return due, due > MAX_UNSETTLED
        backoff = work.handler.options.backoff
        return backoff.delay(attempts, self._chance()), backoff.stores(attempts)

    async def _put_off(self, work: Work, error: Exception, *, counted: bool = False) -> Outcome | None:
        """Store the message until its next attempt, with its failure unless that is `counted` (D18). None: the message
        stays unsettled for that time, or has no attempt left."""
        handler = work.handler
        due, stored = self._pause(work, error, work.attempts + (not counted))
        if not (stored and self._in_worker):
            return None
        later = NextAttempt(
            queue=handler.retry_source.partition(":")[2],
            message=work.message,
            after=due,
            attempts=work.attempts,
            max_attempts=handler.options.max_attempts,
            error=None if counted else describe(error),
            own_id=work.own_id,
            row=work.row,
            letter=work.letter,
        )
        try:
            failed = await self._written(work, lambda: self._store.put_off(work.claim, later))
        except Fenced:  # another worker has the delivery by now, or an answer was lost and it is stored already
            return Outcome(OutcomeKind.FENCED, state=State.PENDING, attempt=work.attempt)
        if isinstance(failed, Outcome):
            return failed
        if failed >= later.max_attempts:
            return None
        if not counted:
            work.failed(failed)
            self._counted(work, error)
        return _retrying("scheduled", failed, due, error, State.PENDING)

    async def collided(self, work: Work, contention: Contention) -> Outcome:
        """A collision is no message's fault, so it costs no attempt (B3), until it has collided for an hour (B15)."""
        streak = self.contended.collided(work.key, work.handler.name)
        if streak.seconds >= MAX_CONTENTION:
            return await self.bury(work, "contended", streak.describe(contention))
        return self._free_retry(work, contention, streak.collisions)

    def _free_retry(self, work: Work, contention: Contention, collisions: int = 1) -> Outcome:
        log.debug("contention, running again", **work.named, error=str(contention))
        return _retrying("contention", work.attempt, contention_pause(collisions, self._chance()))

    async def _reject(self, work: Work, error: Exception) -> Outcome:
        code, body, status = rejection_of(error)
        rejection = codecs.encode_rejection(code, body, status)
        self._at(Point.REJECTING, work.handler.name, (work.key,))
        # In a new transaction, which judges the key again: a rival may have decided it meanwhile (B2).
        standing = await self._written(work, lambda: self._store.reject(work.claim, rejection))
        self._at(Point.REJECTED, work.handler.name, (work.key,))
        if standing is not None:
            return standing
        self.telling.rejected(work, work.attempt, error)
        return final(OutcomeKind.FAILED, State.FAILED, rejection, attempt=work.attempt, reason=code)

    async def refuse(self, work: Work, refusal: BadMessage) -> Outcome:
        """Make a message that cannot be run a dead letter (R9), unless it may become readable."""
        if self.is_not_now(work):
            assert isinstance(refusal, NotReadNow)
            return self.not_now(work, refusal)
        if work.misread and self._is_doubted(work, refusal):
            work.spared += 1
            kind = OutcomeKind.RETRYING
            return Outcome(kind, due=DOUBT, attempt=work.attempt - 1, reason="failing", error=refusal.reason)
        forget = () if refusal.record is None else (refusal.record,)
        return await self.bury(work, refusal.reason, refusal.detail, forget=forget)

    def is_not_now(self, work: Work) -> bool:
        """Whether it merely cannot be read now. That lasts a day at most; then the message itself is to blame (D26)."""
        return isinstance(work.refusal, NotReadNow) and time.monotonic() - work.arrived < rules.FREE

    def not_now(self, work: Work, refusal: NotReadNow) -> Outcome:
        """Try again later, at no attempt's cost (D26). Without its key the message cannot be stored for that time."""
        error, handler = refusal.error, Subject.handler(work.handler)
        work.put_by += 1
        self.failing.failed(handler, work.identity, error, first=work.put_by == 1)
        self.telling.failed("decoding deferred", work, work.attempt, error)
        due = min(MAX_UNSETTLED, self._pause(work, error, work.put_by)[0])
        return _retrying("retry" if isinstance(error, Retry) else "failing", work.attempt, due, error)

    def _is_doubted(self, work: Work, refusal: BadMessage) -> bool:
        """D25: doubted the first time, until it is clear whether others can be read, and while all messages fail."""
        first = not work.spared
        return self.failing.failed(Subject.handler(work.handler), work.identity, refusal, first=first) or (
            first and self._in_worker
        )

    async def bury(
        self, work: Work, reason: str, text: str, error: BaseException | None = None, *, forget: Sequence[bytes] = ()
    ) -> Outcome:
        """Make it a dead letter, committed before the delivery may be settled (B4). Its record becomes DEAD too, if
        this delivery owns the key. `text`: why. `error`: the exception that `text` describes, if there is one."""
        claim = None if reason == "conflict" else work.known_claim
        letter = dead_letter(work, reason, text, work.attempts, None if error is None else traceback_text(error))
        self._at(Point.DEAD_LETTERING, work.handler.name, (work.key,))
        number = await self._written(work, lambda: self._store.bury(letter, claim, forget=forget))
        self._at(Point.DEAD_LETTERED, work.handler.name, (work.key,))
        if isinstance(number, Outcome):
            return number
        self.failing.ended(Subject.handler(work.handler), work.identity)
        self.telling.dead(work, work.attempts, reason, number, text, error)
        kind = OutcomeKind.CONFLICT if reason == "conflict" else OutcomeKind.DEAD
        state = State.DEAD if claim is not None else None
        attempt = max(1, work.attempts)
        return Outcome(kind, state=state, attempt=attempt, reason=reason, error=text)

    async def _written(self, work: Work, write: Callable[[], Awaitable[Record | T]]) -> Outcome | T:
        """Run a commit of the engine's own. Returns its result, or the outcome if a rival was faster."""
        try:
            written = await decided(write)
        except Contention as contention:
            return self._free_retry(work, contention)
        self.contended.ended(work.key)
        return await self.replay(work, written) if isinstance(written, Record) else written


def _retrying(
    reason: str, attempt: int, due: float, error: BaseException | None = None, state: State | None = None
) -> Outcome:
    """A retry in `due` seconds. `attempt`: the number of the run that has failed."""
    name = None if error is None else type(error).__name__
    return Outcome(OutcomeKind.RETRYING, state=state, due=due, attempt=attempt, reason=reason, error=name)
