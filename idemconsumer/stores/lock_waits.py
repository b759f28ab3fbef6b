"""Which sessions keep the transactions of this process waiting for locks (O34)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from idemconsumer.duty import Duty
from idemconsumer.errors import StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.rules.held_up import Holder
from idemconsumer.stores.pool import Pool

_LOOK: Final = 2.0  # seconds between two queries
_LONG: Final = 3.0  # seconds that a lock is waited for before it is reported: a hot row is released sooner

Ask = Callable[[str, dict[str, Any]], Awaitable[list[tuple[Any, ...]]]]  # runs a statement by its name


@dataclass(slots=True)
class _Wait:
    since: float
    holder: Holder


class LockWaits:
    """The lock waits of the handlers whose transactions are in `pools`. Nothing is queried while no transaction is open
    for long.

    A run that did not get a lock in time tries again after a pause. So a wait that was seen counts as going on while
    keys of the handler have `collided`. `changed` is called when one begins or is over.
    """

    def __init__(self, pools: Sequence[Pool], collided: Callable[[str], bool], changed: Callable[[], None]) -> None:
        self._pools = pools
        self._collided = collided
        self._changed = changed
        self._waits: dict[str, _Wait] = {}

    def of(self, handler: str) -> tuple[Holder | None, float]:
        """The session that holds the lock for which this handler waits, and since how many seconds. None, 0: no
        wait."""
        wait = self._waits.get(handler)
        return (None, 0.0) if wait is None else (wait.holder, time.monotonic() - wait.since)

    async def run(self, ask: Ask) -> None:
        """Run until cancelled. While the database does not answer, the last known waits count."""
        await Duty(partial(self._look, ask), _LOOK, first=_LOOK).run()

    async def _look(self, ask: Ask) -> None:
        handlers = {pid: handler for pool in self._pools for pid, handler in pool.held_for(_LONG) if handler}
        if handlers or self._waits:
            with suppress(StoreUnavailable):
                rows = await ask("lock_waits", {"pids": list(handlers), "seconds": _LONG}) if handlers else []
                self._found((handlers[pid], Holder(*holder)) for pid, *holder in rows)

    def _found(self, holders: Iterable[tuple[str, Holder]]) -> None:
        seen, before = dict(holders), set(self._waits)
        for handler, holder in seen.items():
            wait = self._waits.get(handler)
            if wait is None or wait.holder.pid != holder.pid:
                log.warning("handler waits for a lock", handler=handler, held_by=str(holder))
            self._waits[handler] = _Wait(time.monotonic() if wait is None else wait.since, holder)
        for handler in before - seen.keys():
            if not self._collided(handler):
                seconds = round(time.monotonic() - self._waits.pop(handler).since, 1)
                log.info("handler no longer waits for a lock", handler=handler, seconds=seconds)
        if before != self._waits.keys():
            self._changed()
