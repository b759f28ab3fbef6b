"""What examples/payments.py expects to find: a table, a topic and queues. For compose.yaml; may be run again."""

from __future__ import annotations

import asyncio
import os

import aio_pika
import psycopg
from aiobotocore.session import get_session
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError

NAME = "payments"


def table(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("create table if not exists account (name text primary key, balance bigint not null)")
        connection.execute("insert into account values ('ann', 0), ('bob', 0) on conflict do nothing")


async def topic(hosts: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=hosts)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(NAME, num_partitions=4, replication_factor=1)])
    except TopicAlreadyExistsError:
        pass
    finally:
        await admin.close()


async def quorum_queue(url: str) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(NAME, durable=True, arguments={"x-queue-type": "quorum"})


async def standard_queue(endpoint: str) -> None:
    async with get_session().create_client("sqs", endpoint_url=endpoint) as client:
        await client.create_queue(QueueName=NAME)


async def main() -> None:
    table(os.environ["IDEMCONSUMER_DSN"])
    await topic(os.environ["IDEMCONSUMER_KAFKA"])
    await quorum_queue(os.environ["IDEMCONSUMER_RABBITMQ"])
    await standard_queue(os.environ["IDEMCONSUMER_SQS"])


if __name__ == "__main__":
    asyncio.run(main())
