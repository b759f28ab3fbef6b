"""The cut-over of docs/migrating.md, as printed: a consumer written by hand and ours, and each effect once (R31)."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from idemconsumer import App, Key, Message, OutcomeKind, Saga, Tx
from idemconsumer.message.keys import KeySpec, digest
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from tests.support import ROOT
from tests.support.kafka import World, world_of
from tests.support.servers.made import Server
from tests.support.waiting import until

A_UUID = "8c6b1ab0-4a0d-4c7e-9c9c-0d3b7a1f2e44"
PAGE = (ROOT / "docs" / "migrating.md").read_text("utf-8")
(STATEMENT,) = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TEXTS = dict(re.findall(r"^\| `(Key\.\w+)\(.*?\)` \| `(.*)` \|$", PAGE.replace("\\|", "|"), re.MULTILINE))


@pytest.fixture
async def world(kafka: Server) -> AsyncIterator[World]:
    async with world_of(kafka) as world:
        await world.create(partitions=2)
        yield world


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World) -> Iterator[Path]:
    """The modules of the page, on a topic and in a group of this test's own."""
    found = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in found] == ["by_hand", "both", "alone", "begun"]
    for name, code in found:
        ours = code.replace('"orders"', f'"{world.topic}"').replace("kafka:orders", f"kafka:{world.topic}")
        (tmp_path / f"{name}.py").write_text(ours.replace('"shipping"', f'"{world.group}"'), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, _ in found:
        sys.modules.pop(name, None)


@pytest.fixture
def shop(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    migrate(database, "idemconsumer")
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("create table seen (id text primary key, result jsonb, at timestamptz default now())")
        connection.execute("create table parcel (order_id text)")
        yield connection


class Topic:
    """Publishes orders, in a random order of partitions and each of them twice, and knows which there are."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ids: list[str] = []
        self.sent = 0  # to each partition

    async def publish(self, ids: Sequence[str]) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.world.server.address) as producer:
            for partition in (0, 1):
                for each in ids:
                    await producer.send(self.world.topic, json.dumps({"id": each}).encode(), partition=partition)
        self.sent += len(ids)
        self.ids += [each for each in ids if each not in self.ids]


@asynccontextmanager
async def by_hand(module: ModuleType, world: World, dsn: str) -> AsyncIterator[None]:
    task = asyncio.create_task(module.consume(world.server.address, dsn))
    try:
        yield
        assert not task.done(), "it has left"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def ours(module: ModuleType, world: World, dsn: str) -> AsyncIterator[None]:
    worker = module.app.worker(Settings(dsn=dsn, kafka=world.server.address, concurrency=2))
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.drain()
        await running


@pytest.mark.usefixtures("printed")
async def test_what_the_former_consumer_has_begun_is_left_to_it(shop: psycopg.Connection[Any]) -> None:
    begun = importlib.import_module("begun")
    shop.execute("alter table seen add column state text")
    shop.execute("insert into seen (id, state) values ('begun', 'begun'), ('done', 'done')")

    async def arrives(key: str) -> tuple[str, bytes | None]:
        outcome = await begun.app.process(Message("kafka:x", json.dumps({"id": key}).encode()), handler=begun.ship)
        return outcome.kind, outcome.result

    try:
        assert [await arrives(key) for key in ("begun", "done", "new")] == [
            ("retrying", None), ("applied", None), ("applied", b'"shipped"')
        ]  # fmt: skip
    finally:
        await begun.app.close()
    assert shop.execute("select order_id from parcel").fetchall() == [("new",)]


async def arrives(app: App, body: object, **more: Any) -> tuple[OutcomeKind, bytes | None]:
    outcome = await app.process(Message("memory:orders", json.dumps(body).encode(), **more))
    return outcome.kind, outcome.result


@asynccontextmanager
async def shipping(key: KeySpec = "id", **options: Any) -> AsyncIterator[App]:
    """An app and a handler that are named as the page's."""
    app = App("shipping")

    @app.idempotent_handler("memory:orders", key=key, retain="30d", **options)
    async def ship(order: dict[str, Any], tx: Tx) -> str:
        return "new"

    yield app
    await app.close()


EVENT = {"specversion": "1.0", "source": "/shop", "id": "1"}


@pytest.mark.parametrize(
    ("key", "text", "row", "body", "more"),
    [
        ("id", "id::text", {"id": "'o-ä'"}, {"id": "o-ä"}, {}),
        ("id", "id::text", {"id": "17"}, {"id": 17}, {}),
        ("id", "id::text", {"id": "17"}, {"id": "17"}, {}),
        ("id", "id::text", {"id": f"'{A_UUID}'::uuid"}, {"id": A_UUID}, {}),
        (Key.all("shop", "id"), TEXTS["Key.all"], {"shop": "'s:1'", "id": "'ä'"}, {"shop": "s:1", "id": "ä"}, {}),
        (Key.cloudevent(), TEXTS["Key.cloudevent"], {"source": "'/shop'", "id": "'1'"}, EVENT, {}),
        (Key.offset(), TEXTS["Key.offset"], {"topic": "'t-1'", "partition": "0", "position": "7"}, {},
         {"position": "t-1-0-7"}),
    ],
)  # fmt: skip
async def test_a_message_whose_key_was_taken_over_is_a_duplicate(
    shop: psycopg.Connection[Any], key: KeySpec, text: str, row: Mapping[str, str], body: Any, more: dict[str, Any]
) -> None:
    """Whatever else it has as its payload: the table knew none."""
    shop.execute("drop table seen")
    columns = ", ".join(f"{value} as {name}" for name, value in row.items())
    shop.execute(f"create table seen as select {columns}, now() as at, '\"by hand\"'::jsonb as result".encode())
    shop.execute(STATEMENT.replace("'ship', id)", f"'ship', {text})").encode())
    async with shipping(key) as app:
        assert await arrives(app, body, **more) == ("duplicate", b'"by hand"')
        assert await arrives(app, body | {"also": "this"}, **more) == ("duplicate", b'"by hand"')
        assert await arrives(app, {"shop": "s", "source": "/", "id": "x", "specversion": "1.0"}) != (
            "duplicate",
            b'"by hand"',
        )


async def test_a_saga_whose_key_was_taken_over_does_not_begin(shop: psycopg.Connection[Any]) -> None:
    app = App("shipping")

    @app.idempotent_handler("memory:orders", key="id")
    async def ship(order: dict[str, str], saga: Saga) -> None:
        raise AssertionError

    shop.execute("insert into seen values ('a', '1')")
    shop.execute(STATEMENT.encode())
    assert await arrives(app, {"id": "a"}) == ("duplicate", b"1")
    await app.close()


async def test_only_what_a_record_would_be_kept_for_is_taken_and_what_has_one_keeps_it(
    shop: psycopg.Connection[Any],
) -> None:
    async with shipping(tenant="who") as app:
        assert await arrives(app, {"id": "ours", "who": "acme"}) == ("applied", b'"new"')
        shop.execute(
            "insert into seen values ('ours', '1', now()), ('young', null, now() - interval '3 days'),"
            " ('early', '3', now() + interval '1 day'), ('old', '4', now() - interval '31 days')"
        )
        taking = STATEMENT.replace("'ship')", "'ship', 'acme')").replace("'ship', id)", "'ship', id, 'acme')")
        for _ in range(2):  # it may be repeated
            shop.execute(taking.encode())
            found = shop.execute(
                "select s.name, s.retain = interval '30 days', r.state, r.fingerprint is null, e.body,"
                " extract(day from clock_timestamp() - r.changed_at)::int"
                " from idemconsumer.record as r join idemconsumer.scope as s on s.id = r.scope_id"
                " left join idemconsumer.result as e on e.key = r.key order by 6, 5"
            ).fetchall()
            assert found == [
                ("shipping/acme/ship", True, 3, False, b'"new"', 0),
                ("shipping/acme/ship", True, 3, True, b"3", 0),
                ("shipping/acme/ship", True, 3, True, None, 3),
            ]
        assert await arrives(app, {"id": "old", "who": "acme"}) == ("applied", b'"new"')
        assert await arrives(app, {"id": "young", "who": "ajax"}) == ("applied", b'"new"'), "the key of another tenant"


async def test_a_key_that_a_worker_holds_is_waited_for_and_no_worker_waits(
    shop: psycopg.Connection[Any], database: str
) -> None:
    shop.execute("insert into seen values ('a', '1'), ('held', '2'), ('z', '3')")
    held = int.from_bytes(digest("shipping", None, "ship", "held")[:8], "big", signed=True)
    async with (
        shipping(wait="60s") as app,
        await psycopg.AsyncConnection.connect(database) as rival,
        await psycopg.AsyncConnection.connect(database, autocommit=True) as taking,
    ):
        await rival.execute("select pg_advisory_xact_lock(%s)", (held,))
        running = asyncio.create_task(taking.execute(STATEMENT.encode()))
        waiting = "select from pg_locks where not granted and locktype = 'advisory'"
        await until(lambda: shop.execute(waiting.encode()).fetchall() != [], "it waits")
        assert await arrives(app, {"id": "a"}) == ("duplicate", b"1"), "what was taken is committed"
        assert await arrives(app, {"id": "new"}) == ("applied", b'"new"')
        await rival.rollback()
        await asyncio.wait_for(running, 10)
        assert await arrives(app, {"id": "held"}) == ("duplicate", b"2")


@pytest.fixture
def former_reads(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """While it is clear, the former consumer takes no more than the message that it waits for already."""
    reads, next_one = asyncio.Event(), AIOKafkaConsumer.__anext__
    reads.set()

    async def held_up(consumer: AIOKafkaConsumer) -> Any:
        await reads.wait()
        return await next_one(consumer)

    monkeypatch.setattr(AIOKafkaConsumer, "__anext__", held_up)
    return reads


@pytest.mark.slow
@pytest.mark.usefixtures("printed")
async def test_the_cut_over_applies_each_message_once(
    shop: psycopg.Connection[Any], world: World, database: str, former_reads: asyncio.Event
) -> None:
    former, both, alone = map(importlib.import_module, ("by_hand", "both", "alone"))
    topic, old = Topic(world), [f"old-{n}" for n in range(20)]

    def count(what: str) -> int:
        return int(shop.execute(f"select count(*) from {what}".encode()).fetchall()[0][0])

    async def applied() -> bool:
        return count("parcel") >= len(topic.ids) and count("idemconsumer.record") >= len(topic.ids) - len(old)

    async with by_hand(former, world, database):
        await topic.publish(old)
        await until(lambda: count("seen") == len(old), "the former consumer is at work")
        for partition in (0, 1):
            await world.delete_below(20, partition)  # retention: what is old is known to its table alone
        async with ours(both, world, database):
            former_reads.clear()
            await topic.publish([f"ours-{n}" for n in range(20)])
            await until(lambda: count("seen where result is null") > 0, "the new one is the first for some")
            former_reads.set()
            await until(applied, "both have gone through")
            async with await psycopg.AsyncConnection.connect(database) as rival:
                await rival.execute("lock table idemconsumer.record in exclusive mode")  # the new one cannot claim
                await topic.publish([f"its-{n}" for n in range(20)])
                await until(lambda: count("seen where result is not null") > len(old), "the former one is for others")
            await until(applied, "both have gone through")

    async with ours(both, world, database):
        await topic.publish([f"after-{n}" for n in range(20)])
        await asyncio.to_thread(shop.execute, STATEMENT.replace("shipping", world.group).encode())
        await until(applied, "the new one goes on")
    async with ours(alone, world, database):
        await topic.publish(topic.ids)  # whoever applied it: now only records know
        await topic.publish(["last"])
        for partition in (0, 1):
            await world.commits(topic.sent, partition)
    assert count("parcel") == count("(select distinct order_id from parcel) as p") == len(topic.ids)
    assert count("idemconsumer.record") == len(topic.ids)
    assert count("idemconsumer.dead_letter") == 0
    kept = shop.execute("select distinct convert_from(body, 'UTF8') from idemconsumer.result order by 1").fetchall()
    assert kept == [('"by hand"',), ('"shipped"',)]
