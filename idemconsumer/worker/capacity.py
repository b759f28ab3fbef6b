"""How many lanes each handler has, and how many connections the handlers share (D13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.settings import Settings

ROOM = (
    # Deliveries of a source that wait for a key another worker holds, and of a handler that wait for their next
    # attempt.
    1_000
)
_QUEUES: Final = 2  # connections of all Postgres queues together (L62)
_SPARE: Final = 2  # connections for waiting rooms, and for work that belongs to no handler


def lanes_of(handler: BoundHandler, settings: Settings) -> int:
    """How many messages, or groups of messages, of the handler run at a time in one process."""
    return handler.options.concurrency or settings.concurrency


def most_at_once(handlers: Sequence[BoundHandler], settings: Settings) -> int:
    """How many transactions these handlers may have open at a time: one each, and as many more as the handler with the
    most lanes needs."""
    lanes = [lanes_of(handler, settings) for handler in handlers]
    return max(lanes, default=1) - 1 + len(lanes)


def pool_size(handlers: Sequence[BoundHandler], settings: Settings) -> int:
    """The largest number of pool connections that these handlers share."""
    return most_at_once(handlers, settings) + _SPARE


def most_connections(handlers: Sequence[BoundHandler], settings: Settings) -> int:
    """How many connections one process may open, apart from short ones for a single query.

    Without handlers it is a web process: one for each endpoint in joined mode, one for statements that need a single
    exchange with the server (H10), and one for the heartbeat.
    """
    if not handlers:
        return settings.concurrency + 2
    joined, leased = by_mode(handlers)
    pools = pool_size(joined, settings) + (pool_size(leased, settings) if leased else 0)
    upkeep = 1 + bool(leased)  # one for pruning, and one for the heartbeat of the lease
    return pools + upkeep + _QUEUES


def resting_connections(handlers: Sequence[BoundHandler]) -> int:
    """How many connections an idle process holds: those of the queues and, with sagas, one for the heartbeat and one
    that checks for due sagas. A web process holds the heartbeat's."""
    if not handlers:
        return 1
    return _QUEUES + 2 * any(each.leased for each in handlers)


def by_mode(handlers: Sequence[BoundHandler]) -> tuple[list[BoundHandler], list[BoundHandler]]:
    """The handlers in joined mode and those in leased mode: each mode has a pool."""
    return [each for each in handlers if not each.leased], [each for each in handlers if each.leased]
