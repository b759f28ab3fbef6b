"""The claims that a process holds in Redis, and the thread that renews them while an endpoint blocks the event loop.

The thread has its own event loop and connection. It only records when a claim was last renewed. Whether a claim is lost
is decided in the endpoints' loop, by the clock alone, and is final (H34). The clock is CLOCK_BOOTTIME, which keeps
running while the machine is suspended.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from idemconsumer import forks
from idemconsumer.duty import Duty, joined, within
from idemconsumer.logs import log
from idemconsumer.ports.requests import Held
from idemconsumer.redaction import error_text
from idemconsumer.rules.lease import MARGIN
from idemconsumer.rules.values import Record, State
from idemconsumer.stores.redis.redis_client import SECONDS, Redises
from idemconsumer.stores.redis.scripts import RENEW, Scripts

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_JOIN: Final = 5.0  # seconds for an exchange of the thread that is in progress


@dataclass(slots=True, eq=False)
class _Mine:
    held: Held
    kept: int  # milliseconds until the value expires, from each renewal on
    lost: Callable[[], None]
    good: float  # the time just before the claim or its last renewal; written by the thread


class Keeper:
    """The claims of one process, by key. All methods except the thread's are used in one event loop.

    Renewal stops while that loop has been blocked for longer than `patience` seconds: a hanging process loses its keys.
    """

    def __init__(self, address: str, *, lease: float, patience: float) -> None:
        self._address = address
        self._lease = lease
        self._patience = patience
        self._mine: dict[bytes, _Mine] = {}
        self._ticked = now()
        self._ticking: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._beating: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def hold(self, held: Held, kept: int, lost: Callable[[], None], good: float) -> bool:
        """Renew the claim from now on, and call `lost` if that has failed for too long. False: the lease of this claim,
        made at `good`, is nearly over already, and nothing may run under it."""
        if self._over_at(good) < now():
            return False
        if self._ticking is None:
            self._ticked = now()
            self._ticking = asyncio.create_task(Duty(self._tick, self._lease / 20).run())
            self._beating, self._stop = asyncio.new_event_loop(), asyncio.Event()
            self._thread = threading.Thread(
                target=self._beat, args=(asyncio.get_running_loop(),), name="idemconsumer-redis", daemon=True
            )
            self._thread.start()
        self._mine[held.claim.key] = _Mine(held, kept, lost, good)
        return True

    def record(self, key: bytes) -> Record | None:
        """The record of the claim that is held under this key."""
        if (mine := self._mine.get(key)) is None:
            return None
        claim = mine.held.claim
        return claim.record(State.PROCESSING)

    def drop(self, held: Held) -> None:
        """The claim is ended, or another owner has it: it is not renewed any more."""
        mine = self._mine.get(held.claim.key)
        if mine is not None and mine.held.token == held.token:
            del self._mine[held.claim.key]

    async def stop(self) -> list[Held]:
        """Stop renewing. Returns the claims that are still held."""
        if self._ticking is not None and self._thread is not None:
            self._ticking.cancel()
            with suppress(RuntimeError):  # its loop has ended
                self._beating.call_soon_threadsafe(self._stop.set)
            await joined(self._thread, _JOIN)
            self._ticking = None  # a claim made after this is renewed by another thread
        left, self._mine = self._mine, {}
        return [mine.held for mine in left.values()]

    def _over_at(self, good: float) -> float:
        """When `lost` must be called: the endpoint must have ended before another owner may get the key."""
        return good + self._lease * (1 - MARGIN)

    # -------------------------------------------------------------------------------------------------------- the loop
    async def _tick(self) -> None:
        self._ticked = now()
        self._look()

    def _look(self) -> None:
        """Report lost claims. Once that is reported the claim is lost: a renewal in flight may still succeed, but is
        the last one."""
        for mine in [each for each in self._mine.values() if self._over_at(each.good) < now()]:
            self.drop(mine.held)
            log.error("claim of a request lost", key=mine.held.claim.key)
            mine.lost()

    # ------------------------------------------------------------------------------------------------------ the thread
    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._beating.run_until_complete(self._renew(loop))
        finally:
            self._beating.close()

    async def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        forks.use_loop()
        redises = Redises(self._address, seconds=min(SECONDS, self._lease / 3))
        scripts = Scripts(redises)
        blocked = False
        while not loop.is_closed() and not await within(self._lease / 20, self._stop):
            due = [mine for mine in self._mine.copy().values() if now() > mine.good + self._lease / 3]
            still = now() - self._ticked
            if due and still > self._patience:
                if not blocked:
                    log.warning("event loop blocked, claims of requests not renewed", seconds=round(still, 1))
                blocked = True
                continue
            blocked = False
            if False in await asyncio.gather(*(self._renewed(scripts, mine) for mine in due)):
                with suppress(RuntimeError):  # that loop has ended
                    loop.call_soon_threadsafe(self._look)
        await redises.close()

    async def _renewed(self, scripts: Scripts, mine: _Mine) -> bool:
        """False: Redis reports that the claim is over, or has another owner."""
        before = now()
        try:
            renewed = bool(await scripts.run(RENEW, mine.held.claim.key, mine.held.token, mine.kept))
        except Exception as error:  # noqa: BLE001 - whatever it is: what is not renewed in time is lost
            log.debug("claim of a request not renewed", error=error_text(error))
            return True
        mine.good = before if renewed else -math.inf
        return renewed


def now() -> float:
    """The time in seconds, for comparisons only."""
    return time.clock_gettime(_CLOCK)
