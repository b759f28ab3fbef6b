"""What is known of each handler's groups, kept for one process. The rules are in `rules.group_size`."""

from __future__ import annotations

import asyncio
import math

from idemconsumer.engine.evidence import OF_LATE
from idemconsumer.errors import Contention
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.observe.counts import Counts
from idemconsumer.rules.group_size import GroupSize, Least


class GroupSizes:
    """One `GroupSize` per handler, by name; each method reports what happened to a group of it."""

    def __init__(self, *, lanes: int, most_locks: int, counts: Counts) -> None:
        self._lanes = lanes
        self._most_locks = most_locks
        self._counts = counts
        self._sizes: dict[str, GroupSize] = {}
        self._commit = Least()
        self._collided: dict[str, float] = {}  # when groups last have, of handlers without a commit since

    def of(self, handler: BoundHandler) -> GroupSize:
        if (size := self._sizes.get(handler.name)) is None:
            given = 1 if handler.leased else handler.options.group_size  # a saga shares no transaction (G6)
            size = GroupSize.start(given, lanes=self._lanes, most_locks=self._most_locks)
            self._sizes[handler.name] = size
        return size

    def beyond_commit(self, seconds: float) -> float:
        """What of the last exchange of a group was not its COMMIT, but statements that were sent ahead (J26)."""
        self._commit = self._commit.seen(seconds)
        return seconds - self._commit.least

    def committed(self, handler: BoundHandler, messages: int, seconds: float, now: float, duplicates: int) -> None:
        """`seconds`: how long the handlers of its `messages` took together, beside its `duplicates`."""
        self._counts.of(handler.name).handled(messages, seconds)
        self._collided.pop(handler.name, None)
        self._sizes[handler.name] = self.of(handler).clean_group(messages, seconds, now, duplicates)

    def repeated(self, handler: BoundHandler, duplicates: int) -> None:
        """So many were duplicates, and nothing among them was new. 0: something was."""
        if duplicates or self.of(handler).repeats:
            self._sizes[handler.name] = self.of(handler).repeated(duplicates)

    def failed(self, handler: BoundHandler) -> None:
        self._sizes[handler.name] = self.of(handler).failed()

    def lost(self, handler: BoundHandler) -> None:
        self._sizes[handler.name] = self.of(handler).lost()

    def collided(self, handler: BoundHandler, contention: Contention) -> bool:
        """Returns whether this has shut the gate, so that the rerun will not meet its rival again."""
        before, now = self.of(handler), asyncio.get_running_loop().time()
        after = before.out_of_locks(now) if contention.cap_groups else before.collided(now)
        self._sizes[handler.name], self._collided[handler.name] = after, now
        shut = after.gated(now) and not before.gated(now)
        if shut:
            seconds = after.gate.until - now
            log.info(
                "lock conflicts, groups run one at a time",
                handler=handler.name,
                seconds=seconds,
                error=str(contention),
            )
        return shut

    def collides(self, handler: str) -> bool:
        """Whether the last group of this handler has collided, not long ago."""
        return asyncio.get_running_loop().time() - self._collided.get(handler, -math.inf) < OF_LATE
