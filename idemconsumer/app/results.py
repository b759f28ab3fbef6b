"""Waiting for what others run: all callers of this process that wait for a record share one statement per look."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from idemconsumer.errors import StoreUnavailable
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.values import ENDED, Record
from idemconsumer.user_code.cancellation import end

_FIRST: Final = 0.05  # seconds between two looks, doubling while no caller arrives and no record ends
_LAST: Final = 1.0


class Results:
    """`peek` reads committed records. The database sends no word of them: completions must not pay for a NOTIFY."""

    def __init__(self, peek: Callable[[Sequence[bytes]], Awaitable[list[Record | None]]]) -> None:
        self._peek = peek
        self._waiting: dict[bytes, set[asyncio.Future[Record]]] = {}
        self._came = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None

    async def over(self, key: bytes, seconds: float) -> Record | None:
        """The record of `key` once it is completed, failed or dead; None when that takes longer than `seconds`.

        An outage of the database only takes time: callers that get None can query again.
        """
        future: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        self._came.set()
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
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
        if self._poller is not None:
            await end(self._poller)

    async def _poll(self) -> None:
        in_vain = 0
        while self._waiting:
            ended = await self._look(list(self._waiting))
            came = await self._pause(backoff(in_vain + 1, first=_FIRST, cap=_LAST))
            in_vain = 0 if came or ended else in_vain + 1

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
        """Whether a caller arrived meanwhile; it waits for the shortest pause, so that arrivals do not set the pace."""
        deadline, came = asyncio.get_running_loop().time() + seconds, False
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._came.wait()
            except TimeoutError:
                return came
            self._came.clear()
            if not came:
                deadline = min(deadline, asyncio.get_running_loop().time() + _FIRST)
            came = True
