"""What messages cost: the commits that workers make for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from psycopg.pq.abc import PGresult

from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.stores.connection import Connection

_FOR_MESSAGES: ContextVar[bool] = ContextVar("idem_for_messages", default=False)
_BESIDE: Final = (Point.FORWARDED, Point.RELAYING, Point.RELAYED)


def passing(point: Point | SagaPoint) -> None:
    """What this task commits from now on is for messages. What workers do beside that, such as being on record or
    pruning, passes no point."""
    if point not in _BESIDE:
        _FOR_MESSAGES.set(True)


class Commits:
    """`made`: how many, so far."""

    def __init__(self) -> None:
        self.made = 0

    def see(self, results: Sequence[PGresult]) -> None:
        """Of one exchange with the server."""
        if _FOR_MESSAGES.get():
            self.made += sum(result.command_status == b"COMMIT" for result in results)


@contextmanager
def counting() -> Iterator[Commits]:
    """In this process, while the block runs."""
    commits, simple, last = Commits(), Connection.simple, Connection.last

    async def seen_simple(self: Connection, statements: bytes) -> list[PGresult]:
        commits.see(results := await simple(self, statements))
        return results

    async def seen_last(self: Connection, statements: Sequence[bytes]) -> list[PGresult]:
        commits.see(results := await last(self, statements))
        return results

    ours: Any = Connection
    ours.simple, ours.last = seen_simple, seen_last
    try:
        yield commits
    finally:
        ours.simple, ours.last = simple, last
