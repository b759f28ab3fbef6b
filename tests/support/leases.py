"""Leases that end when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.support.ledger import Ledger

STEADY: Final = 6.0  # seconds; a lease that is not lost though the machine stands still for two


class UnkeptLease:
    """Of a process; no thread keeps it: it lasts for an hour, or until it is ended."""

    worker = 0
    over = False

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.lost: Callable[[], None] = lambda: None

    async def start(self, lost: Callable[[], None]) -> None:
        self.lost = lost
        self.renew()

    def renew(self) -> None:
        """Another one, as after a loss."""
        self.over = False
        ((self.worker,),) = self._ledger.run(
            "insert into idemconsumer.worker (name, lease, until, runs)"
            " values ('test', '1 hour', clock_timestamp() + interval '1 hour', '[]') returning id"
        )

    async def expire(self) -> None:
        self._ledger.run(
            "update idemconsumer.worker set until = clock_timestamp() - interval '1 second' where id = %s",
            [self.worker],
        )

    stop = expire
