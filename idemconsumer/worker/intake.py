"""Puts messages that may have killed a worker on record before a decoder, key function or validator sees them (B17).

The rules are those of handlers (`engine.suspects`): suspects without a record are marked together and read together. A
suspect that another process began to read, and never finished, is counted and read while nothing else of this process
runs. A suspect that another process reads right now is waited for. The record belongs to the delivery, since its key is
not known yet; deliveries that are exactly alike may share one record.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import groupby, islice
from typing import Any, Final, TypeVar

from idemconsumer.engine.company import Company
from idemconsumer.errors import BadMessage, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.ports.broker import Delivery
from idemconsumer.ports.observer import Observer, Point
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.claim import Claim
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.suspect_readings import PostgresReading
from idemconsumer.worker.outage import Outage

T = TypeVar("T")
Read = Callable[[Sequence[Delivery], BadMessage | None], Awaitable[None]]
_Begin = Callable[[int], AbstractAsyncContextManager[PostgresReading]]  # called with a number for this reader

_TOGETHER: Final = 256  # deliveries on record at the same time


class _GivenUp(Exception):
    """A drain, or the end of the session, came first: deliveries that are not read yet are no longer ours to read."""


class Intake:
    """The reading of one feed's suspects. `read` decodes deliveries and gives them to their lanes, or refuses them."""

    def __init__(
        self,
        store: PostgresStore,
        company: Company,
        outage: Outage,
        handler_of: Callable[[Delivery], BoundHandler],
        read: Read,
        *,
        draining: asyncio.Event,
        given_up: Callable[[Delivery], bool],
        observer: Observer,
    ) -> None:
        """`given_up`: whether a delivery is not to be read any more."""
        self._store = store
        self._company = company
        self._outage = outage
        self._handler_of = handler_of
        self._read = read
        self._draining = draining
        self._given_up = given_up
        self._at = observer.at

    async def admit(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Read suspects, in order. Returns those that were given up."""
        waiting = list(deliveries)
        try:
            for _, of_handler in groupby(deliveries, key=self._handler_of):
                while part := list(islice(of_handler, _TOGETHER)):
                    await self._read_all(part, waiting)
        except _GivenUp:
            return waiting
        return []

    async def _read_all(self, part: list[Delivery], waiting: list[Delivery]) -> None:
        """Read all of `part`, and remove from `waiting` what was read."""
        in_vain = 0
        while part:
            read, begun = await self._together(part, waiting)
            if begun:
                read += await self._alone(part[read], waiting)
            del part[:read]
            in_vain = 0 if read else in_vain + 1
            if in_vain:  # another process reads the first one, or a copy: wait to see whether that kills it
                await asyncio.sleep(backoff(in_vain, first=0.1, cap=1.0) * random.uniform(0.5, 1.0))

    async def _together(self, part: Sequence[Delivery], waiting: list[Delivery]) -> tuple[int, bool]:
        """Read up to the first suspect that was begun before. Returns how many, and whether the reader of that one is
        gone."""
        claims, name = [self._claim(delivery) for delivery in part], self._handler_of(part[0]).name
        async with self._company.shared():
            begin = partial(self._store.reading, claims)
            async with self._on_record(claims, part[0], begin) as reading:
                self._at(Point.READING, name, list(reading.ours))
                new = next((i for i, claim in enumerate(claims) if claim.key not in reading.ours), len(part))
                begun = new < len(part) and claims[new].key in reading.begun
                await self._read(part[:new], None)
                del waiting[:new]
                await reading.end()
            self._at(Point.READ, name, [claim.key for claim in claims[:new]])
        return new, begun

    async def _alone(self, delivery: Delivery, waiting: list[Delivery]) -> bool:
        """Read one suspect alone. Returns whether it was read or refused; False if another process was faster."""
        claim, handler = self._claim(delivery), self._handler_of(delivery)
        async with self._company.alone():
            begin = partial(self._store.reading_alone, claim)
            async with self._on_record([claim], delivery, begin) as reading:
                if not reading.ours:
                    return False
                self._at(Point.READING, handler.name, (claim.key,))
                del waiting[0]
                if reading.attempts > handler.options.max_attempts:
                    killed = reading.attempts - 1
                    why = f"{killed} workers died while they decoded it, or derived its key, tenant or order"
                    # A delivery with a position keeps its record: it may be redelivered before the broker knows its
                    # settlement.
                    record = claim.key if delivery.anonymous else None
                    await self._read([delivery], BadMessage("killed_worker", why, attempts=killed, record=record))
                    return True
                await self._read([delivery], None)
                await reading.end()
            self._at(Point.READ, handler.name, (claim.key,))
        return True

    @asynccontextmanager
    async def _on_record(
        self, claims: Sequence[Claim], first: Delivery, begin: _Begin
    ) -> AsyncIterator[PostgresReading]:
        """Keep these on record while they are read. Records that `end` of the reading could not remove are removed
        here."""
        reader = secrets.randbits(63)
        try:
            async with AsyncExitStack() as stack:
                yield await self._known(lambda: stack.enter_async_context(begin(reader)), before=first)
        except StoreUnavailable:
            await self._known(lambda: self._store.end_reading(claims, reader))

    async def _known(self, act: Callable[[], Coroutine[Any, Any, T]], *, before: Delivery | None = None) -> T:
        """Run `act` as soon as the database can be reached. Gives up if the delivery `before` which it runs is given
        up."""
        while before is None or not self._given_up(before):
            try:
                return await act()
            except StoreUnavailable as error:
                if self._draining.is_set():
                    break
                await self._outage.wait(error)
        raise _GivenUp

    def _claim(self, delivery: Delivery) -> Claim:
        handler = self._handler_of(delivery)
        app, name = handler.identity
        # A name that starts with "~" is no handler's, so no message has this key.
        key = keys.digest(app, None, f"~{name}", delivery.identity)
        return Claim(key=key, scope=handler.identity.scope(), fingerprint=None, retain=handler.options.retain)
