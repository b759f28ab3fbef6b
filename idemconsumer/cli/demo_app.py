"""The app that `idemconsumer demo` runs: payments into a ledger that would take each of them twice."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from idemconsumer.app.app import App
from idemconsumer.handlers.arguments import Tx

QUEUE = "payments"
PAUSE = "IDEMCONSUMER_DEMO_PAUSE"  # seconds that a booking takes, so that there is something to kill

# No unique constraint: a payment that is applied twice is there twice.
LEDGER = "create table ledger (payment text not null, amount bigint not null)"

app = App("demo")
_pause = float(os.environ.get(PAUSE, "0"))


@dataclass(frozen=True)
class Payment:
    id: str
    amount: int


# Many attempts, since each time its worker is killed while it runs costs a payment one.
@app.idempotent_handler(f"postgres:{QUEUE}", key="id", max_attempts=100, backoff="100ms, 100ms")
async def book(payment: Payment, tx: Tx) -> None:
    """The pause comes between the write and its commit, where a crash is worst."""
    await tx.execute("insert into ledger values (%s, %s)", (payment.id, payment.amount))
    await asyncio.sleep(_pause)
