"""A handler may change its payload: when it runs again, that is as it arrived (R33)."""

from __future__ import annotations

from typing import Any

from idemconsumer import Batch, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.decorator import Handler
from tests.support.ledger import SOURCE, Ledger, message, to_the_end, work, write


def group(handler: Handler[..., Any]) -> list[Work]:
    """The second one fails, and with it the transaction of both."""
    bound = handler.plan.bind("shop")
    return [work(bound, message("a", items=["x"], fails=False)), work(bound, message("b", items=["y"], fails=True))]


async def test_a_handler_that_changes_its_payload_finds_it_unchanged_when_it_runs_again(
    ledger: Ledger, engine: Engine
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["items"].pop())
        if order.pop("fails"):
            raise ValueError

    await to_the_end(engine, group(handle))
    assert (ledger.effects, ledger.letters) == (["x"], [("attempts_exhausted", 1)])


async def test_so_does_a_batch(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def handle(orders: Batch[dict[str, Any]], tx: Tx) -> None:
        for i, order in enumerate(orders):
            await write(tx, order["items"].pop())
            if order.pop("fails"):
                orders.retry(i)

    await to_the_end(engine, group(handle))
    assert (ledger.effects, ledger.letters) == (["x"], [("attempts_exhausted", 1)])
