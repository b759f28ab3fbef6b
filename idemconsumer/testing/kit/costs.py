"""What messages cost: the commits that workers make for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from psycopg.pq.abc import PGresult

from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.stores.connection import Connection

_FOR_MESSAGES: ContextVar[bool] = ContextVar("idem_for_messages", default=False)
_BESIDE: Final = (Point.RELAYING, Point.RELAYED)


def passing(point: Point | SagaPoint) -> None:
    """What this task commits from now on is for messages. What workers do beside that, such as being on record or
    pruning, passes no point."""
    if point not in _BESIDE:
        _FOR_MESSAGES.set(True)


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """In this process, while the block runs: how many so far."""
    made, simple, last = 0, Connection.simple, Connection.last

    def seen(results: list[PGresult]) -> list[PGresult]:
        nonlocal made
        if _FOR_MESSAGES.get():
            made += sum(result.command_status == b"COMMIT" for result in results)
        return results

    async def seen_simple(self: Connection, statements: bytes) -> list[PGresult]:
        return seen(await simple(self, statements))

    async def seen_last(self: Connection, statements: Sequence[bytes]) -> list[PGresult]:
        return seen(await last(self, statements))

    ours: Any = Connection
    ours.simple, ours.last = seen_simple, seen_last
    try:
        yield lambda: made
    finally:
        ours.simple, ours.last = simple, last
