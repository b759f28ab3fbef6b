"""Relays the outbox to Kafka in batches made here; a partition gets one batch after the other.

The client's producer reports a refused record only as a failed batch, and the next batch may be accepted nevertheless.
So nothing is sent to a partition after a batch that failed; that batch is halved until the refused record is found (X5:
a refused message stops its key, and no other).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    InvalidTimestampError,
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    UnknownError,
    kafka_errors,
)
from aiokafka.partitioner import DefaultPartitioner

from idemconsumer.brokers.kafka.kafka_client import words
from idemconsumer.brokers.sendable import record_bytes
from idemconsumer.ports.broker import BEHIND, Outgoing, Unsent


class InvalidRecordError(UnknownError):  # type: ignore[misc]
    """The broker's answer to a record without a key for a compacted topic, and to one that a schema rejects."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The broker does not take the record: without a key for a compacted topic, or not of its schema"


# aiokafka has no class for this code and maps it to UNKNOWN_SERVER_ERROR, which does not blame the record. Code that
# catches UnknownError still catches this subclass.
kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)
_REFUSED: Final = (MessageSizeTooLargeError, RecordListTooLargeError, InvalidTimestampError, InvalidRecordError)

_partitioner = DefaultPartitioner()


class TopicRelay:
    """Relays messages to one topic. `answers` holds the result for each. After `discard`, a producer that `producer`
    returned is not used again. No record is larger than `most_bytes`."""

    def __init__(
        self,
        producer: Callable[[], Awaitable[AIOKafkaProducer]],
        discard: Callable[[AIOKafkaProducer], None],
        topic: str,
        messages: Sequence[Outgoing],
        most_bytes: int,
    ) -> None:
        self._producer = producer
        self._discard = discard
        self._topic = topic
        self._messages = messages
        self._most_bytes = most_bytes
        self._stopped = set[bytes | None]()  # keys of which a message was refused
        self.answers: list[Unsent | None] = [BEHIND] * len(messages)

    async def run(self) -> None:
        """Send to all partitions at once; then send what failed by halves, one partition after the other."""
        of = await self._by_partition()
        sending = (self._send_all(partition, indexes) for partition, indexes in of.items())
        failed = await asyncio.gather(*sending, return_exceptions=True)
        for error in failed:
            if isinstance(error, BaseException):
                raise error
        for partition, parts in zip(of, failed, strict=True):
            assert not isinstance(parts, BaseException)
            await self._send_halves(partition, parts)

    async def _by_partition(self) -> dict[int, list[int]]:
        producer = await self._producer()
        there = sorted(await producer.partitions_for(self._topic))
        any_of_them = random.choice(there)  # one partition for all messages without a key: larger batches
        of: dict[int, list[int]] = {}
        for index, message in enumerate(self._messages):
            key = key_of(message)
            if key in self._stopped:
                continue
            try:
                too_large = record_bytes(message) > self._most_bytes
            except ValueError as error:
                self._refuse(index, f"it cannot be encoded: {error}")
                continue
            if too_large:
                self._refuse(index, f"it is larger than {self._most_bytes} bytes, the limit for Kafka")
                continue
            partition = any_of_them if key is None else _partitioner(key, there, there)
            of.setdefault(partition, []).append(index)
        return of

    async def _send_all(self, partition: int, indexes: Sequence[int]) -> list[list[int]]:
        """Send in batches up to the first that is refused; returns that batch and the messages after it."""
        while indexes:
            count, error = await self._send(partition, indexes)
            if error is not None:
                return [list(indexes[:count]), list(indexes[count:])]
            indexes = indexes[count:]
        return []

    async def _send_halves(self, partition: int, parts: Sequence[list[int]]) -> None:
        left = deque(parts)
        while left:
            part = [index for index in left.popleft() if key_of(self._messages[index]) not in self._stopped]
            if not part:
                continue
            count, error = await self._send(partition, part)
            if error is None:
                left.appendleft(part[count:])
            elif count == 1:
                self._refuse(part[0], words(error))
                left.appendleft(part[1:])
            else:
                left.extendleft((part[count:], part[count // 2 : count], part[: count // 2]))

    async def _send(self, partition: int, indexes: Sequence[int]) -> tuple[int, KafkaError | None]:
        """Send as many as fit into one batch; returns how many, and why the batch was refused. Raises KafkaError if the
        messages are not to blame."""
        producer = await self._producer()
        builder = producer.create_batch()
        now, count = int(time.time() * 1000), 0
        for index in indexes:
            message = self._messages[index]
            key, headers = key_of(message), headers_of(message)
            if builder.append(timestamp=now, key=key, value=message.body, headers=headers) is None:
                break
            count += 1
        builder.close()
        try:
            await (await producer.send_batch(builder, self._topic, partition=partition))
        except _REFUSED as error:
            self._discard(producer)
            return count, error
        except BaseException:
            self._discard(producer)
            raise
        for index in indexes[:count]:
            self.answers[index] = None
        return count, None

    def given_up(self, text: str) -> list[Unsent | None]:
        unsent = Unsent(text)
        return [unsent if each is BEHIND else each for each in self.answers]

    def _refuse(self, index: int, text: str) -> None:
        self.answers[index] = Unsent(text, final=True)
        if (key := key_of(self._messages[index])) is not None:
            self._stopped.add(key)


def key_of(message: Outgoing) -> bytes | None:
    if message.record_key is not None or message.key is None:
        return message.record_key
    return message.key.encode()


def headers_of(message: Outgoing) -> list[tuple[str, bytes]]:
    return [(name, as_bytes(value)) for name, value in message.headers.items()]


def as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
