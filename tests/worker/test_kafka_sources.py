"""Which handler gets which of Kafka's messages: groups of their own, and patterns of topics (K17)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer

from idemconsumer import App, Message, Tx
from idemconsumer.admin.dead_letters import Admin
from idemconsumer.cli.inspect import findings
from tests.support.kafka import World, world_of
from tests.support.logs import LogCapture, entries
from tests.support.servers.made import Server
from tests.support.waiting import until
from tests.support.workers import SCHEMA, Bench, Item, body

CONTESTED = "kafka topic matches two handlers, neither reads it"


@pytest.fixture
async def world(kafka: Server) -> AsyncIterator[World]:
    async with world_of(kafka) as world:
        await world.create(partitions=2)
        yield world


def app_of(world: World) -> App:
    return App(world.topic.replace(".", "_"))


async def send(world: World, *items: Item | bytes, topic: str | None = None) -> None:
    async with AIOKafkaProducer(bootstrap_servers=world.server.address) as producer:
        for item in items:
            await producer.send_and_wait(topic or world.topic, body(item))


def handle(app: App, name: str, source: str, group: str | None = None) -> None:
    """A handler that notes its name, the message's, and where that came from."""

    @app.idempotent_handler(source, key="id", name=name, consumer_group=group or app.name)
    async def noted(item: Item, tx: Tx, message: Message) -> None:
        topic = message.source.rpartition(".")[2]
        await tx.execute("insert into effect (id) values (%s)", (f"{name} {item.id} of {topic}",))


async def test_each_group_of_a_topic_gets_every_message_once(world: World, bench: Bench) -> None:
    app = app_of(world)
    handle(app, "bill", f"kafka:{world.topic}")
    handle(app, "mail", f"kafka:{world.topic}", f"{app.name}_mail")
    await send(world, Item("1"), Item("2"), Item("1"), b"{")
    topic = world.topic.rpartition(".")[2]
    async with bench.running(app, kafka=world.server.address) as running:
        await running.until_count(applied=4, duplicate=2, dead=2)
    assert sorted(bench.effects()) == [f"{each} of {topic}" for each in ("bill 1", "bill 2", "mail 1", "mail 2")]
    letters = await Admin(bench.dsn, SCHEMA).dead_letters()
    assert sorted((letter.handler, letter.arrivals) for letter in letters) == [("bill", 1), ("mail", 1)]


async def test_a_pattern_takes_topics_as_they_appear(world: World, bench: Bench) -> None:
    app = app_of(world)
    handle(app, "any", rf"kafka:/{world.topic}\.(eu|us)/")
    await world.create(f"{world.topic}.eu")
    await world.create(f"{world.topic}.eu.other")
    for topic in ("eu", "eu.other"):
        await send(world, Item("1"), topic=f"{world.topic}.{topic}")
    async with bench.running(app, kafka=world.server.address) as running:
        await running.until_count(applied=1)
        await world.create(f"{world.topic}.us", partitions=2)
        await send(world, Item("2"), Item("3"), topic=f"{world.topic}.us")
        await running.until_count(applied=3)
    assert sorted(bench.effects()) == ["any 1 of eu", "any 2 of us", "any 3 of us"]


async def test_two_workers_of_one_group_may_have_different_patterns(world: World, bench: Bench) -> None:
    """As while a deployment that changes the pattern is under way."""
    before, after = app_of(world), app_of(world)
    handle(before, "any", rf"kafka:/{world.topic}\.(a|b)/")
    handle(after, "any", rf"kafka:/{world.topic}\.(b|c|later)/")
    for topic in "abc":
        await world.create(f"{world.topic}.{topic}", partitions=2)
    kafka = world.server.address
    async with bench.running(before, kafka=kafka) as old, bench.running(after, kafka=kafka) as new:
        for topic in "abc":
            await send(world, Item(f"1{topic}"), Item(f"2{topic}"), topic=f"{world.topic}.{topic}")
        await until(lambda: len(bench.effects()) == 6)
        await world.create(f"{world.topic}.later")
        await send(world, Item("3"), topic=f"{world.topic}.later")
        await new.until(lambda: len(bench.effects()) == 7)
        await old.leave()
        await send(world, Item("3b"), topic=f"{world.topic}.b")
        await new.until(lambda: len(bench.effects()) == 8)
    expected = [f"any {number}{topic} of {topic}" for topic in "abc" for number in (1, 2)]
    assert sorted(bench.effects()) == sorted([*expected, "any 3 of later", "any 3b of b"])


async def test_a_pattern_may_match_no_topic_yet(world: World, bench: Bench, logged: LogCapture) -> None:
    app = app_of(world)
    handle(app, "any", rf"kafka:/{world.topic}\..+/")
    await bench.until_empty(app, kafka=world.server.address)
    assert [entry["source"] for entry in entries(logged, "kafka pattern matches no topic")] == [
        rf"kafka:/{world.topic}\..+/"
    ]


async def test_a_topic_that_two_handlers_match_is_read_by_neither_and_the_others_are(
    world: World, bench: Bench, logged: LogCapture
) -> None:
    app = app_of(world)
    handle(app, "one", rf"kafka:/{world.topic}\.(a|b)/")
    handle(app, "two", rf"kafka:/{world.topic}\.(b|c)/")
    for topic in "abc":
        await world.create(f"{world.topic}.{topic}")
        await send(world, Item("1"), topic=f"{world.topic}.{topic}")
    async with bench.running(app, kafka=world.server.address) as running:
        await running.until_count(applied=2)
        await until(lambda: bool(entries(logged, CONTESTED)))
    assert sorted(bench.effects()) == ["one 1 of a", "two 1 of c"]
    assert [entry["topic"] for entry in entries(logged, CONTESTED)] == [f"{world.topic}.b"]
    settings = bench.settings(kafka=world.server.address)
    found = [finding async for finding in findings(app, settings) if finding.level == "error"]
    assert [(finding.subject, "neither" in finding.text) for finding in found] == [(f"kafka:{world.topic}.b", True)]


async def test_check_looks_at_each_topic_of_a_pattern(world: World, bench: Bench) -> None:
    app = app_of(world)
    handle(app, "any", rf"kafka:/{world.topic}\..+/")
    settings = bench.settings(kafka=world.server.address)

    async def said() -> list[str]:
        return [f"{each.level} {each.subject}: {each.text}" async for each in findings(app, settings)]

    assert any("warning" in line and "matches no topic yet" in line for line in await said())
    await world.create(f"{world.topic}.eu", partitions=3)
    await world.create(f"{world.topic}.us")
    lines = await said()
    assert any(line.startswith(f"ok kafka:{world.topic}.eu: topic") and "3 partition" in line for line in lines)
    assert any(line.startswith(f"ok kafka:{world.topic}.us: topic") for line in lines)
