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
    """One `GroupSize` per handler, by name; each method reports what happened to one of the handler's groups."""

    def __init__(self, *, lanes: int, most_locks: int, counts: Counts) -> None:
        self._lanes = lanes
        self._most_locks = most_locks
        self._counts = counts
        self._sizes: dict[str, GroupSize] = {}
        self._commit = Least()
        self._collided: dict[str, float] = {}  # time of the last collision, by handler, until its next commit

    def of(self, handler: BoundHandler) -> GroupSize:
        if (size := self._sizes.get(handler.name)) is None:
            given = 1 if handler.leased else handler.options.group_size  # a saga shares no transaction (G6)
            size = GroupSize.start(given, lanes=self._lanes, most_locks=self._most_locks)
            self._sizes[handler.name] = size
        return size

    def beyond_commit(self, seconds: float) -> float:
        """How much of a group's last exchange was spent on pipelined statements and not on its COMMIT (J26)."""
        self._commit = self._commit.seen(seconds)
        return seconds - self._commit.least

    def committed(self, handler: BoundHandler, messages: int, seconds: float, now: float, duplicates: int) -> None:
        """`seconds`: the total time of the handlers of its `messages`. The group also had `duplicates`."""
        self._counts.of(handler.name).handled(messages, seconds)
        self._collided.pop(handler.name, None)
        self._sizes[handler.name] = self.of(handler).clean_group(messages, seconds, now, duplicates)

    def repeated(self, handler: BoundHandler, duplicates: int) -> None:
        """So many messages in a row were duplicates. 0: something was new."""
        if duplicates or self.of(handler).repeats:
            self._sizes[handler.name] = self.of(handler).repeated(duplicates)

    def failed(self, handler: BoundHandler) -> None:
        self._sizes[handler.name] = self.of(handler).failed()

    def lost(self, handler: BoundHandler) -> None:
        self._sizes[handler.name] = self.of(handler).lost()

    def collided(self, handler: BoundHandler, contention: Contention) -> bool:
        """Returns whether this collision has shut the gate, so that the rerun will not meet the same rival again."""
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
        """Whether a group of this handler has collided within a minute, and none has been committed since."""
        return asyncio.get_running_loop().time() - self._collided.get(handler, -math.inf) < OF_LATE
