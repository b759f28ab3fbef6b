"""What counts as the same payload under one key (R26)."""

from __future__ import annotations

from typing import Any

from idemconsumer import App, Message, Tx
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from tests.support.ledger import SOURCE, Ledger, kinds, write

FIRST = b'{"id":"a","qty":1}'
SAME_VALUE = b'{"qty": 1, "id": "a"}'
OTHER_VALUE = b'{"qty": 2, "id": "a"}'


def handler(**options: Any) -> BoundHandler:
    app = App("shop")

    @app.idempotent_handler(SOURCE, key="id", name="take", **options)
    async def take(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    return app.handlers["take"].plan.bind("shop")


async def run(engine: Engine, bound: BoundHandler, *bodies: bytes) -> list[str]:
    """One after another, or in one group."""
    return kinds(await engine.run([Work.of(bound, Message(SOURCE, body)) for body in bodies]))


async def test_the_order_of_fields_makes_no_conflict(ledger: Ledger, engine: Engine) -> None:
    take = handler()
    assert await run(engine, take, FIRST) == ["applied"]
    assert await run(engine, take, SAME_VALUE) == ["duplicate"]
    assert await run(engine, take, OTHER_VALUE) == ["conflict"]
    assert ledger.effects == ["a"]


async def test_nor_does_it_within_a_group(ledger: Ledger, engine: Engine) -> None:
    assert await run(engine, handler(), FIRST, SAME_VALUE, OTHER_VALUE) == ["applied", "duplicate", "conflict"]
    assert ledger.effects == ["a"]


async def test_raw_bytes_are_compared_on_request(engine: Engine) -> None:
    take = handler(fingerprint="raw bytes")
    assert await run(engine, take, FIRST) == ["applied"]
    assert await run(engine, take, FIRST) == ["duplicate"]
    assert await run(engine, take, SAME_VALUE) == ["conflict"]


async def test_what_is_compared_may_be_changed_while_messages_are_on_the_way(engine: Engine) -> None:
    assert await run(engine, handler(), FIRST) == ["applied"]
    assert await run(engine, handler(fingerprint="raw bytes"), FIRST) == ["duplicate"]
    assert await run(engine, handler(fingerprint="raw bytes"), SAME_VALUE) == ["conflict"]
    other = FIRST.replace(b'"a"', b'"b"')
    assert await run(engine, handler(fingerprint="raw bytes"), other) == ["applied"]
    assert await run(engine, handler(), other) == ["duplicate"]
    assert await run(engine, handler(), OTHER_VALUE.replace(b'"a"', b'"b"')) == ["conflict"]
