"""`app.process`: one message through the same engine, for those who own their consumer loop."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from idemconsumer import (
    App,
    ConfigurationError,
    Message,
    Reject,
    Retry,
    Saga,
    StoreUnavailable,
    Tx,
    idempotent_handler,
)
from idemconsumer.errors import HandlerFault
from idemconsumer.handlers.handler import BoundHandler, HandlerPlan
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings, load
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SOURCE, Ledger, kinds, message, write
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

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
    assert (await app.process(message("later"))).due == 60.0
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


async def in_a_group(call: Awaitable[object]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(awaited(call))


async def awaited(call: Awaitable[object]) -> None:
    await call


@pytest.mark.parametrize("way", [awaited, in_a_group])
async def test_a_handler_that_processes_another_message_is_refused_and_nothing_is_counted(
    ledger: Ledger, app: App, way: Callable[[Awaitable[object]], Awaitable[None]]
) -> None:
    """Each has a connection, and would wait for a second one."""

    @app.idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def outer(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        try:
            await way(app.process(message(f"{order['id']} inside"), handler=inner))
        except Exception:
            raise Reject("swallowed") from None

    @app.idempotent_handler("memory:others", key="id")
    async def inner(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    async with asyncio.timeout(PATIENCE):
        ends = await asyncio.gather(
            *(app.process(message(n), handler=outer) for n in range(RIVALS)), return_exceptions=True
        )
    assert {type(end) for end in ends} == {ConfigurationError}
    assert re.search(r"handler 'inner': .* give the message to app\.publish\(…, tx=tx\)", str(ends[0]))
    assert (ledger.effects, ledger.states, ledger.attempts, ledger.letters) == ([], [], [], [])
    assert str((await app.process(message(1), handler=inner)).kind) == "applied", "behind the other one it works"


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda app, inner: app.result(inner, key="k"), "read it before"),
        (lambda app, inner: app.accept(inner, {"id": "k"}, key="k"), "give it tx=tx"),
    ],
)
async def test_a_handler_that_would_wait_for_another_connection_is_refused(
    ledger: Ledger, app: App, call: Callable[[App, Any], Awaitable[object]], instead: str
) -> None:
    @app.idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def outer(order: dict[str, Any], tx: Tx) -> None:
        await call(app, inner)

    @app.idempotent_handler("memory:others", key="id")
    async def inner(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    with pytest.raises(ConfigurationError, match=instead):
        await app.process(message(1), handler=outer)
    assert ledger.attempts == []


async def test_a_task_of_a_handler_that_has_ended_may_process_messages(ledger: Ledger, app: App) -> None:
    ended, tasks = asyncio.Event(), list[asyncio.Task[Any]]()

    async def later() -> str:
        await ended.wait()
        return str((await app.process(message("later"), handler=inner)).kind)

    @app.idempotent_handler(SOURCE, key="id")
    async def outer(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        tasks.append(asyncio.create_task(later()))

    @app.idempotent_handler("memory:others", key="id")
    async def inner(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    assert str((await app.process(message(1), handler=outer)).kind) == "applied"
    ended.set()
    assert await tasks[0] == "applied"


async def test_a_step_that_processes_another_message_fails_with_the_same_words(ledger: Ledger, app: App) -> None:
    seen: list[str] = []

    async def step(tx: Tx) -> None:
        try:
            await app.process(message("inside"), handler=outer)
        except HandlerFault as refused:
            seen.append(str(refused))
            raise Reject("nested") from None

    @app.idempotent_handler(SOURCE, key="id")
    async def outer(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", step)

    assert str((await app.process(message("a"))).kind) == "failed"
    assert "app.process was called in a transaction" in seen[0]


async def test_the_handler_is_found_by_source_or_given(ledger: Ledger, app: App) -> None:
    @app.idempotent_handler(SOURCE, key="id")
    async def mine(order: dict[str, Any], tx: Tx) -> str:
        return "mine"

    @app.idempotent_handler("memory:others", key="id")
    async def others(order: dict[str, Any], tx: Tx) -> str:
        return "others"

    assert (await app.process(message(1))).result == b'"mine"'
    assert (await app.process(message(1), handler=others)).result == b'"others"'
    with pytest.raises(ConfigurationError, match="no handler for 'memory:nowhere'; pass handler="):
        await app.process(Message("memory:nowhere", b"{}"))


async def test_a_handler_is_told_of_the_attempts_that_failed_before(ledger: Ledger, app: App) -> None:
    seen: list[int] = []

    @app.idempotent_handler(SOURCE, key="id")
    async def third_time(order: dict[str, Any], tx: Tx, message: Message) -> None:
        seen.append(message.attempt)
        await write(tx, order["id"])
        if message.attempt < 3:
            raise Retry

    outcomes = [await app.process(message(1)) for _ in range(4)]
    assert kinds(outcomes) == ["retrying", "retrying", "applied", "duplicate"]
    assert [outcome.attempt for outcome in outcomes] == [1, 2, 3, 1], "what has come to its end is forgotten"
    assert (seen, ledger.attempts) == ([1, 2, 3], []), "in the database too"


async def test_the_attempts_of_so_many_keys_are_remembered(
    ledger: Ledger, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, inline_keys=2)
    seen: list[tuple[int, int]] = []

    @app.idempotent_handler(SOURCE, key="id")
    async def fail(order: dict[str, Any], message: Message) -> None:
        seen.append((order["id"], message.attempt))
        raise Retry

    for id in (1, 2, 3, 1, 3):
        await app.process(message(id))
    assert seen == [(1, 1), (2, 1), (3, 1), (1, 1), (3, 2)]


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
    await app.close()
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


async def test_a_worker_publishes_to_the_database_that_it_was_given_as_a_flag(
    ledger: Ledger, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IDEMCONSUMER_DSN")

    @app.idempotent_handler(SOURCE, key="id")
    async def pay(order: dict[str, Any], tx: Tx) -> None: ...

    app.worker(Settings(dsn=ledger.dsn))
    await app.publish("postgres:emails", {"to": 1}, key="mail")
    assert ledger.run("select name, message_id from idemconsumer.queue") == [("emails", "mail")]


async def test_without_a_worker_the_settings_are_read_once(
    ledger: Ledger, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Settings] = []

    def counting() -> Settings:
        loads.append(load())
        return loads[-1]

    monkeypatch.setattr("idemconsumer.app.app_state.load", counting)
    for n in range(3):
        await app.publish("postgres:emails", {"to": n})
    assert len(loads) == 1


async def test_a_handler_is_bound_once_for_as_long_as_the_app_is_open(
    ledger: Ledger, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    bind = HandlerPlan.bind

    def counting(self: HandlerPlan, *args: Any, **kwargs: Any) -> BoundHandler:
        bound.append(self.name)
        return bind(self, *args, **kwargs)

    monkeypatch.setattr(HandlerPlan, "bind", counting)

    @app.idempotent_handler(SOURCE, key="id")
    async def pay(order: dict[str, Any], tx: Tx) -> None: ...

    for n in range(3):
        await app.process(message(n))
    assert bound == ["pay"]
    await app.close()
    await app.process(message(4))
    assert bound == ["pay", "pay"], "its resources are others now"


async def test_a_closed_app_opens_again(ledger: Ledger, app: App) -> None:
    @app.idempotent_handler(SOURCE, key="id")
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    await app.process(message(1))
    await app.close()
    # The server takes a moment to see that a session has ended.
    await until(lambda: ledger.sessions("idle", "active", "idle in transaction") == 0)
    assert (await app.process(message(1))).kind == "duplicate"
