"""An event loop whose clock moves as soon as all of it waits, and handlers for real lanes that run in it."""

from __future__ import annotations

import asyncio
import selectors

from idemconsumer import Tx, idempotent_handler
from tests.support.workers import Item


class Loop(asyncio.SelectorEventLoop):
    """Whoever waits makes time pass."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing would ever happen"
        self._loop.now += max(timeout, 1e-6)
        return super().select(0)


@idempotent_handler("memory:q", key="id")
async def free(item: Item, tx: Tx) -> None: ...


@idempotent_handler("memory:q", key="id", order_by="entity")
async def ordered(item: Item, tx: Tx) -> None: ...


@idempotent_handler("memory:q", key="id", tenant="entity")
async def of_tenants(item: Item, tx: Tx) -> None: ...
