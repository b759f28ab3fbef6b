"""Time, as a kit moves it: the clock of its database and that of its event loop, by the same seconds."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final, TypeAlias

import psycopg

from idemconsumer.errors import ConfigurationError

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
# One message to the server. Of what lives while the clock is moved the time does not run out: nobody could renew it.
_MOVE: Final = """begin;
lock table idemconsumer.worker, idemconsumer.process, idemconsumer.queue in access exclusive mode;
update idemconsumer.worker set until = until + interval '{by:.6f} seconds' where until > clock_timestamp();
update idemconsumer.process set seen_at = seen_at + interval '{by:.6f} seconds';
update idemconsumer.queue set visible_at = visible_at + interval '{by:.6f} seconds' where token is not null;
select setval('idem_kit.moved', coalesce(pg_sequence_last_value('idem_kit.moved'), 0) + ({by:.6f} * 1000000)::bigint);
commit
"""
# Asked for without the event loop, which so sends nothing meanwhile.
_AT_WORK: Final = b"""
select from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and state = 'active' and pid <> pg_backend_pid()
"""
_PAUSE: Final = 0.005  # seconds
_LONGEST: Final = 5.0  # seconds


class _LoopTime:
    """Takes the place of `loop.time`, and never goes back."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.moved = 0.0

    def __call__(self) -> float:
        return float(self._real()) + self.moved


def take() -> None:
    """Before anything has asked the loop for its clock: who has the former one would see no move, and wait for nothing
    again and again."""
    loop: Any = asyncio.get_running_loop()
    if not isinstance(loop.time, _LoopTime):
        with suppress(AttributeError):  # uvloop's
            loop.time = _LoopTime(loop.time)


async def move(connection: Connection, seconds: float) -> None:
    """`seconds` pass at once. Raises ConfigurationError under a loop whose clock cannot be moved."""
    loop: Any = asyncio.get_running_loop()
    if not isinstance(loop.time, _LoopTime):
        raise ConfigurationError(
            f"the clock of {type(loop).__name__} cannot be moved; run the test with asyncio's own event loop"
        )
    await connection.execute(_MOVE.format(by=seconds).encode())
    await _answered(connection)
    loop.time.moved += seconds


async def _answered(connection: Connection) -> None:
    """Wait until the server has answered everybody, such as a worker that prunes: what they wait for would be cut off,
    since the answer would be late by as much as the clock moves."""
    until = time.monotonic() + _LONGEST
    while connection.pgconn.exec_(_AT_WORK).ntuples and time.monotonic() < until:
        await asyncio.sleep(_PAUSE)
