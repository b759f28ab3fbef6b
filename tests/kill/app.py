"""The app that the kill tests run: one row a message into a witness table that has no unique constraint."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from idemconsumer import App, Tx

app = App("killed")


@dataclass
class Payment:
    id: str


@app.idempotent_handler(os.environ.get("KILL_SOURCE", "postgres:payments"), key="id", group_size=4, max_attempts=20)
async def pay(payment: Payment, tx: Tx) -> None:
    await tx.execute("insert into witness (id) values (%s)", (payment.id,))
    await asyncio.sleep(0.004)  # long enough that a kill finds effects that are not committed
