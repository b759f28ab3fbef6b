"""The cut-over of docs/migrating.md, as printed: a consumer written by hand and ours, and each effect once (R31)."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner

from idemconsumer import Message
from idemconsumer.cli.main import main
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from tests.support import ROOT
from tests.support.kafka import World, world_of
from tests.support.servers.made import Server
from tests.support.waiting import until

PAGE = (ROOT / "docs" / "migrating.md").read_text("utf-8")
COMMAND = re.findall(r"^idemconsumer (import .*)$", PAGE, re.MULTILINE)


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


@pytest.mark.slow
@pytest.mark.usefixtures("printed")
async def test_the_cut_over_applies_each_message_once(
    shop: psycopg.Connection[Any], world: World, database: str
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

            async def shared() -> bool:
                await topic.publish([f"both-{len(topic.ids) + n}" for n in range(20)])
                await until(applied, "both have gone through")
                by_us, by_it = count("seen where result is null"), count("seen where result is not null")
                return by_us > 0 and by_it > len(old)

            await until(shared, "each has been the first for some")

    async with ours(both, world, database):
        await topic.publish([f"after-{n}" for n in range(20)])
        for command in COMMAND:
            result = await asyncio.to_thread(CliRunner().invoke, main, command.split())
            assert result.exit_code == 0, result.output
            assert "left" not in result.output
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
