"""How an attempt of a saga ends: with a result, with another attempt, or put aside for a person.

Each ending is one fenced commit of the store, and returns the outcome for the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from idemconsumer.engine.blame import Telling, describe
from idemconsumer.engine.letters import dead_letter
from idemconsumer.engine.work import Work
from idemconsumer.errors import Contention, Retry
from idemconsumer.handlers.durations import retry_delay
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.redaction import traceback_text
from idemconsumer.rules.backoff import MAX_UNSETTLED, Backoff
from idemconsumer.rules.saga import overdue_in
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.rules.verdicts import contention_pause
from idemconsumer.stores.leases import PostgresLeases

_UNTIL_OTHERS: Final = 5.0  # seconds; then any worker may take it

At: TypeAlias = Callable[[Point | SagaPoint, str, Sequence[bytes]], None]


class Endings:
    """The ways in which an attempt of the saga in `work` ends."""

    def __init__(
        self, work: Work, leases: PostgresLeases, at: At, chance: Callable[[], float], telling: Telling
    ) -> None:
        self._work = work
        self._held = work.of_saga
        self._telling = telling
        self._handler = work.handler
        self._leases = leases
        self._tell = at
        self._chance = chance

    @property
    def _saga(self) -> LeasedSaga:
        assert self._held.leased is not None
        return self._held.leased

    def left(self) -> float | None:
        """For how many seconds it may go on (L58). None: for any time, or how it ends is decided already."""
        saga, most = self._saga, self._handler.options.max_duration
        if saga.state is not State.PROCESSING or saga.cancel is not None:
            return None
        return overdue_in(now=time.monotonic(), begun=saga.begun, max_duration=most)

    async def finish(self, kind: OutcomeKind, state: State, result: StoredResult | None) -> Outcome:
        """COMPLETED or FAILED, with what is stored for duplicates."""
        saga = self._saga
        self.at(Point.SEALING)
        await self._leases.complete(saga, state, result)
        self.at(Point.COMMITTED)
        return self.finished(kind, state, result)

    def finished(self, kind: OutcomeKind, state: State, result: StoredResult | None) -> Outcome:
        """The outcome of an ending that is already committed."""
        return Outcome(
            kind,
            result=None if result is None else result.body,
            content_type=None if result is None else result.content_type,
            state=state,
            attempt=self._saga.attempt,
        )

    async def release(
        self,
        error: BaseException,
        text: str,
        *,
        failures: int,
        count: bool = True,
        backoff: Backoff | None = None,
        overdue: bool = False,
    ) -> Outcome:
        """Another attempt, on any worker, after the backoff for this many `failures`, or the delay of a Retry.

        `text` goes into the saga's history. With `count=False` this attempt is not counted. `backoff`: of the step that
        failed, if it has one of its own. `overdue`: it has taken as long as it may already.
        """
        delay = self._delay(error, failures, backoff)
        return await self._released(delay, text, type(error).__name__, count=count, overdue=overdue)

    def _delay(self, error: BaseException, failures: int, backoff: Backoff | None = None) -> float:
        delay = (backoff or self._handler.options.backoff).delay(failures, self._chance())
        if isinstance(error, Retry) and error.after is not None:
            delay = retry_delay(error.after, self._handler.name)
        if self._handler.options.settle == "finished":  # its delivery is held meanwhile
            delay = min(delay, MAX_UNSETTLED)
        return delay

    async def leave(self, error: BaseException) -> Outcome | None:
        """A worker of another build may know what is recorded and this one does not: it goes on, at no cost (L29). None
        if there is no such worker."""
        due = await self._leases.leave(self._handler.app, self._saga, describe(error), _UNTIL_OTHERS)
        if due is None:
            return None
        self.warn("saga left to a worker of another build", error)
        self.at(SagaPoint.RELEASED)
        kind, saga = OutcomeKind.RETRYING, self._saga
        return Outcome(kind, state=saga.state, due=due, attempt=saga.attempt, error=type(error).__name__)

    async def hold(self, seconds: float) -> Outcome:
        """A function that fails in all sagas is not called now (D17): another attempt at no cost."""
        return await self._released(seconds, None, None, count=False, held=True)

    async def spare(self, error: BaseException, text: str, seconds: float) -> Outcome:
        """It failed as it does in all sagas (D17): another attempt at no cost."""
        return await self._released(seconds, text, type(error).__name__, count=False, held=True)

    async def read_later(self, error: Exception) -> Outcome:
        """Its message is not to be read now (D26): another attempt at no cost."""
        self.warn("decoding deferred", error)
        delay, overdue = self._delay(error, 1), self.left() == 0.0
        text, kind = describe(error), type(error).__name__
        return await self._released(delay, text, kind, count=False, held=True, overdue=overdue)

    async def collided(self, contention: Contention, collisions: int) -> Outcome:
        """Another attempt at no cost. The saga waits for it, not its lane: the lane would treat this as an outage."""
        delay = contention_pause(collisions, self._chance())
        return await self._release(contention, describe(contention), delay, count=False)

    async def pause(self, waits: Sequence[str]) -> Outcome:
        """Nothing is left of this run but waits: any worker may take the saga when one of them is over (L41), or when
        it has taken as long as it may."""
        self.at(SagaPoint.PAUSING)
        return self._paused(await self._leases.pause(self._saga, waits, self.left()))

    async def pause_undo(self, child: bytes) -> Outcome:
        """Any worker may go on with the undo when this child has ended (L49)."""
        self.at(SagaPoint.PAUSING)
        return self._paused(await self._leases.pause_undo(self._saga, child))

    def _paused(self, seconds: float) -> Outcome:
        saga = self._saga
        self.at(SagaPoint.PAUSED)
        return Outcome(OutcomeKind.BUSY, state=saga.state, due=max(0.0, seconds), attempt=saga.attempt)

    async def _release(self, error: BaseException, text: str, delay: float, *, count: bool) -> Outcome:
        return await self._released(delay, text, type(error).__name__, count=count)

    async def _released(
        self,
        delay: float,
        text: str | None,
        kind: str | None,
        *,
        count: bool,
        held: bool = False,
        overdue: bool = False,
    ) -> Outcome:
        saga, left = self._saga, None if overdue else self.left()
        delay = delay if left is None else min(delay, left)
        await self._leases.release(saga, delay, text, count=count, held=held)
        self.at(SagaPoint.RELEASED)
        return Outcome(OutcomeKind.RETRYING, state=saga.state, due=delay, attempt=saga.attempt, error=kind)

    async def put_aside(self, reason: str, text: str, error: BaseException | None = None) -> Outcome:
        """Leave the saga to a person: it is never completed, undone or run again automatically. `text` says why;
        `error` is the exception that it describes, if there is one."""
        saga = self._saga
        traceback = None if error is None else traceback_text(error)
        self.at(Point.DEAD_LETTERING)
        letter = await self._leases.park(saga, dead_letter(self._work, reason, text, saga.attempt, traceback))
        self.at(Point.DEAD_LETTERED)
        self._telling.dead(self._work, saga.attempt, reason, letter, text, error)
        kind, state = OutcomeKind.DEAD, State.DEAD
        return Outcome(kind, state=state, attempt=saga.attempt, reason=reason, error=text)

    def at(self, point: Point | SagaPoint) -> None:
        self._tell(point, self._handler.name, (self._saga.key,))

    def warn(self, event: str, error: BaseException, *, step: str | None = None, **its: object) -> None:
        kind: dict[str, object] | None = None if step is None else {"step": step}
        self._telling.failed(event, self._work, self._saga.attempt, error, kind, **its)

    def rejected(self, error: BaseException) -> None:
        """How it ends is committed."""
        self._telling.rejected(self._work, self._saga.attempt, error)


def describe_in(place: str | None, error: BaseException) -> str:
    """An error for the saga's history, with the `place` that it came from, if one is given."""
    return describe(error) if place is None else f"{place}: {describe(error)}"
