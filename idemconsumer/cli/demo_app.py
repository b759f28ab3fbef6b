"""The app that `idemconsumer demo` runs: it books payments into a ledger that does not prevent double bookings."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from idemconsumer.app.app import App
from idemconsumer.handlers.arguments import Tx

QUEUE = "payments"
PAUSE = "IDEMCONSUMER_DEMO_PAUSE"  # seconds that one booking takes, so that a kill finds work in flight

# No unique constraint: a payment that is applied twice has two rows.
LEDGER = "create table ledger (payment text not null, amount bigint not null)"

app = App("demo")
_pause = float(os.environ.get(PAUSE, "0"))


@dataclass(frozen=True)
class Payment:
    id: str
    amount: int


# Many attempts, since each kill of its worker costs a running payment one attempt.
@app.idempotent_handler(f"postgres:{QUEUE}", key="id", max_attempts=100, backoff="100ms, 100ms")
async def book(payment: Payment, tx: Tx) -> None:
    """Pauses between the write and its commit, where a crash does the most harm."""
    await tx.execute("insert into ledger values (%s, %s)", (payment.id, payment.amount))
    await asyncio.sleep(_pause)
