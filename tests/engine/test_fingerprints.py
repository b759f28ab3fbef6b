"""What counts as the same payload under one key, beside workers of an older version too (R26)."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

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


@pytest.mark.parametrize("options", [{}, {"fingerprint": "raw bytes"}], ids=["value", "raw bytes"])
async def test_a_record_of_an_older_version_knows_its_bytes(
    ledger: Ledger, engine: Engine, options: dict[str, Any]
) -> None:
    take = handler(**options)
    key = Work.of(take, Message(SOURCE, FIRST)).key
    ledger.run("insert into idemconsumer.scope (name) values ('shop/-/take') on conflict do nothing")
    # One transaction, with the function that older workers call.
    ledger.run(
        "with opened as (select set_config('idemconsumer.open', 't', true))"
        " select idemconsumer.claim(array[%s::bytea], array[(select id from idemconsumer.scope where name ="
        " 'shop/-/take')], array[%s::bytea], 3::smallint), idemconsumer.seal('t') from opened",
        [key, sha256(FIRST).digest()],
    )
    assert ledger.run("select fingerprint, canonical from idemconsumer.record") == [(sha256(FIRST).digest(), None)]
    assert await run(engine, take, FIRST) == ["duplicate"]
    assert await run(engine, take, OTHER_VALUE) == ["conflict"]
    assert ledger.effects == []


async def test_an_older_worker_finds_the_bytes_of_a_new_record(ledger: Ledger, engine: Engine) -> None:
    take = handler()
    await run(engine, take, FIRST)
    key = Work.of(take, Message(SOURCE, FIRST)).key
    claimed = (
        "select found, fingerprint from idemconsumer.claim(array[%s::bytea], array[1], array[%s::bytea], 3::smallint)"
    )
    assert ledger.run(claimed, [key, sha256(FIRST).digest()]) == [(3, sha256(FIRST).digest())]


async def test_what_is_compared_may_be_changed_while_messages_are_on_the_way(engine: Engine) -> None:
    assert await run(engine, handler(), FIRST) == ["applied"]
    assert await run(engine, handler(fingerprint="raw bytes"), FIRST) == ["duplicate"]
    assert await run(engine, handler(fingerprint="raw bytes"), SAME_VALUE) == ["conflict"]
