"""One saga at a time with many steps, each a transaction that does nothing, in a process of its own."""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks._child import serve
from benchmarks._loop import run
from idemconsumer import App, Message, OutcomeKind, Retry, Saga, Tx

app = App("bench")
began: dict[str, float] = {}  # when the first step ran that had no record


@app.idempotent_handler("memory:walks", key="id", backoff="1ms, 1ms", timeout="10m")
async def walk(order: dict[str, Any], saga: Saga) -> None:
    """Steps up to `recorded`, then another run, which replays them, and `count` more."""
    for number in range(order["recorded"]):
        await saga.tx(f"step_{number}", nothing, number)
    if order["recorded"] and order["id"] not in began:
        began[order["id"]] = 0.0
        raise Retry
    began[order["id"]] = time.perf_counter()
    for number in range(order["recorded"], order["recorded"] + order["count"]):
        await saga.tx(f"step_{number}", nothing, number)


async def nothing(tx: Tx, number: int) -> int:
    return number


async def answer(question: dict[str, Any]) -> float:
    """Seconds for the `count` steps behind the recorded ones."""
    message = Message("memory:walks", json.dumps(question).encode())
    while (outcome := await app.process(message)).kind is not OutcomeKind.APPLIED:
        assert outcome.kind in (OutcomeKind.RETRYING, OutcomeKind.BUSY), outcome
    return time.perf_counter() - began.pop(question["id"])


async def main() -> None:
    try:
        await serve(answer)
    finally:
        await app.close()


if __name__ == "__main__":
    run(main())
