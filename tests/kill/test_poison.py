"""A message that kills its worker ends as a dead letter, and takes nobody along: on every broker, wherever it kills."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import aio_pika
import psycopg
import pytest
from aiobotocore.session import get_session
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer.brokers.sqs.sqs_broker import SqsBroker
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from tests.support import ROOT, forked
from tests.support.away import away
from tests.support.kafka import create_topic
from tests.support.servers.made import PrivateElasticMQ, PrivateKafka, PrivateRabbitMQ
from tests.support.waiting import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]

INNOCENTS = 20
PLACES = ("handler", "key", "tenant", "validator")
NAME = "orders"
PATIENCE = 240.0  # seconds


class Run(NamedTuple):
    """Where the killers kill, how many workers there are, and whether killers and innocents take their time."""

    places: Sequence[str]
    workers: int
    late: bool = False
    slow: bool = False

    @property
    def innocents(self) -> list[str]:
        return [f"{'slow' if self.slow else 'calm'}-{number}" for number in range(INNOCENTS)]

    @property
    def killers(self) -> list[str]:
        return [f"kill-{place}{'-late' if self.late else ''}" for place in self.places]

    @property
    def orders(self) -> list[bytes]:
        """The innocents, with the killers spread among them."""
        names, killers = self.innocents, self.killers
        for at, killer in enumerate(killers, start=1):
            names.insert(at * len(names) // (len(killers) + 1), killer)
        return [json.dumps({"id": name}).encode() for name in names]


LONG = [Run(PLACES, workers, late, slow) for workers in (1, 2) for late in (False, True) for slow in (False, True)]
runs = pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(["handler", "key"], workers=2, slow=True), id="short"),
        *(pytest.param(run, marks=pytest.mark.long, id="-".join(map(str, run[1:]))) for run in LONG),
    ],
)


class Workers:
    """Worker processes, each started anew as soon as it has died."""

    def __init__(self, dsn: str, environment: dict[str, str]) -> None:
        self._environment = {**os.environ, "IDEMCONSUMER_DSN": dsn, **environment}
        self._running: list[subprocess.Popen[bytes]] = []
        self.deaths = 0

    def _start(self) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-m", "tests.kill.poison"]
        return forked.Popen(command, cwd=ROOT, env=self._environment, stdout=quiet, stderr=quiet)

    async def keep(self, count: int) -> None:
        self._running = [self._start() for _ in range(count)]
        while True:
            await asyncio.sleep(0.02)
            for at, process in enumerate(self._running):
                if process.poll() is not None:
                    self.deaths += 1
                    self._running[at] = self._start()

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


async def nobody_is_taken_along(dsn: str, run: Run, **environment: str) -> None:
    await asyncio.to_thread(migrate, dsn, "idemconsumer")
    async with away(dsn) as far, await psycopg.AsyncConnection.connect(dsn, autocommit=True) as db:
        await db.execute("create table witness (id text not null)")
        workers = Workers(far, environment)
        keeping = asyncio.create_task(workers.keep(run.workers))

        async def ended() -> bool:
            counts = await db.execute(
                "select count(*) from witness union all select count(*) from idemconsumer.dead_letter"
            )
            return sum(int(count) for (count,) in await counts.fetchall()) >= len(run.orders)

        try:
            await until(ended, "every order has ended", PATIENCE)
        finally:
            keeping.cancel()
            workers.stop()
        effects = await (await db.execute("select id from witness")).fetchall()
        letters = await (
            await db.execute("select reason, convert_from(body, 'UTF8')::json ->> 'id' from idemconsumer.dead_letter")
        ).fetchall()
    assert sorted(name for (name,) in effects) == sorted(run.innocents)
    assert sorted(letters) == sorted(("killed_worker", name) for name in run.killers)
    # Not known, marked, counted: three deaths. Two workers may each learn the first two by themselves.
    assert workers.deaths <= 3 * len(run.killers) * run.workers


@runs
async def test_the_postgres_queue(database: str, run: Run) -> None:
    await asyncio.to_thread(migrate, database, "idemconsumer")
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as db:
        for body in run.orders:
            await db.execute("select idemconsumer.publish_bytes(%s, %s)", (NAME, body))
    await nobody_is_taken_along(database, run, POISON_SOURCE=f"postgres:{NAME}")


async def test_a_task_or_callback_that_ends_the_loop_kills_its_worker(database: str) -> None:
    await asyncio.to_thread(migrate, database, "idemconsumer")
    run = Run(["task", "callback"], workers=1)
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as db:
        for body in run.orders:
            await db.execute("select idemconsumer.publish_bytes(%s, %s)", (NAME, body))
    await nobody_is_taken_along(database, run, POISON_SOURCE=f"postgres:{NAME}")


SAGAS = [["handler"], ["body"], ["step"], ["key"]]
saga_runs = pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(["handler", "step"], workers=2, slow=True), id="short"),
        *(
            pytest.param(
                Run(places, workers, late, slow=True),
                marks=pytest.mark.long,
                id=f"{places[0]}-{workers}{'-late' if late else ''}",
            )
            for places in SAGAS
            for workers in (1, 2)
            for late in (False, True)
        ),
    ],
)


@saga_runs
async def test_sagas_and_messages_side_by_side(database: str, run: Run) -> None:
    """Half of the innocents are sagas. A key function kills for one of them."""
    await asyncio.to_thread(migrate, database, "idemconsumer")
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as db:
        for number, body in enumerate(run.orders):
            saga = number % 2 if b"kill" not in body else b"handler" not in body
            await db.execute("select idemconsumer.publish_bytes(%s, %s)", ("sagas" if saga else NAME, body))
    where = {"POISON_SOURCE": f"postgres:{NAME}", "POISON_SAGAS": "postgres:sagas"}
    await nobody_is_taken_along(database, run, **where)


@pytest.mark.long
@runs
async def test_kafka(database: str, private_kafka: PrivateKafka, run: Run) -> None:
    kafka = private_kafka(properties={"group.min.session.timeout.ms": "1000"})
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, NAME, partitions=2)
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, acks="all") as producer:
        for number, body in enumerate(run.orders):
            await producer.send_and_wait(NAME, body, partition=number % 2)
    where = {"POISON_SOURCE": f"kafka:{NAME}", "IDEMCONSUMER_KAFKA": kafka.address}
    await nobody_is_taken_along(database, run, IDEMCONSUMER_KAFKA_SESSION_TIMEOUT="2", **where)


@pytest.mark.long
@runs
async def test_rabbitmq(database: str, private_rabbitmq: PrivateRabbitMQ, run: Run) -> None:
    rabbitmq = private_rabbitmq()
    async with await aio_pika.connect(rabbitmq.address) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue(NAME, durable=True, arguments={"x-queue-type": "quorum"})
        for body in run.orders:
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, NAME)
    where = {"POISON_SOURCE": f"rabbitmq:{NAME}", "IDEMCONSUMER_RABBITMQ": rabbitmq.address}
    await nobody_is_taken_along(database, run, **where)


@pytest.mark.long
@runs
async def test_sqs(database: str, private_elasticmq: PrivateElasticMQ, run: Run) -> None:
    sqs = private_elasticmq()
    async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
        await client.create_queue(QueueName=NAME, Attributes={"VisibilityTimeout": "3"})
    broker = SqsBroker(Settings(sqs=sqs.address))
    await broker.publish(NAME, [Outgoing(body) for body in run.orders])
    await broker.close()
    where = {"POISON_SOURCE": f"sqs:{NAME}", "IDEMCONSUMER_SQS": sqs.address}
    await nobody_is_taken_along(database, run, **where)
