"""Our own consumer: what `idemconsumer run` is given in the end-to-end parts."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from benchmarks._sizes import sized
from benchmarks.rivals.applying import INSERT
from idemconsumer import App, Tx

app = App(os.environ["BENCH_GROUP"])
_publish = os.environ.get("BENCH_PUBLISH")
_pause = float(os.environ.get("BENCH_PAUSE", "0"))


@app.idempotent_handler(os.environ["BENCH_SOURCE"], key="id", **sized(os.environ["BENCH_SIZE"]))
async def pay(payment: dict[str, Any], tx: Tx) -> None:
    await tx.execute(INSERT, (payment["id"], payment["amount"]))
    if _publish:
        await app.publish(_publish, payment, key=payment["id"], tx=tx)
    if _pause:
        await asyncio.sleep(_pause)
