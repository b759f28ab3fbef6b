"""How an attempt of a saga ends: with a result, with another attempt, or put aside for a person.

Each ending is one fenced commit of the store, and returns the outcome for the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import structlog

from idemconsumer.engine.blame import describe, where
from idemconsumer.engine.work import Work, dead_letter
from idemconsumer.errors import Retry
from idemconsumer.handlers.durations import retry_delay
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.leases import LeasedSaga, LeaseStore
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import Outcome, OutcomeKind, State

log = structlog.get_logger("idemconsumer")

At: TypeAlias = Callable[[Point | SagaPoint, str, Sequence[bytes]], None]


class Endings:
    """The ways in which an attempt of the saga in `work` ends."""

    def __init__(self, work: Work, leases: LeaseStore, at: At, chance: Callable[[], float]) -> None:
        self._work = work
        self._handler = work.handler
        self._leases = leases
        self._tell = at
        self._chance = chance

    @property
    def _saga(self) -> LeasedSaga:
        leased = self._work.leased
        assert leased is not None
        return leased

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

    async def release(self, error: BaseException, text: str, *, failures: int, count: bool = True) -> Outcome:
        """Another attempt, on any worker, after the backoff for this many `failures`, or the delay of a Retry.

        `text` goes into the saga's history. With `count=False` this attempt is not counted.
        """
        saga, handler = self._saga, self._handler
        delay = handler.options.backoff.delay(failures, self._chance())
        if isinstance(error, Retry) and error.after is not None:
            delay = retry_delay(error.after, handler.name)
        await self._leases.release(saga, delay, text, count=count)
        self.at(SagaPoint.RELEASED)
        kind = type(error).__name__
        return Outcome(OutcomeKind.RETRYING, state=saga.state, due=delay, attempt=saga.attempt, error=kind)

    async def put_aside(self, reason: str, error: str) -> Outcome:
        """Leave the saga to a person: it is never completed, undone or run again automatically."""
        saga = self._saga
        self.at(Point.DEAD_LETTERING)
        await self._leases.park(saga, dead_letter(self._work, reason, error, saga.attempt))
        self.at(Point.DEAD_LETTERED)
        log.error("dead letter", reason=reason, **self._named())
        return Outcome(OutcomeKind.DEAD, state=State.DEAD, attempt=saga.attempt, reason=reason, error=error)

    def at(self, point: Point | SagaPoint) -> None:
        self._tell(point, self._handler.name, (self._saga.key,))

    def warn(self, event: str, error: BaseException, **more: object) -> None:
        log.warning(event, error=type(error).__name__, where=where(error), **self._named(), **more)

    def _named(self) -> dict[str, object]:
        saga = self._saga
        return {"handler": self._handler.name, "key": saga.key.hex()[:12], "attempt": saga.attempt}


def describe_in(place: str | None, error: BaseException) -> str:
    """An error for the saga's history, with the `place` that it came from, if one is given."""
    return describe(error) if place is None else f"{place}: {describe(error)}"
