"""A worker of ours whose connections to Postgres are cut: a handler, or with BENCH_SAGA a saga of three steps."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from benchmarks.rivals.applying import INSERT
from idemconsumer import App, Saga, Step, Tx

app = App(os.environ["BENCH_GROUP"])


async def apply(tx: Tx, payment: dict[str, Any]) -> None:
    await tx.execute(INSERT, (payment["id"], payment["amount"]))
    await asyncio.sleep(0.01)


async def pause(step: Step) -> None:
    await asyncio.sleep(0.01)


if os.environ.get("BENCH_SAGA"):

    @app.idempotent_handler(os.environ["BENCH_SOURCE"], key="id")
    async def follow(payment: dict[str, Any], saga: Saga) -> None:
        await saga.call("before", pause)
        await saga.tx("apply", apply, payment)
        await saga.call("after", pause)

else:

    @app.idempotent_handler(os.environ["BENCH_SOURCE"], key="id")
    async def pay(payment: dict[str, Any], tx: Tx) -> None:
        await apply(tx, payment)
