"""Payments in two currencies. The first release has two bugs; INCIDENT_MENDED=1 is the one without them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from idemconsumer import App, Tx

MENDED = os.environ.get("INCIDENT_MENDED") == "1"
CENTS = {"EUR": 100, "CHF": 100} if MENDED else {"EUR": 100}

# `amount` is in cents. No unique constraint: what is applied twice is seen.
TABLES = """
create table payment (id text not null, currency text not null, amount bigint not null, note varchar(40) not null)
"""

app = App("incident")


@dataclass
class Payment:
    id: str
    currency: str
    amount: int
    note: str


@app.idempotent_handler("postgres:payments", key="id", max_attempts=2, backoff="10ms, 10ms")
async def book(payment: Payment, tx: Tx) -> None:
    note = payment.note[:40] if MENDED else payment.note
    values = (payment.id, payment.currency, payment.amount * CENTS[payment.currency], note)
    await tx.execute("insert into payment (id, currency, amount, note) values (%s, %s, %s, %s)", values)
