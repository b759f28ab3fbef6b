"""K13: what the client cannot read stops its partition alone, and a person decides about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from idemconsumer import App, Tx
from idemconsumer.admin.dead_letters import Admin
from idemconsumer.admin.stops import Stops
from idemconsumer.errors import ConfigurationError
from tests.support.kafka import World, killing, world_of
from tests.support.kafka_log import codec, edit_batch, replaced
from tests.support.logs import LogCapture, entries
from tests.support.servers.kafka import Kafka
from tests.support.servers.made import PrivateKafka
from tests.support.tuning import tuned
from tests.support.waiting import until
from tests.support.workers import SCHEMA, Bench, Item, body, note, prepare

UNREADABLE = "kafka record unreadable, partition blocked"


@pytest.fixture(scope="module")
def own(private_kafka: PrivateKafka) -> Iterator[Kafka]:
    with killing(private_kafka()) as server:
        yield server


@pytest.fixture
async def world(own: Kafka) -> AsyncIterator[World]:
    async with world_of(own) as world:
        await world.create(partitions=2)
        yield world


@pytest.fixture
def bench(database: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    tuned(monkeypatch, unreadable_look_pause=0.1)
    prepare(database)
    return Bench(database)


def app_of(world: World) -> App:
    app = App(world.topic.replace(".", "_"))

    @app.idempotent_handler(f"kafka:{world.topic}", key="id", consumer_group=world.group)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    return app


def log_of(own: Kafka, world: World) -> Path:
    return own._processes.folder / "data" / f"{world.topic}-0" / ("0" * 20 + ".log")


async def batch(world: World, *numbers: int, partition: int = 0, header: str = "name") -> None:
    """These in one batch."""
    async with AIOKafkaProducer(bootstrap_servers=world.server.address) as producer:
        builder = producer.create_batch()
        for number in numbers:
            value, key = body(Item(str(number))), b"key-%d" % number
            builder.append(key=key, value=value, timestamp=None, headers=[(f"{header}{number}", b"x")])
        builder.close()
        await (await producer.send_batch(builder, world.topic, partition=partition))


FAULTS: dict[str, tuple[Callable[[bytearray], None], bool, int, int]] = {
    # what is changed in the batch of offsets 2 to 5, whether its CRC fits, and what then cannot be read
    "crc": (replaced(b"name3", b"nome3"), False, 2, 6),
    "codec": (codec(4), True, 2, 6),
    "unknown codec": (codec(7), True, 2, 6),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_it_stops_its_partition_alone_until_a_person_skips_it(
    world: World, own: Kafka, bench: Bench, logged: LogCapture, fault: str
) -> None:
    change, checked, first, following = FAULTS[fault]
    await batch(world, 0, 1)
    await batch(world, 2, 3, 4, 5)
    await batch(world, 6, 7)
    edit_batch(log_of(own, world), 1, change, checked=checked)
    before, lost = {str(number) for number in range(first)}, {str(number) for number in range(first, following)}
    stops = Stops(bench.dsn, SCHEMA)
    async with bench.running(app_of(world), kafka=own.address) as running:
        await running.until(lambda: set(bench.effects()) == before)
        await running.until(lambda: bool(entries(logged, UNREADABLE)))
        (said,) = entries(logged, UNREADABLE)
        place = f"kafka:{world.topic}/0@{first}"
        assert (said["topic"], said["partition"], said["offset"]) == (world.topic, 0, first)
        assert (said["records"], said["instead"]) == (following - first, f"idemconsumer skip {place}")
        await batch(world, 100, 101, partition=1)
        await running.until(lambda: {"100", "101"} <= set(bench.effects()))
        await until(lambda: committed(world, first))
        assert [(stop.place, stop.group) for stop in await stops.stopped()] == [(place, world.group)]
        with pytest.raises(ConfigurationError, match=f"blocked: {place}"):
            await stops.skip(f"kafka:{world.topic}/0@999", by="ann")
        await stops.skip(place, by="ann")
        everything = {str(number) for number in (*range(8), 100, 101)}
        await running.until(lambda: set(bench.effects()) == everything - lost)
        await until(lambda: committed(world, 8))
        assert len(entries(logged, UNREADABLE)) == 1
    assert len(bench.effects()) == len(everything - lost)
    admin = Admin(bench.dsn, SCHEMA)
    (line,) = await admin.dead_letters()
    assert (line.reason, line.position) == ("unreadable", f"{world.topic}-0-{first}")
    letter = await admin.dead_letter(line.id)
    assert letter is not None
    assert b"key-2" in letter.body
    assert b"key-5" in letter.body
    assert await stops.stopped() == []


async def committed(world: World, offset: int) -> bool:
    return await world.committed() == offset


async def test_it_is_said_again_and_goes_on_when_it_can_be_read_after_all(
    world: World, own: Kafka, bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, unreadable_log_pause=0.1)
    await batch(world, 0, 1)
    edit_batch(log_of(own, world), 0, replaced(b"name0", b"nome0"), checked=False)
    async with bench.running(app_of(world), kafka=own.address) as running:
        await running.until(lambda: len(entries(logged, UNREADABLE)) > 2)
        edit_batch(log_of(own, world), 0, replaced(b"nome0", b"name0"), checked=False)
        await running.until(lambda: set(bench.effects()) == {"0", "1"})
        stops = Stops(bench.dsn, SCHEMA)

        async def left() -> bool:
            return not await stops.stopped()

        await until(left)


async def test_a_headers_name_that_is_no_text_is_a_dead_letter_at_once_and_on_it_goes(
    world: World, own: Kafka, bench: Bench, logged: LogCapture
) -> None:
    await batch(world, 0, 1)
    await batch(world, 2, 3, 4, 5)
    await batch(world, 6, 7)
    edit_batch(log_of(own, world), 1, replaced(b"name3", b"na\xff\xfe3"))
    async with bench.running(app_of(world), kafka=own.address) as running:
        await running.until(lambda: set(bench.effects()) == {"0", "1", "2", "4", "5", "6", "7"})
        await until(lambda: committed(world, 8))
    admin = Admin(bench.dsn, SCHEMA)
    (line,) = await admin.dead_letters()
    assert (line.reason, line.position) == ("unreadable", f"{world.topic}-0-3")
    letter = await admin.dead_letter(line.id)
    assert letter is not None
    assert letter.body == body(Item("3"))
    assert list(letter.headers) == [("na\\xff\\xfe3", "x")]
    assert not entries(logged, UNREADABLE)


async def test_a_restart_within_a_batch_that_was_skipped_in_part_reads_the_rest(
    world: World, own: Kafka, bench: Bench
) -> None:
    await batch(world, 0, 1, 2, 3)
    edit_batch(log_of(own, world), 0, replaced(b"name1", b"na\xff\xfe1"))
    await world.set_offset(2)
    async with bench.running(app_of(world), kafka=own.address) as running:
        await running.until(lambda: sorted(bench.effects()) == ["2", "3"])
        await until(lambda: committed(world, 4))
    assert await Admin(bench.dsn, SCHEMA).dead_letters() == []


async def test_until_empty_does_not_leave_it_behind(world: World, own: Kafka, bench: Bench) -> None:
    await batch(world, 0)
    edit_batch(log_of(own, world), 0, replaced(b"name0", b"nome0"), checked=False)
    stops = Stops(bench.dsn, SCHEMA)
    leaving = asyncio.create_task(bench.until_empty(app_of(world), kafka=own.address))

    async def stands() -> bool:
        assert not leaving.done()
        return bool(await stops.stopped())

    await until(stands)
    await stops.skip(f"kafka:{world.topic}/0@0", by="ann")
    await leaving
    assert len(await Admin(bench.dsn, SCHEMA).dead_letters()) == 1
