"""The delivery log: what became of deliveries, for people who ask about a key (O22, O23).

Applied deliveries are logged in their own commit. All others are collected, written a quarter of a second later, many
in one statement, and lost if the process dies. Nothing depends on the log, and no delivery waits for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from idemconsumer.duty import Duty
from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.rules.deliveries import became
from idemconsumer.rules.values import Outcome
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.stores.columns import LoggedDeliveries
from idemconsumer.stores.joined import PostgresStore

_PAUSE: Final = 0.25  # seconds between two writes
_TOGETHER: Final = 512  # deliveries of a row; half a page of keys
_MOST: Final = 20_000  # deliveries that wait to be written, some megabytes
_FAREWELL: Final = 2.0  # seconds


class _Ended(NamedTuple):
    """The end of a delivery, without its message: the columns of `LoggedDeliveries`."""

    key: bytes
    source: str
    position: str
    outcome: str
    attempt: int
    ended: float
    arrived: float

    @classmethod
    def of(cls, work: Work, outcome: str, attempt: int, now: float) -> _Ended:
        message = work.message
        position = message.position or message.message_id or ""
        return cls(work.key, message.source, position, outcome, attempt, now, work.arrived)


class DeliveryLog:
    """The delivery log of one engine. It costs nothing without `delivery_log`."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._worker = f"{socket.gethostname()} {os.getpid()}"
        self._waiting: dict[BoundHandler, list[_Ended]] = {}
        self._count = 0
        self._lost = 0
        self._writing = Duty(self._write_soon, first=_PAUSE)

    def applied(self, works: Sequence[Work]) -> LoggedDeliveries | None:
        """The row to write in the commit that applies these, all of one handler. None: they are not logged."""
        if not works or not works[0].handler.delivery_log:
            return None
        now = time.monotonic()
        return self._row(works[0].handler, [_Ended.of(work, "applied", work.attempt, now) for work in works])

    def add(self, group: Sequence[Work], outcomes: Sequence[Outcome]) -> None:
        """Log the outcomes of the first of `group`, all of one handler; they are written soon, unless that was done."""
        handler = group[0].handler
        if not handler.delivery_log:
            return
        now = time.monotonic()
        for work, outcome in zip(group, outcomes, strict=False):
            if work.logged or not work.key or (told := became(outcome)) is None:
                continue
            work.logged = settle(outcome) is Settlement.FINISH
            if self._count >= _MOST:
                self._lost += 1
                continue
            self._waiting.setdefault(handler, []).append(_Ended.of(work, told, outcome.attempt, now))
            self._count += 1
        if self._waiting:
            # In a context of its own: it belongs to no lane, and uses no lane's share of the connections.
            self._writing.start(contextvars.Context())

    async def close(self) -> None:
        """Write the waiting rows, if the database answers within two seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL):
                await self._writing.finish()
                await self._write()

    async def _write_soon(self) -> float | None:
        await self._write()
        return _PAUSE if self._waiting else None

    async def _write(self) -> None:
        waiting, self._waiting = self._waiting, {}
        lost, self._lost, self._count = self._lost, 0, 0
        rows = [
            self._row(handler, deliveries[start : start + _TOGETHER])
            for handler, deliveries in waiting.items()
            for start in range(0, len(deliveries), _TOGETHER)
        ]
        try:
            if rows:
                await self._store.log_deliveries(rows)
        except Exception as error:  # noqa: BLE001 - nothing waits for this, and nobody would notice
            lost += sum(len(row.keys) for row in rows)
            log.debug("deliveries were not logged", error=error_text(error))
        if lost:
            log.warning("deliveries are missing from the delivery log", count=lost)

    def _row(self, handler: BoundHandler, deliveries: Sequence[_Ended]) -> LoggedDeliveries:
        columns: Any = map(list, zip(*deliveries, strict=True))
        return LoggedDeliveries(handler.delivery_log, handler.app, handler.name, self._worker, *columns)
