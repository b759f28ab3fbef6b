"""A saga of three steps through `app.process`, many at a time, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from benchmarks._child import serve
from benchmarks._loop import run
from idemconsumer import App, Message, OutcomeKind, Saga, Step, Tx

app = App("bench")


@app.idempotent_handler("memory:rides", key="id")
async def ride(order: dict[str, Any], saga: Saga) -> str:
    number = await saga.tx("created", create, order["id"])
    charge = await saga.call("charged", charge_card, order["id"])
    await saga.tx("booked", book, order["id"], number)
    return charge


async def create(tx: Tx, ride: str) -> int:
    await tx.execute("insert into payment (id, amount) values (%s, 1)", (ride,))
    return 1


async def charge_card(step: Step, ride: str) -> str:
    """The stub: it takes no time, so what is measured is what stands around it."""
    return f"charge-{ride}"


async def book(tx: Tx, ride: str, number: int) -> None:
    await tx.execute("insert into payment (id, amount) values (%s, %s)", (ride, number + 1))


async def answer(question: dict[str, Any]) -> float:
    """Seconds for `count` sagas, `at_once` of them running at any time."""
    prefix, waiting = question["prefix"], iter(range(question["count"]))

    async def one_after_another() -> None:
        for number in waiting:
            outcome = await app.process(Message("memory:rides", json.dumps({"id": f"{prefix}-{number}"}).encode()))
            assert outcome.kind is OutcomeKind.APPLIED, outcome

    started = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(question["at_once"])))
    return time.perf_counter() - started


async def main() -> None:
    try:
        await serve(answer)
    finally:
        await app.close()


if __name__ == "__main__":
    run(main())
