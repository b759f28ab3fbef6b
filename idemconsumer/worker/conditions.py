"""What holds up each handler of a worker now: determined only here, for launcher and worker record (O34)."""

from __future__ import annotations

from collections.abc import Sequence

from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.rules.held_up import Condition, conditions, paused
from idemconsumer.stores.lock_waits import LockWaits
from idemconsumer.worker.feed import Feed
from idemconsumer.worker.lanes import Lanes


class Conditions:
    """The conditions of one worker's handlers."""

    def __init__(self, feeds: Sequence[Feed], lanes: Lanes, lock_waits: LockWaits) -> None:
        self._feeds = feeds
        self._lanes = lanes
        self._lock_waits = lock_waits

    def of(self, handler: BoundHandler) -> list[Condition]:
        in_hand, name = self._lanes.in_hand, handler.name
        away = {
            source: seconds for feed in self._feeds if (seconds := feed.away) is not None for source in feed.sources
        }
        # Noticed by a lane, or by the session of the handler's own queue.
        database = in_hand.outage.seconds or away.get(handler.retry_source)
        given = {each.source for each in handler.subscriptions if database is None or each.scheme != "postgres"}
        holder, waits = self._lock_waits.of(name)
        found = conditions(
            database=database,
            why=in_hand.outage.why,
            away={source: away[source] for source in given & away.keys()},
            holder=holder,
            waits=waits,
            failing=in_hand.engine.endings.failing.all_fail(name),
        )
        return [paused("a person", None, 0.0, 1), *found] if name in in_hand.paused else found
