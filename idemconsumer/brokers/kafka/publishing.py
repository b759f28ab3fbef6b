"""What is published to Kafka: one producer for all of it, and the topics that it has seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, TopicAuthorizationFailedError

from idemconsumer.brokers.kafka.checking import missing_text, partitions_of
from idemconsumer.brokers.kafka.diagnosis import answered, unavailable
from idemconsumer.brokers.kafka.producing import Producing
from idemconsumer.brokers.sendable import largest_record
from idemconsumer.errors import BadMessage, BrokerUnavailable
from idemconsumer.message.replies import CONTENT_TYPE, KAFKA_CORRELATION, MESSAGE_ID, OUTCOME
from idemconsumer.message.sources import BadSource, split_source
from idemconsumer.ports.broker import Outgoing, Reply, Unsent
from idemconsumer.settings import Settings

PUBLISH_TIMEOUT = 30.0
_SPREAD = 1.0  # seconds after which each broker of a cluster knows of a topic that was just created


class Publisher:
    """`admin` opens a client for questions about topics."""

    def __init__(
        self,
        connection: dict[str, Any],
        settings: Settings,
        admin: Callable[[], AbstractAsyncContextManager[AIOKafkaAdminClient]],
    ) -> None:
        self._connection = connection
        self._servers = settings.kafka or ""
        self._admin = admin
        self._producing = Producing(connection, largest_record(settings.max_message_bytes))
        self._starting = asyncio.Lock()
        self._counts: dict[str, int] = {}  # of the partitions of topics that exist

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """See `KafkaBroker.publish`."""
        try:
            async with answered(self._connection, PUBLISH_TIMEOUT), self._producing.using() as producer:
                # Sending to a missing topic waits for the whole request time-out, and gives no reason.
                if not await self.partitions(name):
                    raise BrokerUnavailable(missing_text(self._servers, [name]))
                sent = [
                    await producer.send(
                        name,
                        value=message.body,
                        key=_key(message),
                        headers=[(header, _bytes(value)) for header, value in message.headers.items()],
                    )
                    for message in messages
                ]
                for answer in await asyncio.gather(*sent, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        raise answer
        except MessageSizeTooLargeError as error:
            raise _too_large(name) from error
        except (TimeoutError, KafkaError, OSError) as error:
            self._counts.pop(name, None)  # it may be gone
            undone = f"did not confirm {len(messages)} message(s) to topic {name!r}"
            raise await unavailable(self._servers, self._connection, error, undone) from error

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        """See `ports.Replying`."""
        return await asyncio.gather(*map(self._reply, replies))

    async def _reply(self, reply: Reply) -> Unsent | None:
        to, partition = reply.address.to, reply.address.partition
        try:
            split_source(f"kafka:{to}")  # for another name the client would wait
        except BadSource as error:
            return Unsent(error.problem, final=True)
        named = {OUTCOME: reply.outcome, MESSAGE_ID: reply.id, CONTENT_TYPE: reply.content_type}
        headers = [(name, value.encode()) for name, value in named.items()]
        if reply.address.correlation is not None:
            headers.append((KAFKA_CORRELATION, _bytes(reply.address.correlation)))
        try:
            async with answered(self._connection, PUBLISH_TIMEOUT), self._producing.using() as producer:
                if not await self._takes(to, partition):
                    lacks = f"no topic {to!r}" if partition is None else f"no partition {partition} of a topic {to!r}"
                    return Unsent(f"Kafka at {self._servers} has {lacks}", final=True, gone=True)
                await (await producer.send(to, value=reply.body, partition=partition, headers=headers))
        except AssertionError:  # the producer has not heard of a partition that was added
            await (await self._producing.get()).client.force_metadata_update()
            return Unsent(f"Kafka at {self._servers}: partition {partition} of topic {to!r} is new")
        except MessageSizeTooLargeError:
            return Unsent(_too_large(to).detail, final=True)
        except TopicAuthorizationFailedError:
            return Unsent(f"Kafka at {self._servers}: this user may not write to topic {to!r}", final=True)
        except (TimeoutError, KafkaError, OSError) as error:
            self._counts.pop(to, None)
            return Unsent(str(await unavailable(self._servers, self._connection, error, "did not confirm a reply")))
        return None

    async def _takes(self, topic: str, partition: int | None) -> bool:
        """Whether there is such a topic, and partition. A no is asked for twice."""
        if await self.partitions(topic) > (partition or 0):
            return True
        await asyncio.sleep(_SPREAD)
        self._counts.pop(topic, None)
        return await self.partitions(topic) > (partition or 0)

    async def partitions(self, topic: str) -> int:
        """How many it has; 0: there is no such topic."""
        async with self._starting:
            if topic not in self._counts:
                async with self._admin() as admin:
                    if not (count := await partitions_of(admin, topic)):
                        return 0
                self._counts[topic] = count
            return self._counts[topic]

    def forget(self, topic: str) -> None:
        """It may be gone."""
        self._counts.pop(topic, None)

    async def close(self) -> None:
        await self._producing.close()


def _key(message: Outgoing) -> bytes | None:
    if message.record_key is not None or message.key is None:
        return message.record_key
    return message.key.encode()


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _too_large(topic: str) -> BadMessage:
    return BadMessage("oversized", f"Kafka accepts no message of that size for topic {topic!r}")
