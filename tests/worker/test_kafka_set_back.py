"""K12 with real servers: a database that lost its tail gets it again from Kafka, and no effect twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from idemconsumer import App, Tx
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.ports.broker import Outgoing
from tests.support.kafka import World, world_of
from tests.support.servers.made import PrivatePostgres, Server
from tests.support.servers.streaming import back_up, promote, standby_of
from tests.support.waiting import eventually, until
from tests.support.workers import Bench, Item, Running, body, note, prepare

pytestmark = pytest.mark.kill

PARTITIONS = 3


@pytest.fixture
async def world(kafka: Server) -> AsyncIterator[World]:
    async with world_of(kafka) as world:
        await world.create(partitions=PARTITIONS)
        yield world


@pytest.fixture
def primary(private_postgres: PrivatePostgres, postgres15_binaries: Path) -> EmbeddedPostgres:
    server = private_postgres(binaries=postgres15_binaries)
    prepare(server.dsn)
    return server


def app_of(world: World) -> App:
    app = App(world.topic.replace(".", "_"))

    @app.idempotent_handler(f"kafka:{world.topic}", key="id", consumer_group=world.group, group_size=8)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        await asyncio.sleep(0.001)

    return app


async def publish(world: World, numbers: range) -> None:
    await world.broker.publish(world.topic, [Outgoing(body(Item(str(number))), key=str(number)) for number in numbers])


async def committed_total(world: World) -> int:
    return sum([await world.committed(partition) or 0 for partition in range(PARTITIONS)])


async def all_committed(running: Running, world: World, total: int) -> None:
    """Until Kafka takes all of them for read."""

    async def done() -> bool:
        assert not running.task.done()
        return await committed_total(world) == total

    await until(done)


async def test_what_a_promoted_standby_lacks_is_read_again(
    world: World, primary: EmbeddedPostgres, folder: Path
) -> None:
    with standby_of(primary, folder) as standby:
        dsn = make_conninfo(
            primary.dsn, host="127.0.0.1,127.0.0.1", port=f"{primary.port},{standby.port}",
            target_session_attrs="read-write",
        )  # fmt: skip
        bench, survivor = Bench(dsn), Bench(standby.dsn)
        async with bench.running(app_of(world), kafka=world.server.address) as running:
            await publish(world, range(200))
            await all_committed(running, world, 200)
            await until(lambda: len(survivor.effects()) == 200)
            cut_off(standby)
            await publish(world, range(200, 500))
            await all_committed(running, world, 500)
            await publish(world, range(500, 700))
            await running.until(lambda: running.worker.counts.get("applied", 0) > 520)
            await asyncio.to_thread(primary.kill)
            assert len(survivor.effects()) == 200, "Kafka is ahead of what is left"
            await asyncio.to_thread(promote, standby)
            await publish(world, range(700, 800))
            await running.until(lambda: len(set(survivor.effects())) == 800)
            await all_committed(running, world, 800)
        assert Counter(survivor.effects()) == Counter(str(number) for number in range(800))


def cut_off(standby: EmbeddedPostgres) -> None:
    """It gets nothing more from its primary."""
    with psycopg.connect(standby.dsn, autocommit=True) as admin:
        admin.execute("alter system set primary_conninfo = ''")
        admin.execute("select pg_reload_conf()")
        eventually(lambda: admin.execute("select 1 from pg_stat_wal_receiver").fetchone() is None)


async def test_what_a_restored_backup_lacks_is_read_again(
    world: World, primary: EmbeddedPostgres, postgres15_binaries: Path, folder: Path
) -> None:
    app, kafka = app_of(world), world.server.address
    async with Bench(primary.dsn).running(app, kafka=kafka) as running:
        await publish(world, range(400))
        await running.until(lambda: running.worker.counts.get("applied", 0) > 20)
        backup = asyncio.create_task(asyncio.to_thread(back_up, primary, folder))
        await publish(world, range(400, 800))
        await backup
        await publish(world, range(800, 1000))
        await all_committed(running, world, 1000)
    primary.stop()
    with EmbeddedPostgres(folder, binaries=postgres15_binaries) as restored:
        bench = Bench(restored.dsn)
        assert 20 < len(bench.effects()) < 1000
        await bench.until_empty(app_of(world), kafka=kafka)
        assert Counter(bench.effects()) == Counter(str(number) for number in range(1000))
