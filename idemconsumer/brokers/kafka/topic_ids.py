"""What the client's version of the metadata does not tell: ids and rights. This is version 10, of Kafka 2.8.

A topic that was deleted and created again has the name and the offsets of another one, and an id of its own (K18).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any, Final
from uuid import UUID

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import IncompatibleBrokerVersion, TopicAuthorizationFailedError
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from idemconsumer.brokers.kafka import client as kafka_client

_NONE: Final = UUID(int=0)
_UNTOLD: Final = -(2**31)
_READ: Final = 1 << 3


class _Uuid(AbstractType[UUID]):  # type: ignore[misc]
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


class _Answer(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle", Int32),
        (
            "brokers",
            CompactArray(
                ("id", Int32),
                ("host", CompactString()),
                ("port", Int32),
                ("rack", CompactString()),
                ("_", TaggedFields),
            ),
        ),
        ("cluster", CompactString()),
        ("controller", Int32),
        (
            "topics",
            CompactArray(
                ("error", Int16),
                ("name", CompactString()),
                ("id", _Uuid),
                ("internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        ("_", TaggedFields),
                    ),
                ),
                ("operations", Int32),
                ("_", TaggedFields),
            ),
        ),
        ("operations", Int32),
        ("_", TaggedFields),
    )


class _Question(RequestStruct):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        ("topics", CompactArray(("id", _Uuid), ("name", CompactString()), ("_", TaggedFields))),
        ("create", Boolean),
        ("operations_on_cluster", Boolean),
        ("operations_on_topics", Boolean),
        ("_", TaggedFields),
    )


class _Metadata(Request[_Question]):  # type: ignore[misc]
    API_KEY = 3

    def __init__(self, topics: Iterable[str], rights: bool) -> None:
        self._topics: list[tuple[UUID, str, dict[int, bytes]]] = [(_NONE, topic, {}) for topic in topics]
        self._rights = rights

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class(self._topics, False, False, self._rights, {})


async def topic_ids(client: AIOKafkaClient, topics: Iterable[str]) -> dict[str, str]:
    """As hexadecimal digits, of those that exist; none from a broker before Kafka 2.8. TimeoutError or KafkaError."""
    found = await _ask(client, topics, rights=False)
    return {topic[1]: topic[2].hex for topic in found if not topic[0] and topic[2] != _NONE}


async def lacking_rights(client: AIOKafkaClient, topics: Iterable[str]) -> dict[str, str]:
    """Of those that this user may not see or not read, which right it lacks. TimeoutError or KafkaError."""
    found = await _ask(client, topics, rights=True)
    hidden = {topic[1]: "DESCRIBE" for topic in found if topic[0] == TopicAuthorizationFailedError.errno}
    return hidden | {topic[1]: "READ" for topic in found if not topic[0] and not may_read(topic[5])}


def may_read(operations: int) -> bool:
    """Of the authorized operations of a topic or group, as Kafka tells them; also where it does not."""
    return operations in (_UNTOLD, 0) or bool(operations & _READ)


async def _ask(client: AIOKafkaClient, topics: Iterable[str], *, rights: bool) -> Sequence[Any]:
    try:
        async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
            answer = await client.send(client.get_random_node(), _Metadata(sorted(set(topics)), rights))
    except (IncompatibleBrokerVersion, NotImplementedError):
        return ()
    return list(answer.topics)
