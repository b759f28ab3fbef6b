"""A worker process with a saga that never lets the event loop go on: `python -m tests.sagas.standing_saga`."""

from __future__ import annotations

import asyncio
from typing import Any

from idemconsumer import App, Saga
from idemconsumer.settings import load
from tests.support.sagas import hog

app = App("shop")


@app.idempotent_handler("postgres:orders", key="id", name="book", lease="1s", timeout="0.5s")
async def book(order: dict[str, Any], saga: Saga) -> None:
    hog(60.0)


if __name__ == "__main__":
    asyncio.run(app.worker(load()).run())
