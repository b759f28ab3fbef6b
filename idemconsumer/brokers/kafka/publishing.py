"""Publishing to Kafka: one producer for publishing and replying, one for the outbox, each started when first needed.

Batches of an idempotent producer are numbered per partition. A refused batch leaves a gap in the numbers, after which
Kafka accepts nothing more from this producer for that partition. So a producer is replaced once a batch was refused.
The known topics and their numbers of partitions are cached here too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, TopicAuthorizationFailedError

from idemconsumer.brokers.kafka.checking import missing_text, partitions_of
from idemconsumer.brokers.kafka.diagnosis import answered, unavailable
from idemconsumer.brokers.kafka.kafka_client import LOSS, admin_client
from idemconsumer.brokers.kafka.relaying import TopicRelay, as_bytes, headers_of, key_of
from idemconsumer.errors import BadMessage, BrokerUnavailable
from idemconsumer.message.reply_address import CONTENT_TYPE, KAFKA_CORRELATION, MESSAGE_ID, OUTCOME
from idemconsumer.message.sources import BadSource, split_source
from idemconsumer.opening import Opening
from idemconsumer.ports.broker import Outgoing, Reply, Unsent
from idemconsumer.user_code.cancellation import ends_this_task

PUBLISH_TIMEOUT = 30.0
CONFIRM: Final = 30.0  # seconds to confirm relayed messages
STOP_TIMEOUT: Final = 10.0
_BATCH: Final = 256 * 1024  # bytes; for a topic that allows less, batches are halved
_SPREAD = 1.0  # seconds until every broker of a cluster knows a topic that was just created


class Publisher:
    """Publishes, relays and replies. No record that it sends is larger than `most_bytes`."""

    def __init__(self, connection: dict[str, Any], most_bytes: int) -> None:
        self._connection = connection
        self._servers = connection["bootstrap_servers"]
        self._most_bytes = most_bytes
        self._producing = Producing(connection, most_bytes)
        self._relaying = Producing(connection, most_bytes, max_batch_size=min(_BATCH, most_bytes))
        self._asking = asyncio.Lock()
        self._counts: dict[str, int] = {}  # partitions per existing topic

    async def publish(self, topic: str, messages: Sequence[Outgoing]) -> None:
        """See `KafkaBroker.publish`."""
        try:
            async with answered(self._connection, PUBLISH_TIMEOUT), self._producing.using() as producer:
                await self._demand(topic)
                sent = [
                    await producer.send(topic, value=each.body, key=key_of(each), headers=headers_of(each))
                    for each in messages
                ]
                for answer in await asyncio.gather(*sent, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        raise answer
        except MessageSizeTooLargeError as error:
            raise _too_large(topic) from error
        except LOSS as error:
            raise await self._unconfirmed(topic, messages, error) from error

    async def relay(self, topic: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        """See `KafkaBroker.relay`."""
        relaying = TopicRelay(self._relaying.get, self._relaying.discard, topic, messages, self._most_bytes)
        try:
            async with answered(self._connection, CONFIRM):
                await self._demand(topic)
                await relaying.run()
        except BaseException as error:
            if not ends_this_task(error) and None in relaying.answers:
                why = await unavailable(self._connection, error, "did not confirm it")
                return relaying.given_up(str(why))
            if isinstance(error, LOSS):
                raise await self._unconfirmed(topic, messages, error) from error
            raise
        return relaying.answers

    async def _demand(self, topic: str) -> None:
        """Raise BrokerUnavailable if the topic is missing: sending to it would wait for the whole request timeout, and
        give no reason."""
        if not await self._partitions(topic):
            raise BrokerUnavailable(missing_text(self._servers, [topic]))

    async def _unconfirmed(self, topic: str, messages: Sequence[Outgoing], error: BaseException) -> BrokerUnavailable:
        self._counts.pop(topic, None)  # the topic may have been deleted
        undone = f"did not confirm {len(messages)} message(s) to topic {topic!r}"
        return await unavailable(self._connection, error, undone)

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        """See `ports.Replying`."""
        return await asyncio.gather(*map(self._reply, replies))

    async def _reply(self, reply: Reply) -> Unsent | None:
        to, partition = reply.address.to, reply.address.partition
        try:
            split_source(f"kafka:{to}")  # for an invalid name the client would wait
        except BadSource as error:
            return Unsent(error.problem, final=True)
        named = {OUTCOME: reply.outcome, MESSAGE_ID: reply.id, CONTENT_TYPE: reply.content_type}
        headers = [(name, value.encode()) for name, value in named.items()]
        if reply.address.correlation is not None:
            headers.append((KAFKA_CORRELATION, as_bytes(reply.address.correlation)))
        try:
            async with answered(self._connection, PUBLISH_TIMEOUT), self._producing.using() as producer:
                if not await self._takes(to, partition):
                    lacks = f"no topic {to!r}" if partition is None else f"no partition {partition} of a topic {to!r}"
                    return Unsent(f"Kafka at {self._servers} has {lacks}", final=True, gone=True)
                await (await producer.send(to, value=reply.body, partition=partition, headers=headers))
        except AssertionError:  # the producer does not know a partition that was added
            await (await self._producing.get()).client.force_metadata_update()
            return Unsent(f"Kafka at {self._servers}: partition {partition} of topic {to!r} is new")
        except MessageSizeTooLargeError:
            return Unsent(_too_large(to).detail, final=True)
        except TopicAuthorizationFailedError:
            return Unsent(f"Kafka at {self._servers}: this user may not write to topic {to!r}", final=True)
        except LOSS as error:
            self._counts.pop(to, None)
            return Unsent(str(await unavailable(self._connection, error, "did not confirm a reply")))
        return None

    async def _takes(self, topic: str, partition: int | None) -> bool:
        """Whether the topic and the partition exist. A negative answer is checked a second time."""
        if await self._partitions(topic) > (partition or 0):
            return True
        await asyncio.sleep(_SPREAD)
        self._counts.pop(topic, None)
        return await self._partitions(topic) > (partition or 0)

    async def _partitions(self, topic: str) -> int:
        """The number of its partitions; 0 if the topic does not exist."""
        async with self._asking:
            if topic not in self._counts:
                async with admin_client(self._connection) as admin:
                    if not (count := await partitions_of(admin, topic)):
                        return 0
                self._counts[topic] = count
            return self._counts[topic]

    async def close(self) -> None:
        await self._producing.close()
        await self._relaying.close()


class Producing:
    """An idempotent producer with acks=all, started when first needed. `options` are further options of the client."""

    def __init__(self, connection: dict[str, Any], most_bytes: int, **options: Any) -> None:
        self._options = {**connection, **options, "max_request_size": most_bytes}
        self._producer: AIOKafkaProducer | None = None
        self._starting = Opening(BrokerUnavailable)
        self._leaving = set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def using(self) -> AsyncIterator[AIOKafkaProducer]:
        """The producer for a block; it is replaced if the block raises an error that Kafka answered."""
        producer = await self.get()
        try:
            yield producer
        except KafkaError:
            self.discard(producer)
            raise

    async def get(self) -> AIOKafkaProducer:
        async with self._starting.turn():
            if self._producer is None:
                producer = AIOKafkaProducer(**self._options, acks="all", enable_idempotence=True)
                try:
                    await producer.start()
                except BaseException:
                    await producer.stop()
                    raise
                self._producer = producer
            return self._producer

    def discard(self, producer: AIOKafkaProducer) -> None:
        """Replace the producer. What others have sent through this one is still confirmed to them."""
        if self._producer is producer:
            self._producer = None
            leaving = asyncio.create_task(_stop(producer))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Stop the producers. Messages that are not confirmed yet may still be written."""
        await self._starting.close()
        if self._producer is not None:
            self.discard(self._producer)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=STOP_TIMEOUT)
        for leaving in list(self._leaving):
            leaving.cancel()


def _too_large(topic: str) -> BadMessage:
    return BadMessage("oversized", f"Kafka accepts no message of that size for topic {topic!r}")


async def _stop(producer: AIOKafkaProducer) -> None:
    with contextlib.suppress(KafkaError, OSError):
        await producer.stop()
