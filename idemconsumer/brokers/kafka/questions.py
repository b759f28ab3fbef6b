"""Requests to Kafka that the client does not have, or has only in an older version with less in the answer.

The client's version of Metadata has neither topic ids nor rights. Version 10, of Kafka 2.8, has both: a topic that was
deleted and created again keeps its name and reuses offsets, but has a new id (K18). Each new leader of a partition has
a higher epoch; where the records of an epoch end tells one log from another of the same topic (K21). That needs
OffsetForLeaderEpoch in version 3, of Kafka 2.3, and ListOffsets in version 4. DescribeGroups in version 3 has rights,
and the client reads its answer as that of version 2.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, Final
from uuid import UUID

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import IncompatibleBrokerVersion, LeaderNotAvailableError, TopicAuthorizationFailedError, for_code
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.admin import DescribeGroupsRequest_v3, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

from idemconsumer.brokers.kafka import kafka_client as kafka_client

_NO_ID: Final = UUID(int=0)
_UNTOLD: Final = -(2**31)
_READ: Final = 1 << 3
_CONSUMER, _ANY, _LATEST, _UNCOMMITTED = -1, -1, -1, 0


class _Uuid(AbstractType[UUID]):  # type: ignore[misc]
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


def _fields(**types: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(types.items())


def _of_topics(**types: Any) -> Array:
    return Array(("topic", String("utf-8")), ("partitions", Array(*types.items())))


def _kind(key: int, version: int, asked: Any, answered: Any, *, flexible: bool = False) -> type[RequestStruct]:
    """A request type, from the fields of the question and the answer, as the client describes its own."""
    api = {"API_KEY": key, "API_VERSION": version, "FLEXIBLE_VERSION": flexible}
    answer = type("Answer", (Response,), {**api, "SCHEMA": Schema(*answered)})
    return type("Question", (RequestStruct,), {**api, "SCHEMA": Schema(*asked), "RESPONSE_TYPE": answer})


_TEXT: Final = CompactString()
_NODES: Final = CompactArray(Int32)
_SERVER: Final = _fields(id=Int32, host=_TEXT, port=Int32, rack=_TEXT, tags=TaggedFields)
_PARTITION: Final = _fields(
    error=Int16,
    partition=Int32,
    leader=Int32,
    epoch=Int32,
    replicas=_NODES,
    isr=_NODES,
    offline=_NODES,
    tags=TaggedFields,
)
_TOPIC: Final = _fields(
    error=Int16,
    name=_TEXT,
    id=_Uuid,
    internal=Boolean,
    partitions=CompactArray(*_PARTITION),
    operations=Int32,
    tags=TaggedFields,
)
_METADATA: Final = _kind(
    3,
    10,
    _fields(
        topics=CompactArray(*_fields(id=_Uuid, name=_TEXT, tags=TaggedFields)),
        create=Boolean,
        operations_on_cluster=Boolean,
        operations_on_topics=Boolean,
        tags=TaggedFields,
    ),
    _fields(
        throttle=Int32,
        brokers=CompactArray(*_SERVER),
        cluster=_TEXT,
        controller=Int32,
        topics=CompactArray(*_TOPIC),
        operations=Int32,
        tags=TaggedFields,
    ),
    flexible=True,
)
_ENDS: Final = _kind(
    23,
    3,
    _fields(replica=Int32, topics=_of_topics(partition=Int32, current=Int32, leader=Int32)),
    _fields(throttle=Int32, topics=_of_topics(error=Int16, partition=Int32, leader=Int32, end=Int64)),
)
_NEWEST: Final = _kind(
    2,
    4,
    _fields(replica=Int32, isolation=Int8, topics=_of_topics(partition=Int32, current=Int32, time=Int64)),
    _fields(throttle=Int32, topics=_of_topics(partition=Int32, error=Int16, time=Int64, offset=Int64, leader=Int32)),
)


class _Group(DescribeGroupsRequest_v3):  # type: ignore[misc]
    RESPONSE_TYPE = DescribeGroupsResponse_v3


class _Question(Request[RequestStruct]):  # type: ignore[misc]
    """One request of this kind. It is not sent to a server that does not know the version."""

    API_KEY = -1

    def __init__(self, kind: type[RequestStruct], *fields: Any) -> None:
        self.API_KEY, self._CLASSES, self._fields = kind.API_KEY, (kind,), fields

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class(*self._fields)


async def topic_ids(client: AIOKafkaClient, topics: Iterable[str]) -> dict[str, str]:
    """The ids of the topics that exist, as hexadecimal digits; none from a broker before Kafka 2.8. Raises TimeoutError
    or KafkaError."""
    found = await _ask_for_metadata(client, topics, rights=False)
    return {topic[1]: topic[2].hex for topic in found if not topic[0] and topic[2] != _NO_ID}


async def lacking_rights(client: AIOKafkaClient, topics: Iterable[str]) -> dict[str, str]:
    """For each topic that this user may not see or not read, the right that is missing. Raises TimeoutError or
    KafkaError."""
    found = await _ask_for_metadata(client, topics, rights=True)
    hidden = {topic[1]: "DESCRIBE" for topic in found if topic[0] == TopicAuthorizationFailedError.errno}
    return hidden | {topic[1]: "READ" for topic in found if not topic[0] and not may_read(topic[5])}


def may_read(operations: int) -> bool:
    """Whether the authorized operations of a topic or group include READ; True also if Kafka does not report them."""
    return operations in (_UNTOLD, 0) or bool(operations & _READ)


async def ends_of(client: AIOKafkaClient, leaders: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Up to which offset each log has records of this leader's epoch or an earlier one; -1 for a log that has only
    earlier epochs. Empty from a broker before Kafka 2.3. Raises TimeoutError or KafkaError."""
    answers = await _ask_leaders(client, leaders, _ENDS, _CONSUMER)
    return {_checked(client, topic, partition, code): end for topic, (code, partition, _, end) in answers}


