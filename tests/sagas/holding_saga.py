"""An app with a saga that lets no thread of its process run any more."""

from __future__ import annotations

from typing import Any

from idemconsumer import App, Saga
from tests.process.supervised import hold_the_interpreter

app = App("shop")


@app.idempotent_handler("postgres:orders", key="id", name="book", lease="1s", timeout="0.5s", max_attempts=1)
async def book(order: dict[str, Any], saga: Saga) -> None:
    hold_the_interpreter()
