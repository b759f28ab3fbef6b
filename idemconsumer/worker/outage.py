"""Waits out an outage of the database that a worker needs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable, Iterable

from idemconsumer.duty import within
from idemconsumer.errors import StoreChanged, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.rules.session_pause import session_pause


def said_by_lanes(error: BaseException) -> bool:
    """Whether a failure beside the lanes is one that each lane meets too: then their `Outage` logs it, once."""
    return isinstance(error, StoreUnavailable) and not isinstance(error, StoreChanged)


class Outage:
    """An outage of the database (R8): logged once, and waited for by everything that needs the database.

    All waiters retry together, after two seconds at most, and at once when one of them has reached it. An error that
    only some statements meet, because the schema or rights have changed (R43), lasts as long as a message that met it
    is in flight.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0
        self._since = 0.0
        self.why = ""
        self._over = asyncio.Event()
        self._met: set[Hashable] = set()
        self._changed = False

    async def wait(
        self, error: Exception, ended: asyncio.Event | None = None, *, met_by: Iterable[Hashable] = ()
    ) -> None:
        """Wait until the next try is due, or the outage is over; with `ended`, until that is set instead."""
        now = asyncio.get_running_loop().time()
        self._since, self.why = self._since if self._failures else now, error_text(error)
        if isinstance(error, StoreChanged):
            self._met.update(met_by)
            if not self._changed:
                log.error("store schema or rights changed, waiting for repair", error=str(error))
            self._changed = True
        elif not self._failures:
            log.error("store unreachable, waiting", error=str(error))
        if now >= self._until:  # else another waiter has just failed, for the same reason
            self._failures += 1
            self._over.clear()
            self._until = now + session_pause(self._failures, counted=False, jitter=random.random())
        await within(self._until - now, ended or self._over)

    @property
    def lasts(self) -> bool:
        return self._failures > 0

    @property
    def seconds(self) -> float | None:
        """How long it has lasted; None if there is none."""
        return asyncio.get_running_loop().time() - self._since if self._failures else None

    def let_go(self, met_by: Hashable) -> None:
        """This message is no longer tried here."""
        self._met.discard(met_by)

    def over(self, *ended: Hashable) -> None:
        """The database has answered statements of these messages."""
        self._met.difference_update(ended)
        if self._failures and not self._met:
            self._failures, self._until, self.why, self._changed = 0, 0.0, "", False
            self._over.set()
            log.info("store reachable again")
