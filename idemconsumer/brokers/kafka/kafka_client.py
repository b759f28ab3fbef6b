"""Calls to aiokafka other than fetching and committing; those to a consumer are each bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.group import LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest

from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.user_code.cancellation import retrieve

LOSS: Final = (TimeoutError, KafkaError, OSError)  # what the client raises when the servers cannot be used
ALLOW_READ: Final = "allow this user to READ and DESCRIBE the topic (kafka-acls.sh)"
PROBE_TIMEOUT = 5.0
STOP_TIMEOUT = 5.0


@asynccontextmanager
async def admin_client(connection: Mapping[str, Any]) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client, closed also if it could not start. Raises one of LOSS."""
    admin = AIOKafkaAdminClient(**connection)
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()


async def end_offsets(consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Where each partition ends for a reader of committed transactions. Raises TimeoutError or KafkaError."""
    async with asyncio.timeout(PROBE_TIMEOUT):
        return dict(await consumer.end_offsets(list(partitions)))


async def cluster_of(client: AIOKafkaClient) -> str:
    """The cluster's id; empty where Kafka does not report it. Raises TimeoutError or KafkaError."""
    async with asyncio.timeout(PROBE_TIMEOUT):
        answer = await client.send(client.get_random_node(), MetadataRequest([]))
    return getattr(answer, "cluster_id", None) or ""


async def position_of(consumer: AIOKafkaConsumer, at: TopicPartition) -> int | None:
    """The next offset to be fetched; None while the client does not know it yet. Does not wait."""
    try:
        async with asyncio.timeout(0):
            return int(await consumer.position(at))
    except (TimeoutError, KafkaError):
        return None


async def stop(consumer: AIOKafkaConsumer) -> None:
    """Leave the group and close the connections, within `STOP_TIMEOUT` and a few seconds (K8).

    `stop()` waits for a join under way, and a join waits for the slowest member. If the join were cut off, this member
    would still be assigned partitions, which go unread until its session times out; and on the connection that waits it
    cannot send that it leaves. So it leaves on another connection, which makes the broker answer the join. With the
    broker down, `stop()` may wait for ever, or raise the CancelledError of a task of its own. Then the client's parts
    are closed one by one, since a second `stop()` does nothing.
    """
    stopping = asyncio.create_task(consumer.stop())
    await asyncio.wait({stopping}, timeout=0.5)
    if not stopping.done():
        await _done(_leave(consumer), 1.0)
    if await _done(stopping, STOP_TIMEOUT):
        return
    log.debug("kafka stop timed out")
    for part in (consumer._coordinator, consumer._fetcher, consumer._client):
        if part is not None:
            await _done(part.close(), 1.0)


async def _leave(consumer: AIOKafkaConsumer) -> None:
    coordinator = consumer._coordinator
    if coordinator and coordinator.member_id and consumer._group_instance_id is None:
        goodbye = LeaveGroupRequest(coordinator.group_id, coordinator.member_id)
        await consumer._client.send(coordinator.coordinator_id, goodbye)


async def _done(closing: Coroutine[Any, Any, None] | asyncio.Task[None], seconds: float) -> bool:
    """Whether it ended in time. It runs in its own task, so that only a cancellation of *this* task counts as one."""
    task = asyncio.ensure_future(closing)
    task.add_done_callback(retrieve)
    await asyncio.wait({task}, timeout=seconds)
    if task.cancel():
        await asyncio.wait({task}, timeout=1.0)
    return task.done() and not task.cancelled() and task.exception() is None


def create_command(servers: str, topic: str) -> str:
    return f"kafka-topics.sh --bootstrap-server {servers} --create --topic {topic}"


def name_of(at: TopicPartition) -> str:
    return f"{at.topic}-{at.partition}"


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_text(error)}".rstrip(": ")
