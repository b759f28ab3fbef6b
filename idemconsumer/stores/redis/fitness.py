"""Whether a claim counts where it was made: a Redis that is fit when it is first used may evict an hour later (H28)."""

from __future__ import annotations

import asyncio
import math
from typing import Final

from idemconsumer.stores.redis.checks import refuse_unfit
from idemconsumer.stores.redis.client import Redises
from idemconsumer.stores.redis.keeping import now

EVERY: Final = 60.0  # seconds


class Fitness:
    """Known since the servers were last asked, for a minute and until another connection is made: that may lead to
    another server, as after a failover."""

    def __init__(self, redises: Redises) -> None:
        self._redises = redises
        self._asking = asyncio.Lock()
        self._made = 0  # connections, before they were asked
        self._until = -math.inf

    @property
    def known(self) -> bool:
        return self._made == self._redises.made and now() < self._until

    async def ask(self) -> None:
        """Unless it is known. After a claim it is about the server that has it. Raises as `refuse_unfit`."""
        if self.known:
            return
        async with self._asking:
            if self.known:
                return
            made = self._redises.made
            await refuse_unfit(self._redises)
            self._made, self._until = made, now() + EVERY
