"""A batch that is small for the broker and large for a worker is put aside whole, and its partition goes on (K14)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer

from idemconsumer import App, Tx
from idemconsumer.admin.dead_letters import Admin
from idemconsumer.brokers.kafka.decompression import LEAST_LIMIT
from tests.support.kafka import World, world_of
from tests.support.servers.made import Server
from tests.support.tuning import tuned
from tests.support.workers import SCHEMA, Bench, Item, body, note


@pytest.fixture
async def world(kafka: Server) -> AsyncIterator[World]:
    async with world_of(kafka) as world:
        await world.create(configs={"max.message.bytes": "8000000"})
        yield world


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_a_batch_above_the_limit_is_a_dead_letter_with_its_offsets(
    bench: Bench, world: World, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, unreadable_look_pause=0.1)
    app = App(world.topic.replace(".", "_"))

    @app.idempotent_handler(f"kafka:{world.topic}", key="id", consumer_group=world.group)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    large = 2 * LEAST_LIMIT
    async with AIOKafkaProducer(
        bootstrap_servers=world.server.address, compression_type=codec, max_request_size=large, max_batch_size=large
    ) as producer:
        await producer.send_and_wait(world.topic, body(Item("before")))
        await producer.send_and_wait(world.topic, bytes(LEAST_LIMIT))
        await producer.send_and_wait(world.topic, body(Item("behind")))
    async with bench.running(app, kafka=world.server.address) as worker:
        await worker.until_count(applied=2, dead=1)
    assert sorted(bench.effects()) == ["before", "behind"]
    admin = Admin(bench.dsn, SCHEMA)
    letter = await admin.dead_letter((await admin.dead_letters())[0].id)
    assert letter is not None
    assert (letter.reason, letter.position) == ("oversized", f"{world.topic}-0-1")
    assert f"more than 33,554,432 bytes when decompressed ({codec})" in letter.error
    assert letter.error.endswith("offsets 1 to 1")
    assert letter.body_size < 8_000_000
