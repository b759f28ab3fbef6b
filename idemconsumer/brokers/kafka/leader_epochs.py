"""Where the records of a leader's epoch end in a log: it tells one log from another of the same topic (K21).

Each new leader of a partition has a higher epoch, and writes it into the batches that it appends. The client neither
reads it nor has the requests: OffsetForLeaderEpoch in version 3, of Kafka 2.3, and ListOffsets in version 4.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import IncompatibleBrokerVersion, LeaderNotAvailableError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int8, Int16, Int32, Int64, Schema, String

from idemconsumer.brokers.kafka import client as kafka_client

_CONSUMER: Final = -1
_ANY: Final = -1
_LATEST: Final = -1
_UNCOMMITTED: Final = 0
_BATCH: Final = struct.Struct(">qiib")  # base offset, length of what comes behind it, the leader's epoch, format
_OVERHEAD: Final = struct.calcsize(">qi")


def leaders_of(fetched: bytes) -> Iterator[tuple[int, int]]:
    """From which offset on which leader's epoch holds, for the batches that were fetched of a partition."""
    start, last = 0, None
    while len(fetched) - start >= _BATCH.size:
        base, length, leader, magic = _BATCH.unpack_from(fetched, start)
        if length <= 0:
            return
        if magic == 2 and leader != last:
            yield base, leader
            last = leader
        start += _OVERHEAD + length


class _Answer(Response):  # type: ignore[misc]
    API_KEY = 23
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle", Int32),
        (
            "topics",
            Array(
                ("topic", String("utf-8")),
                ("partitions", Array(("error", Int16), ("partition", Int32), ("leader", Int32), ("end", Int64))),
            ),
        ),
    )


class _Question(RequestStruct):  # type: ignore[misc]
    API_KEY = 23
    API_VERSION = 3
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        ("replica", Int32),
        (
            "topics",
            Array(
                ("topic", String("utf-8")),
                ("partitions", Array(("partition", Int32), ("current", Int32), ("leader", Int32))),
            ),
        ),
    )


class _Ends(Request[_Question]):  # type: ignore[misc]
    API_KEY = 23

    def __init__(self, leaders: Mapping[TopicPartition, int]) -> None:
        self._topics = defaultdict(list)
        for at, leader in leaders.items():
            self._topics[at.topic].append((at.partition, _ANY, leader))

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class(_CONSUMER, list(self._topics.items()))


class _NewestAnswer(Response):  # type: ignore[misc]
    API_KEY = 2
    API_VERSION = 4
    SCHEMA = Schema(
        ("throttle", Int32),
        (
            "topics",
            Array(
                ("topic", String("utf-8")),
                (
                    "partitions",
                    Array(
                        ("partition", Int32),
                        ("error", Int16),
                        ("time", Int64),
                        ("offset", Int64),
                        ("leader", Int32),
                    ),
                ),
            ),
        ),
    )


class _NewestQuestion(RequestStruct):  # type: ignore[misc]
    API_KEY = 2
    API_VERSION = 4
    RESPONSE_TYPE = _NewestAnswer
    SCHEMA = Schema(
        ("replica", Int32),
        ("isolation", Int8),
        (
            "topics",
            Array(
                ("topic", String("utf-8")),
                ("partitions", Array(("partition", Int32), ("current", Int32), ("time", Int64))),
            ),
        ),
    )


class _Newest(Request[_NewestQuestion]):  # type: ignore[misc]
    API_KEY = 2

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        self._topics = defaultdict(list)
        for at in partitions:
            self._topics[at.topic].append((at.partition, _ANY, _LATEST))

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class(_CONSUMER, _UNCOMMITTED, list(self._topics.items()))


async def ends_of(client: AIOKafkaClient, leaders: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Up to where each log has records of this leader's epoch or an earlier one; -1 for a log that knows only earlier
    ones. A broker before Kafka 2.3 tells nothing. TimeoutError or KafkaError."""
    ends = {}
    answers = await _ask(client, leaders, lambda its: _Ends({at: leaders[at] for at in its}))
    for topic, (code, partition, _, end) in answers:
        ends[_checked(client, topic, partition, code)] = end
    return ends


async def present_leaders(client: AIOKafkaClient, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """In whose epoch each log is written now: `ends_of` tells later whether a log has all that this one has. Missing is
    a log that keeps no epochs. A broker before Kafka 2.3 tells nothing. TimeoutError or KafkaError."""
    leaders = {}
    for topic, (partition, code, _, _, leader) in await _ask(client, partitions, _Newest):
        leaders[_checked(client, topic, partition, code)] = leader
    return {at: leaders[at] for at, end in (await ends_of(client, leaders)).items() if end >= 0}


async def _ask(
    client: AIOKafkaClient,
    partitions: Iterable[TopicPartition],
    question: Callable[[Sequence[TopicPartition]], Request[Any]],
) -> list[tuple[str, Any]]:
    """What their leaders answer, each with its topic; nothing from one that does not know the question."""
    by_node = defaultdict(list)
    for at in partitions:
        node = client.cluster.leader_for_partition(at)
        if node is None or node < 0:
            raise LeaderNotAvailableError(at)
        by_node[node].append(at)
    answers: list[tuple[str, Any]] = []
    try:
        async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
            for node, its in by_node.items():
                answer = await client.send(node, question(its))
                answers += [(topic, each) for topic, found in answer.topics for each in found]
    except (IncompatibleBrokerVersion, NotImplementedError):
        return []
    return answers


def _checked(client: AIOKafkaClient, topic: str, partition: int, code: int) -> TopicPartition:
    if code:
        client.force_metadata_update()
        raise for_code(code)(topic, partition)
    return TopicPartition(topic, partition)
