"""Waiting for records that other processes complete. All callers of this process that wait share one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from idemconsumer.duty import Duty, within
from idemconsumer.errors import StoreUnavailable
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.values import ENDED, Record

_FIRST: Final = 0.05  # seconds between two polls; doubles while no caller arrives and no record ends
_LAST: Final = 1.0


class Results:
    """Polls committed records with `peek`. The database does not notify: a completion must not pay for a NOTIFY."""

    def __init__(self, peek: Callable[[Sequence[bytes]], Awaitable[list[Record | None]]]) -> None:
        self._peek = peek
        self._waiting: dict[bytes, set[asyncio.Future[Record]]] = {}
        self._came = asyncio.Event()
        self._in_vain = 0  # polls in a row without a new caller or an ended record
        self._poller = Duty(self._poll)

    async def over(self, key: bytes, seconds: float) -> Record | None:
        """The record of `key` once it is completed, failed or dead; None if that takes longer than `seconds`.

        An outage of the database only takes time: after None, a caller can query again.
        """
        future: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        self._came.set()
        self._poller.start()
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            if (beside := self._waiting.get(key)) is not None:
                beside.discard(future)
                if not beside:
                    del self._waiting[key]

    async def close(self) -> None:
        await self._poller.close()

    async def _poll(self) -> float | None:
        if not self._waiting:
            self._in_vain = 0
            return None
        ended = await self._look(list(self._waiting))
        came = await self._pause(backoff(self._in_vain + 1, first=_FIRST, cap=_LAST))
        self._in_vain = 0 if came or ended else self._in_vain + 1
        return 0.0

    async def _look(self, keys: Sequence[bytes]) -> bool:
        records: list[Record | None] = []
        with suppress(StoreUnavailable):
            records = await self._peek(keys)
        ended = [(key, r) for key, r in zip(keys, records, strict=False) if r is not None and r.state in ENDED]
        for key, record in ended:
            for future in self._waiting.pop(key, ()):
                if not future.done():
                    future.set_result(record)
        return bool(ended)

    async def _pause(self, seconds: float) -> bool:
        """Wait, and return whether a caller arrived. After an arrival the shortest pause still applies, so that
        arrivals do not set the pace of the polls."""
        clock, came = asyncio.get_running_loop().time, False
        deadline = clock() + seconds
        while await within(deadline - clock(), self._came):
            self._came.clear()
            if not came:
                deadline = min(deadline, clock() + _FIRST)
            came = True
        return came
