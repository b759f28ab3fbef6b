"""A fast handler beside a slow one, in one worker of ours."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from benchmarks.rivals.applying import INSERT
from idemconsumer import App, Tx

app = App(os.environ["BENCH_GROUP"])


@app.idempotent_handler(os.environ["BENCH_SOURCE"], key="id")
async def fast(payment: dict[str, Any], tx: Tx) -> None:
    await tx.execute(INSERT, (payment["id"], payment["amount"]))


@app.idempotent_handler(os.environ["BENCH_SLOW"], key="id")
async def slow(payment: dict[str, Any], tx: Tx) -> None:
    await asyncio.sleep(1.0)
