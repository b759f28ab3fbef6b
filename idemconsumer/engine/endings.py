"""How an attempt ends when it is not applied: replayed, tried again, rejected, or put aside.

What is written here is a commit of its own, after the group's transaction has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from idemconsumer.engine.blame import describe, rejection_of, where
from idemconsumer.engine.work import Suspicion, Work, dead_letter
from idemconsumer.errors import BadMessage, CommitUnknown, Contention, Reject, Retry
from idemconsumer.handlers.durations import retry_delay
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import Point
from idemconsumer.ports.store import Claim, JoinedStore
from idemconsumer.rules.values import Found, Outcome, OutcomeKind, Record, State
from idemconsumer.rules.verdicts import Failure, Verdict, after_failure, judge, retryable

log = structlog.get_logger("idemconsumer")


@dataclass(slots=True)
class FailedBehind:
    """A message that failed behind a group, to be counted in the group's commit, which saves one of its own (G9).

    `attempts`: how many it has after that commit. `in_doubt`: the answer to that commit was lost; `counted`: it was
    committed all the same.
    """

    claim: Claim
    error: str
    attempts: int = 0
    in_doubt: bool = False
    counted: bool = False


class Endings:
    """The endings of one engine. Raises StoreUnavailable when nothing could be decided."""

    def __init__(
        self,
        store: JoinedStore,
        at: Callable[[Point, str, Sequence[bytes]], None],
        chance: Callable[[], float],
    ) -> None:
        self._store = store
        self._at = at
        self._chance = chance

    async def replay(self, work: Work, found: Found) -> Outcome:
        """The outcome of a delivery when a rival holds its key, or held it."""
        match judge(found, work.claim.fingerprint):
            case Verdict.CONFLICT:
                return await self.bury(work, "conflict", "the same key arrived before with another payload")
            case Verdict.DEAD:
                await self._store.count_dead(work.key)
                return Outcome(OutcomeKind.DEAD, state=State.DEAD, attempt=work.attempt)
            case Verdict.DUPLICATE if isinstance(found, Record):
                return final(OutcomeKind.DUPLICATE, work, found.state, found.result)
            case _:
                return Outcome(OutcomeKind.BUSY, attempt=work.attempt)

    def would_end(self, work: Work, error: Exception) -> bool:
        """Whether this failure, not counted yet, ends the message: refused, or the last of its attempts."""
        refused = isinstance(error, (Reject, *work.handler.options.fail_on))
        return refused or self._exhausted(work, error, work.attempts + 1)

    def ends(self, work: Work, error: Exception) -> bool:
        """As `would_end`, of a failure that was counted. Others may have counted attempts that this process missed."""
        return self._exhausted(work, error, work.attempts)

    def _exhausted(self, work: Work, error: Exception, attempts: int) -> bool:
        options = work.handler.options
        again = retryable(error, options.retry_on)
        return after_failure(retryable=again, attempts=attempts, max_attempts=options.max_attempts) is Failure.DEAD

    async def failed(self, work: Work, error: Exception) -> Outcome:
        """Count the failure (B1), and decide between another attempt, a rejection and a dead letter."""
        if isinstance(error, (Reject, *work.handler.options.fail_on)):
            try:
                return await self._reject(work, error)
            except TypeError as unencodable:
                error = unencodable
        await self.count(work, error)
        return await self.conclude(work, error)

    async def count(self, work: Work, error: Exception, behind: FailedBehind | None = None) -> None:
        """Count the failure (B1), unless that was done with the group before it."""
        text = describe(error)
        if behind is not None and behind.attempts:
            work.failed(behind.attempts)
        elif work.suspicion is Suspicion.COUNTED or (behind is not None and behind.counted):
            work.failed(await self._store.note_error(work.claim, text))
        else:
            work.failed(await self._store.count_attempt(work.claim, text))
        self._at(Point.ATTEMPT_COUNTED, work.handler.name, (work.key,))
        log.warning(
            "handler failed",
            handler=work.handler.name,
            key=work.key.hex()[:12],
            attempt=work.attempts,
            error=type(error).__name__,
            where=where(error),
        )

    async def conclude(self, work: Work, error: Exception) -> Outcome:
        """What follows from a failure that was counted."""
        options = work.handler.options
        if self.ends(work, error):
            reason = "attempts_exhausted" if retryable(error, options.retry_on) else "not_retryable"
            return await self.bury(work, reason, describe(error))
        due = options.backoff.delay(work.attempts, self._chance())
        if isinstance(error, Retry) and error.after is not None:
            due = retry_delay(error.after, work.handler.name)
        return Outcome(OutcomeKind.RETRYING, due=due, attempt=work.attempts, reason="retry", error=type(error).__name__)

    def free_retry(self, work: Work, contention: Contention) -> Outcome:
        """No message is at fault, so it costs no attempt (B3); a random pause separates the rivals."""
        log.debug(
            "contention, running again", handler=work.handler.name, key=work.key.hex()[:12], error=str(contention)
        )
        due = min(0.6, 0.02 * 1.2 ** min(work.collisions, 50)) * (1 + self._chance())
        return Outcome(OutcomeKind.RETRYING, due=due, attempt=work.attempt, reason="contention")

    async def _reject(self, work: Work, error: Exception) -> Outcome:
        code, body = rejection_of(error)
        rejection = codecs.encode_rejection(code, body)
        self._at(Point.REJECTING, work.handler.name, (work.key,))
        # In a new transaction, which judges the key again (B2).
        standing = await self._until_known(work, lambda: self._store.reject(work.claim, rejection))
        self._at(Point.REJECTED, work.handler.name, (work.key,))
        return standing or Outcome(
            OutcomeKind.FAILED,
            result=rejection.body,
            content_type=rejection.content_type,
            state=State.FAILED,
            attempt=work.attempt,
            reason=code,
        )

    async def refuse(self, work: Work, refusal: BadMessage) -> Outcome:
        """A message that can never be run (R9)."""
        log.warning("bad message", handler=work.handler.name, source=work.message.source,
                    position=work.message.position, reason=refusal.reason, error=refusal.detail)  # fmt: skip
        return await self.bury(work, refusal.reason, refusal.detail)

    async def bury(self, work: Work, reason: str, error: str) -> Outcome:
        """Committed before the delivery may be settled (B4). The record is DEAD too, if it is ours."""
        call = work.call
        claim = None if call is None or reason == "conflict" else call.claim
        letter = dead_letter(work, reason, error, work.attempts)
        self._at(Point.DEAD_LETTERING, work.handler.name, (work.key,))
        standing = await self._until_known(work, lambda: self._store.bury(letter, claim))
        self._at(Point.DEAD_LETTERED, work.handler.name, (work.key,))
        if standing is not None:
            return standing
        log.error(
            "dead letter", handler=work.handler.name, key=work.key.hex()[:12], reason=reason, attempt=work.attempts
        )
        kind = OutcomeKind.CONFLICT if reason == "conflict" else OutcomeKind.DEAD
        state = State.DEAD if claim is not None else None
        return Outcome(kind, state=state, attempt=max(1, work.attempts), reason=reason, error=error)

    async def _until_known(self, work: Work, write: Callable[[], Awaitable[Record | None]]) -> Outcome | None:
        """Repeat a commit of the engine's own until its answer is known. None: written as wanted."""
        while True:
            try:
                standing = await write()
            except CommitUnknown:
                continue
            except Contention as contention:
                return self.free_retry(work, contention)
            return None if standing is None else await self.replay(work, standing)


def final(kind: OutcomeKind, work: Work, state: State, result: StoredResult | None) -> Outcome:
    """The outcome of a delivery whose record is final."""
    if result is None:
        return Outcome(kind, state=state, attempt=work.attempt)
    return Outcome(kind, result=result.body, content_type=result.content_type, state=state, attempt=work.attempt)
