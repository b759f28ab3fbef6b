"""The time of a kit: moves the clocks of its database and of its event loop by the same seconds."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final, TypeAlias

import psycopg

from idemconsumer.errors import ConfigurationError

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
# Sent as one message. Leases and visibility timeouts of live workers move along: their owners could not renew them.
_MOVE: Final = """begin;
lock table idemconsumer.worker, idemconsumer.process, idemconsumer.queue in access exclusive mode;
update idemconsumer.worker set until = until + interval '{by:.6f} seconds' where until > clock_timestamp();
update idemconsumer.process set seen_at = seen_at + interval '{by:.6f} seconds';
update idemconsumer.queue set visible_at = visible_at + interval '{by:.6f} seconds' where token is not null;
select setval('idem_kit.moved', coalesce(pg_sequence_last_value('idem_kit.moved'), 0) + ({by:.6f} * 1000000)::bigint);
commit
"""
# Queried without the event loop, so that the loop sends nothing meanwhile.
_AT_WORK: Final = b"""
select from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and state = 'active' and pid <> pg_backend_pid()
"""
_PAUSE: Final = 0.005  # seconds
_LONGEST: Final = 5.0  # seconds


class _LoopTime:
    """Replaces `loop.time`. It never goes backwards."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.moved = 0.0

    def __call__(self) -> float:
        return float(self._real()) + self.moved


def take() -> None:
    """Replace the loop's clock. This must come before any code keeps a reference to the former clock: such code would
    not notice a move, and would poll in vain."""
    loop: Any = asyncio.get_running_loop()
    if not isinstance(loop.time, _LoopTime):
        with suppress(AttributeError):  # uvloop does not allow it
            loop.time = _LoopTime(loop.time)


async def move(connection: Connection, seconds: float) -> None:
    """Let `seconds` pass at once. Raises ConfigurationError under a loop whose clock cannot be moved."""
    loop: Any = asyncio.get_running_loop()
    if not isinstance(loop.time, _LoopTime):
        raise ConfigurationError(
            f"the clock of {type(loop).__name__} cannot be moved; run the test with asyncio's own event loop"
        )
    await connection.execute(_MOVE.format(by=seconds).encode())
    await _answered(connection)
    loop.time.moved += seconds


async def _answered(connection: Connection) -> None:
    """Wait until the server has answered all statements in progress, such as those of a worker that prunes. Otherwise
    they would be cut off: their answers would seem late by as much as the clock moves."""
    until = time.monotonic() + _LONGEST
    while connection.pgconn.exec_(_AT_WORK).ntuples and time.monotonic() < until:
        await asyncio.sleep(_PAUSE)
