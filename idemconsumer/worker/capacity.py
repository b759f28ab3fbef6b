"""How many lanes each handler has, and how many connections they share (D13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.settings import Settings

ROOM = (
    1_000  # deliveries of a source that wait for a rival of theirs, and of a handler that wait for their next attempt
)
_QUEUES: Final = 2  # of all Postgres queues together (L62)
_SPARE: Final = 2  # for waiting rooms, and for what belongs to no handler


def lanes_of(handler: BoundHandler, settings: Settings) -> int:
    """How many messages, or groups, of it run at a time in one process."""
    return handler.options.concurrency or settings.concurrency


def most_at_once(handlers: Sequence[BoundHandler], settings: Settings) -> int:
    """The transactions that these handlers may have open at a time: one each, and what the one with the most lanes
    needs besides."""
    lanes = [lanes_of(handler, settings) for handler in handlers]
    return max(lanes, default=1) - 1 + len(lanes)


def pool_size(handlers: Sequence[BoundHandler], settings: Settings) -> int:
    """The most connections of the pool that these handlers share."""
    return most_at_once(handlers, settings) + _SPARE


def most_connections(handlers: Sequence[BoundHandler], settings: Settings) -> int:
    """What one process may open, without those for the moments of a question to the server. Without handlers it is a
    web process: one for each endpoint in joined mode, one for what takes an exchange (H10), and that of the heartbeat.
    """
    if not handlers:
        return settings.concurrency + 2
    joined, leased = by_mode(handlers)
    pools = pool_size(joined, settings) + (pool_size(leased, settings) if leased else 0)
    upkeep = 1 + bool(leased)  # pruning, and the heartbeat of the lease
    return pools + upkeep + _QUEUES


def resting_connections(handlers: Sequence[BoundHandler]) -> int:
    """What one process holds while it has nothing to do: those of the queues, and with sagas that of the heartbeat and
    one to look for them. Of a web process that of the heartbeat."""
    if not handlers:
        return 1
    return _QUEUES + 2 * any(each.leased for each in handlers)


def by_mode(handlers: Sequence[BoundHandler]) -> tuple[list[BoundHandler], list[BoundHandler]]:
    """Those of joined mode and those of leased mode: each has a pool."""
    return [each for each in handlers if not each.leased], [each for each in handlers if each.leased]
