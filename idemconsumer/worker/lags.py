"""How far behind its sources a worker is: asked now and then, beside the work, and never waited for (O11)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from idemconsumer.duty import Duty
from idemconsumer.logs import log
from idemconsumer.ports.broker import Lag
from idemconsumer.worker.feed import Feed

_FIRST: Final = 1.0  # seconds until the first question, while sessions open
_EVERY: Final = 15.0
_PATIENCE: Final = 20.0  # for one session


class Lags:
    """Of all feeds of a worker. With `whole` also of sources of which every worker would say the same."""

    def __init__(self, feeds: Sequence[Feed], *, whole: bool) -> None:
        self._feeds = feeds
        self._whole = whole
        self.known: dict[str, Lag] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        await Duty(self._ask, _EVERY, first=_FIRST).run()

    async def _ask(self) -> None:
        known: dict[str, Lag] = {}
        for feed in self._feeds:
            known |= await self._of(feed)
        self.known = known

    async def _of(self, feed: Feed) -> dict[str, Lag]:
        try:
            async with asyncio.timeout(_PATIENCE):
                return dict(await feed.lag(whole=self._whole))
        except Exception as error:  # noqa: BLE001 - whatever a client raises, this decides nothing
            log.debug("lag not known", error=type(error).__name__)
            return {}
