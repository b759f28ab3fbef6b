"""An app in which some messages end all progress of their worker; with SAGAS set it has a saga, too."""

from __future__ import annotations

import os
from typing import Any

from idemconsumer import App, Saga, Tx
from tests.process.supervised import hold_the_interpreter, spin
from tests.support.tuning import tuned_for_good

tuned_for_good(worker_standstill=1.0)
app = App("shop")


@app.idempotent_handler("postgres:orders", key="id", timeout="0.5s", max_attempts=1)
async def apply(order: dict[str, Any], tx: Tx) -> None:
    if order["id"] == "spins":
        spin()
    if order["id"] == "holds":
        hold_the_interpreter()
    await tx.execute("insert into applied (id) values (%s)", (order["id"],))


if "SAGAS" in os.environ:

    @app.idempotent_handler("postgres:rides", key="id", timeout="0.5s", lease="1s")
    async def book(ride: dict[str, Any], saga: Saga) -> None:
        return