async def present_leaders(client: AIOKafkaClient, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """In whose epoch each log is written now: `ends_of` tells later whether a log has all that this one has. A log that
    keeps no epochs is missing. Empty from a broker before Kafka 2.3. Raises TimeoutError or KafkaError."""
    answers = await _ask_leaders(client, dict.fromkeys(partitions, _LATEST), _NEWEST, _CONSUMER, _UNCOMMITTED)
    leaders = {_checked(client, topic, at, code): leader for topic, (at, code, _, _, leader) in answers}
    return {at: leaders[at] for at, end in (await ends_of(client, leaders)).items() if end >= 0}


async def described_group(admin: AIOKafkaAdminClient, group: str) -> Mapping[str, Any]:
    """The group as Kafka describes it. Raises KafkaError."""
    try:
        answer = await admin._send_request(_Question(_Group, [group], True), await admin.find_coordinator(group))
    except (IncompatibleBrokerVersion, NotImplementedError):  # before Kafka 2.3
        [answer] = await admin.describe_consumer_groups([group])
    [described] = answer.to_object()["groups"]
    if described["error_code"]:
        raise for_code(described["error_code"])()
    return dict(described)


async def config_of(admin: AIOKafkaAdminClient, kind: Any, name: str, *settings: str) -> Mapping[str, Any]:
    """Values of a topic's or a server's settings; empty where this user may not read them. Raises KafkaError."""
    [answer] = await admin.describe_configs([ConfigResource(kind, name, dict.fromkeys(settings))])
    [described] = answer.to_object()["resources"]
    return {entry["config_names"]: entry["config_value"] for entry in described["config_entries"]}


async def _ask_for_metadata(client: AIOKafkaClient, topics: Iterable[str], *, rights: bool) -> list[Any]:
    wanted: list[tuple[UUID, str, dict[int, bytes]]] = [(_NO_ID, topic, {}) for topic in sorted(set(topics))]
    return await _ask(client, {client.get_random_node(): _Question(_METADATA, wanted, False, False, rights, {})})


async def _ask_leaders(
    client: AIOKafkaClient, wanted: Mapping[TopicPartition, int], kind: type[RequestStruct], *head: int
) -> list[tuple[str, Any]]:
    """The answers of the partitions' leaders, each with its topic. `wanted` gives the epoch or time to ask for."""
    by_node: dict[int, dict[str, list[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(list))
    for at, its in wanted.items():
        node = client.cluster.leader_for_partition(at)
        if node is None or node < 0:
            raise LeaderNotAvailableError(at)
        by_node[node][at.topic].append((at.partition, _ANY, its))
    questions = {node: _Question(kind, *head, list(topics.items())) for node, topics in by_node.items()}
    return [(topic, each) for topic, found in await _ask(client, questions) for each in found]


async def _ask(client: AIOKafkaClient, questions: Mapping[int, _Question]) -> list[Any]:
    """The answers of these nodes, asked one after the other, by topic; empty if a node does not know the request."""
    try:
        async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
            return [topic for node, each in questions.items() for topic in (await client.send(node, each)).topics]
    except (IncompatibleBrokerVersion, NotImplementedError):
        return []


def _checked(client: AIOKafkaClient, topic: str, partition: int, code: int) -> TopicPartition:
    if code:
        client.force_metadata_update()
        raise for_code(code)(topic, partition)
    return TopicPartition(topic, partition)
