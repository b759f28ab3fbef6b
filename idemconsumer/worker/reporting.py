"""What a worker reports to its launcher: the state of its parts, as far as they exist, and its lag."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from idemconsumer.channel import CHANNEL
from idemconsumer.duty import Duty
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.observe.counts import Counts
from idemconsumer.observe.reports import PoolState, Report, encoded
from idemconsumer.ports.broker import BytesInHand, Lag
from idemconsumer.process.child import WORKER
from idemconsumer.rules.health import Phase
from idemconsumer.stores.pool import Pool
from idemconsumer.worker.conditions import Conditions
from idemconsumer.worker.feed import Feed
from idemconsumer.worker.lanes import Lanes
from idemconsumer.worker.retention import Retention

_EVERY: Final = 1.0  # seconds between two reports
_FIRST_LAG: Final = 1.0  # seconds until the lag is first read, while sessions open
_EVERY_LAG: Final = 15.0
_LAG_PATIENCE: Final = 20.0  # seconds, for one session
_HICCUP: Final = 5.0  # seconds for which any event loop may be blocked


class Reporting:
    """The reports of one worker. Its parts count in `counts`, and add their pools to `pools` once open.

    `draining` is set when the worker drains.
    """

    def __init__(self, handlers: Sequence[BoundHandler], draining: asyncio.Event) -> None:
        self.counts = Counts()
        self.pools: dict[str, Pool] = {}
        self._lag: dict[str, Lag] = {}
        self._whole = os.environ.get(WORKER, "0") == "0"  # only one worker reads what all would report alike
        self._handlers = handlers
        self._app = handlers[0].app
        # A handler may block the loop for as long as its `timeout`, and no longer: beyond that no time limit works.
        self._patience = _EVERY + max([_HICCUP, *(handler.options.timeout for handler in handlers)])
        self._draining = draining
        self._leaving = False
        self._at_work: tuple[Sequence[Feed], Lanes, BytesInHand, Retention, Conditions] | None = None

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Send a report each second during the block, and one at its end."""
        telling = Duty(self._tell, _EVERY, failed=lambda _: None)  # failures are ignored: counting decides nothing
        telling.start()
        try:
            yield
        finally:
            self._leaving = True
            await telling.finish()

    async def _tell(self) -> None:
        if CHANNEL.reports:
            CHANNEL.tell("report", encoded(self.report()), patience=0.0)

    def begin(
        self, feeds: Sequence[Feed], lanes: Lanes, memory: BytesInHand, retention: Retention, conditions: Conditions
    ) -> list[Coroutine[Any, Any, None]]:
        """The worker has all its parts. Returns the coroutines to run beside them: none if nobody reads the reports."""
        self._at_work = feeds, lanes, memory, retention, conditions
        return [Duty(self._look_behind, _EVERY_LAG, first=_FIRST_LAG).run()] if CHANNEL.reports else []

    @property
    def lag(self) -> Mapping[str, Lag]:
        """By source; empty if nobody reads the reports."""
        return self._lag

    def report(self) -> Report:
        report = Report(
            app=self._app,
            phase=self._phase,
            patience=self._patience,
            counts=self.counts,
            pools={name: PoolState(*pool.usage) for name, pool in self.pools.items()},
        )
        if self._at_work is not None:
            feeds, lanes, memory, retention, conditions = self._at_work
            report.stalled = {feed.name: seconds for feed in feeds if (seconds := feed.stalled) is not None}
            report.up = {source: feed.away is None for feed in feeds for source in feed.sources}
            report.lacking = [feed.name for feed in feeds if feed.away is not None]
            report.lacking += ["the database"] if lanes.in_hand.outage.lasts else []
            report.handlers = lanes.states
            for handler in self._handlers:
                report.handlers[handler.name].held_up = [each.by for each in conditions.of(handler)]
            report.lag = self._lag
            report.in_hand, report.bytes_in_hand = lanes.in_hand.in_flight, memory.held
            self.counts.pruned = retention.pruned
        return report

    @property
    def _phase(self) -> Phase:
        if self._leaving:
            return Phase.LEAVING
        if self._draining.is_set():
            return Phase.DRAINING
        return Phase.STARTING if self._at_work is None else Phase.CONSUMING

    async def _look_behind(self) -> None:
        """Read the lag of its sources, beside the work; nothing waits for it (O11)."""
        assert self._at_work is not None
        lag: dict[str, Lag] = {}
        for feed in self._at_work[0]:
            try:
                async with asyncio.timeout(_LAG_PATIENCE):
                    lag |= await feed.lag(whole=self._whole)
            except Exception as error:  # noqa: BLE001 - whatever a client raises, this decides nothing
                log.debug("lag not known", error=type(error).__name__)
        self._lag = lag
