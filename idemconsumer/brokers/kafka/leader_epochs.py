"""Where the records of a leader's epoch end in a log: it tells one log from another of the same topic (K21).

Each new leader of a partition has a higher epoch, and writes it into the batches that it appends. The client neither
reads it nor has the request, so this is OffsetForLeaderEpoch in version 3, of Kafka 2.3.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import IncompatibleBrokerVersion, LeaderNotAvailableError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int16, Int32, Int64, Schema, String

from idemconsumer.brokers.kafka import client as kafka_client

_CONSUMER: Final = -1
_ANY: Final = -1
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


async def ends_of(client: AIOKafkaClient, leaders: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Up to where each log has records of this leader's epoch or an earlier one; -1 for a log that knows only earlier
    ones. A broker before Kafka 2.3 tells nothing. TimeoutError or KafkaError."""
    by_node: defaultdict[int, dict[TopicPartition, int]] = defaultdict(dict)
    for at, leader in leaders.items():
        node = client.cluster.leader_for_partition(at)
        if node is None or node < 0:
            raise LeaderNotAvailableError(at)
        by_node[node][at] = leader
    ends = {}
    try:
        async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
            for node, its in by_node.items():
                answer = await client.send(node, _Ends(its))
                for topic, partitions in answer.topics:
                    for code, partition, _, end in partitions:
                        if code:
                            client.force_metadata_update()
                            raise for_code(code)(topic, partition)
                        ends[TopicPartition(topic, partition)] = end
    except (IncompatibleBrokerVersion, NotImplementedError):
        return {}
    return ends
