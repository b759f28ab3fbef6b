"""A broker as the end-to-end parts see it: somewhere to put a run's messages before its consumer starts."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aio_pika
import psycopg
from aiobotocore.session import get_session
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks._stage import PARTITIONS, Stage


class Filling(Protocol):
    """What all of them can do."""

    async def fill(self, dsn: str, count: int, name: str = "payments") -> dict[str, str]:
        """Put `count` messages under this name and return the environment of a consumer that finds them."""
        ...

    async def settled(self) -> bool:
        """Whether it knows of all that was applied; where that is known as soon as it is applied, or nearly, always."""
        return True


def bodies(count: int) -> list[bytes]:
    return [json.dumps({"id": f"p{number}", "amount": number % 1_000}).encode() for number in range(count)]


def slices(items: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    return (items[start : start + size] for start in range(0, len(items), size))


class KafkaTopic(Filling):
    """Filled once; each consumer reads it from its beginning in a group of its own."""

    def __init__(self, stage: Stage) -> None:
        self._address = stage.kafka
        self._topics: set[str] = set()

    async def fill(self, dsn: str, count: int, name: str = "payments") -> dict[str, str]:
        topic = f"{name}-{count}"
        if topic not in self._topics:
            await self._produce(topic, count)
            self._topics.add(topic)
        return {
            "BENCH_SOURCE": f"kafka:{topic}",
            "BENCH_ADDRESS": self._address,
            "BENCH_GROUP": secrets.token_hex(4),
            "IDEMCONSUMER_KAFKA": self._address,
        }

    async def _produce(self, topic: str, count: int) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self._address)
        await admin.start()
        await admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
        await admin.close()
        producer = AIOKafkaProducer(bootstrap_servers=self._address)
        await producer.start()
        for number, body in enumerate(bodies(count)):
            await producer.send(topic, body, key=b"p%d" % number, partition=number % PARTITIONS)
        await producer.stop()  # flushes


class RabbitQueue(Filling):
    """A durable classic queue, persistent messages, filled anew for each consumer."""

    def __init__(self, stage: Stage) -> None:
        self._address = stage.rabbitmq

    async def fill(self, dsn: str, count: int, name: str = "payments") -> dict[str, str]:
        name = f"{name}-{secrets.token_hex(4)}"
        async with await aio_pika.connect(self._address) as connection:
            channel = await connection.channel(publisher_confirms=True)
            await channel.declare_queue(name, durable=True)
            for part in slices(bodies(count), 500):
                messages = [aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT) for body in part]
                await asyncio.gather(*(channel.default_exchange.publish(message, name) for message in messages))
        return {
            "BENCH_SOURCE": f"rabbitmq:{name}",
            "BENCH_ADDRESS": self._address,
            "BENCH_GROUP": "bench",
            "IDEMCONSUMER_RABBITMQ": self._address,
        }


class PostgresQueue(Filling):
    """Ours is `postgres:payments`; by hand it is the table `job`."""

    async def fill(self, dsn: str, count: int, name: str = "payments") -> dict[str, str]:
        body = """convert_to('{"id": "p' || n || '", "amount": ' || n % 1000 || '}', 'UTF8')"""
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute(
                f"insert into idemconsumer.queue (name, body) select '{name}', {body}"
                f" from generate_series(1, {count}) n"
            )
            await connection.execute(f"insert into job (body) select {body} from generate_series(1, {count}) n")
            await connection.execute("vacuum analyze idemconsumer.queue, job")
        return {"BENCH_SOURCE": f"postgres:{name}", "BENCH_GROUP": "bench", "IDEMCONSUMER_DSN": dsn}


class PgQueuerJobs(Filling):
    """PgQueuer's own tables, in the database of the run."""

    async def fill(self, dsn: str, count: int, name: str = "payments") -> dict[str, str]:
        from pgqueuer.db import PsycopgDriver  # the tests have no rivals
        from pgqueuer.queries import Queries

        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            queries = Queries(PsycopgDriver(connection))
            await queries.install()
            for part in slices(bodies(count), 1_000):
                await queries.enqueue([name] * len(part), list(part), [0] * len(part))
            await connection.execute("vacuum analyze")
        return {}


class ProcrastinateJobs(Filling):
    """procrastinate's own tables, in the database of the run."""

    async def fill(self, dsn: str, count: int, name: str = "payments") -> dict[str, str]:
        from procrastinate import App, PsycopgConnector

        app = App(connector=PsycopgConnector(conninfo=dsn))
        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            task = app.configure_task("pay", queue=name)
            for part in slices(bodies(count), 1_000):
                await task.batch_defer_async(*map(json.loads, part))
        return {}


class SqsQueue(Filling):
    """A standard queue, filled anew for each consumer. Deletions are requests of their own, and ours go on in the
    background, so a run ends with the queue empty."""

    def __init__(self, address: str, client: Any) -> None:
        self._address = address
        self._client = client
        self._url = ""

    @classmethod
    @asynccontextmanager
    async def open(cls, stage: Stage) -> AsyncIterator[SqsQueue]:
        async with get_session().create_client("sqs", endpoint_url=stage.sqs) as client:
            yield cls(stage.sqs, client)

    async def settled(self) -> bool:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = await self._client.get_queue_attributes(QueueUrl=self._url, AttributeNames=names)
        return not any(int(answer["Attributes"][name]) for name in names)

    async def fill(self, dsn: str, count: int, name: str = "payments") -> dict[str, str]:
        name = f"{name}-{secrets.token_hex(4)}"
        self._url = (await self._client.create_queue(QueueName=name))["QueueUrl"]
        for part in slices(bodies(count), 10):
            entries = [{"Id": str(n), "MessageBody": body.decode()} for n, body in enumerate(part)]
            await self._client.send_message_batch(QueueUrl=self._url, Entries=entries)
        return {
            "BENCH_SOURCE": f"sqs:{name}",
            "BENCH_ADDRESS": self._address,
            "BENCH_GROUP": "bench",
            "IDEMCONSUMER_SQS": self._address,
        }


@asynccontextmanager
async def opened(stage: Stage, part: str) -> AsyncIterator[Filling]:
    """The one that this part is about."""
    match part:
        case "sqs":
            async with SqsQueue.open(stage) as queue:
                yield queue
        case "postgres_queue":
            yield PostgresQueue()
        case _:
            yield {"kafka": KafkaTopic, "rabbitmq": RabbitQueue}[part](stage)
