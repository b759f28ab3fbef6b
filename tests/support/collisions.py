"""Real collisions. An error that a PL/pgSQL RAISE makes only looks like one, and is its function's failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg

from idemconsumer.handlers.arguments import Tx

_TAKEN: Final = 4711  # an advisory lock


@contextmanager
def a_lock_is_taken(dsn: str) -> Iterator[None]:
    """By another session, for as long as this lasts."""
    with psycopg.connect(dsn) as other:
        other.execute("select pg_advisory_xact_lock(%s)", (_TAKEN,))
        yield


async def collide(tx: Tx) -> None:
    """Wait for `a_lock_is_taken` in vain, for a moment: 55P03."""
    await tx.execute("set local lock_timeout = '1ms'")
    await tx.execute("select pg_advisory_xact_lock(%s)", (_TAKEN,))
