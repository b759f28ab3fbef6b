"""`app.process`: one message through the same engine, for those who own their consumer loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from idemconsumer import App, ConfigurationError, Message, Reject, Retry, StoreUnavailable, Tx, idempotent_handler
from idemconsumer._model import State
from idemconsumer.stores.postgres import PostgresStore
from tests.ledger import SOURCE, Ledger, message, write

RIVALS = 50


@pytest.fixture
async def app(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    monkeypatch.setenv("IDEMCONSUMER_DSN", ledger.dsn)
    app = App("shop")
    yield app
    await app.close()


async def test_outcomes_are_given_back_with_their_results(ledger: Ledger, app: App) -> None:
    @app.idempotent_handler(SOURCE, key="id", max_attempts=2)
    async def pay(order: dict[str, Any], tx: Tx) -> dict[str, Any]:
        await write(tx, order["id"])
        match order["id"]:
            case "refused":
                raise Reject("no_funds")
            case "later":
                raise Retry(after="1m")
            case "broken":
                raise ValueError
        return {"paid": order["id"]}

    async def outcome(id: str, **more: object) -> tuple[str, State | None, bytes | None]:
        got = await app.process(message(id, **more))
        return str(got.kind), got.state, got.result

    assert await outcome("a") == ("applied", State.COMPLETED, b'{"paid":"a"}')
    assert await outcome("a") == ("duplicate", State.COMPLETED, b'{"paid":"a"}')
    assert (await outcome("a", amount=1))[0] == "conflict"
    assert await outcome("refused") == ("failed", State.FAILED, b'{"code":"no_funds","body":null}')
    assert await outcome("refused") == ("duplicate", State.FAILED, b'{"code":"no_funds","body":null}')
    assert (await app.process(message("later"))).due == 30.0
    assert [(await outcome("broken"))[0] for _ in range(3)] == ["retrying", "dead", "dead"]
    assert ledger.effects == ["a"]


async def test_fifty_first_messages_at_once_open_one_store_and_apply_one_effect(
    ledger: Ledger, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0
    open_store = PostgresStore.open

    async def counting(*args: Any, **kwargs: Any) -> PostgresStore:
        nonlocal opened
        opened += 1
        return await open_store(*args, **kwargs)

    monkeypatch.setattr(PostgresStore, "open", counting)

    @app.idempotent_handler(SOURCE, key="id")
    async def pay(order: dict[str, Any], tx: Tx) -> str:
        await write(tx, order["id"])
        return "paid"

    outcomes = await asyncio.gather(*(app.process(message(1)) for _ in range(RIVALS)))

    assert Counter(str(outcome.kind) for outcome in outcomes) == {"applied": 1, "duplicate": RIVALS - 1}
    assert {outcome.result for outcome in outcomes} == {b'"paid"'}
    assert (ledger.effects, opened) == (["1"], 1)
    assert ledger.sessions("idle", "active", "idle in transaction") <= 8


async def test_more_messages_than_connections_take_turns(ledger: Ledger, app: App) -> None:
    @app.idempotent_handler(SOURCE, key="id")
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    outcomes = await asyncio.gather(*(app.process(message(n)) for n in range(RIVALS)))
    assert Counter(str(outcome.kind) for outcome in outcomes) == {"applied": RIVALS}
    assert len(ledger.effects) == RIVALS


async def test_the_handler_is_found_by_source_or_given(ledger: Ledger, app: App) -> None:
    @app.idempotent_handler(SOURCE, key="id")
    async def mine(order: dict[str, Any], tx: Tx) -> str:
        return "mine"

    @app.idempotent_handler("memory:others", key="id")
    async def others(order: dict[str, Any], tx: Tx) -> str:
        return "others"

    assert (await app.process(message(1))).result == b'"mine"'
    assert (await app.process(message(1), handler=others)).result == b'"others"'
    with pytest.raises(ConfigurationError, match="no handler on 'memory:nowhere'; give handler="):
        await app.process(Message("memory:nowhere", b"{}"))


async def test_two_apps_do_not_share_keys(ledger: Ledger, app: App) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    app.include(pay)
    other = App("another shop")
    other.include(pay)
    assert (await app.process(message(1))).kind == "applied"
    assert (await other.process(message(1))).kind == "applied"
    await other.close()
    assert ledger.effects == ["1", "1"]


async def test_tenants_do_not_share_keys(ledger: Ledger, app: App) -> None:
    @app.idempotent_handler(SOURCE, key="id", tenant="shop")
    async def pay(order: dict[str, Any], tx: Tx, message: Message) -> str:
        await write(tx, message.key)
        return f"{message.tenant}"

    outcomes = [await app.process(message(1, shop=shop)) for shop in ("north", "south", "north")]
    assert [(str(o.kind), o.result) for o in outcomes] == [
        ("applied", b'"north"'),
        ("applied", b'"south"'),
        ("duplicate", b'"north"'),
    ]
    assert [scope for (scope,) in ledger.run("select name from idemconsumer.scope where name like 'shop/%th/pay'")] == [
        "shop/north/pay",
        "shop/south/pay",
    ]


async def test_without_a_database_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("shop")

    @app.idempotent_handler(SOURCE, key="id")
    async def never(order: dict[str, Any]) -> None:
        raise AssertionError

    monkeypatch.delenv("IDEMCONSUMER_DSN", raising=False)
    with pytest.raises(ConfigurationError, match="set IDEMCONSUMER_DSN"):
        await app.process(message(1))
    monkeypatch.setenv("IDEMCONSUMER_DSN", "postgresql://127.0.0.1:1/x")
    with pytest.raises(StoreUnavailable):
        await app.process(message(1))


async def test_a_message_is_published_with_its_effect_or_not_at_all(ledger: Ledger, app: App) -> None:
    @app.idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        await app.publish("postgres:emails", {"to": order["id"]}, key=f"mail {order['id']}", tx=tx)
        if order["id"] == 2:
            raise ValueError

    assert [(await app.process(message(n))).kind for n in (1, 2, 1)] == ["applied", "dead", "duplicate"]
    assert ledger.run("select name, message_id, body from idemconsumer.queue") == [("emails", "mail 1", b'{"to":1}')]


async def test_a_closed_app_opens_again(ledger: Ledger, app: App) -> None:
    @app.idempotent_handler(SOURCE, key="id")
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    await app.process(message(1))
    await app.close()
    async with asyncio.timeout(5):  # the server takes a moment to see that a session has ended
        while ledger.sessions("idle", "active", "idle in transaction"):
            await asyncio.sleep(0.01)
    assert (await app.process(message(1))).kind == "duplicate"
