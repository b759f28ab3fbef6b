"""What the client cannot read costs one partition its progress, not the group its sessions (K13).

The client raises a fault out of a fetch of many partitions, and loses the records that it had read before it. Here each
fetch of a partition ends before its fault, which is reported instead of raised. It also ends where enough bytes were
read: the client knows numbers of records only, and what it makes of a small batch may be large (D8).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult
from aiokafka.errors import LeaderNotAvailableError, for_code
from aiokafka.protocol.fetch import FetchRequest

from idemconsumer.brokers.kafka import client as kafka_client
from idemconsumer.brokers.kafka.batches import Batch, batch_at, leaders_of

_WAIT_MS = 500
_BATCH_BYTES = 1024 * 1024  # a batch that is larger comes whole all the same

Report = Callable[[TopicPartition], None]
Follows = Callable[[TopicPartition, int, Sequence[tuple[int, int]]], bool]


def watch(consumer: AIOKafkaConsumer, report: Report, follows: Follows) -> Fetched:
    """From now on `report` is told of a fault, within `getmany` and instead of its raising, and what was fetched is
    dropped unless it `follows` what was read before (`Leaders.follow`). Call it after `start`."""
    consumer._fetcher._records = fetched = Fetched(report, follows)
    consumer._client.send = partial(fetched.send, consumer._client.send)
    return fetched


class Fetched(OrderedDict[TopicPartition, Any]):
    """What the client has fetched and not handed out. `bytes_left`: set before each `getmany`, which hands out no more
    than begins within so many bytes, and one record at least."""

    def __init__(self, report: Report, follows: Follows) -> None:
        super().__init__()
        self._report = report
        self._follows = follows
        self._leaders: dict[TopicPartition, list[tuple[int, int]]] = {}
        self.bytes_left = 0

    async def send(self, send: Callable[..., Awaitable[Any]], node: int, request: Any, **how: Any) -> Any:
        """The client's, which keeps no leader's epoch of what it has fetched."""
        answer = await send(node, request, **how)
        if isinstance(request, FetchRequest):  # the client stores what came of it before anything else can be fetched
            for topic, partitions in answer.topics:
                for partition, *_, records in partitions:
                    self._leaders[TopicPartition(topic, partition)] = list(leaders_of(records or b""))
        return answer

    def __setitem__(self, at: TopicPartition, fetched: Any) -> None:
        if type(fetched) is FetchResult:
            fetched.getall = partial(self._getall, fetched)
            fetched.leaders = self._leaders.pop(at, None)
        super().__setitem__(at, fetched)

    def _getall(self, fetched: Any, max_records: int | None = None) -> list[Any]:
        """As FetchResult.getall, but what was read before a fault is returned."""
        at = fetched._topic_partition
        if self.bytes_left <= 0 or not fetched.check_assignment(at) or not fetched.has_more():
            return []
        leaders, fetched.leaders = fetched.leaders, None
        if leaders and not self._follows(at, fetched._partition_records.next_fetch_offset, leaders):
            fetched._partition_records = None
            return []
        taken: list[Any] = []
        try:
            for record in fetched._partition_records:
                taken.append(record)
                self.bytes_left -= _size_of(record)
                if len(taken) == max_records or self.bytes_left <= 0:
                    fetched._update_position()
                    return taken
        except Exception:  # noqa: BLE001 - of a codec's library too
            self._report(at)
        fetched._update_position()
        fetched._partition_records = None
        return taken


def _size_of(record: Any) -> int:
    """Bytes of its value, its key and its headers."""
    size = len(record.value or b"") + len(record.key or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers) if record.headers else size


async def read_batch(consumer: AIOKafkaConsumer, at: TopicPartition, position: int) -> Batch | None:
    """The batch at `position`, whatever is wrong with it; None if there is none. Raises TimeoutError or KafkaError."""
    client = consumer._client
    leader = client.cluster.leader_for_partition(at)
    if leader is None or leader < 0:
        raise LeaderNotAvailableError(at)
    wanted = [(at.topic, [(at.partition, position, _BATCH_BYTES)])]
    async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
        answer = await client.send(leader, FetchRequest(_WAIT_MS, 1, _BATCH_BYTES, READ_COMMITTED, wanted))
    for _, partitions in answer.topics:
        for _, code, _, *rest in partitions:
            if code:
                raise for_code(code)(at)
            aborted = rest[-2 if answer.API_VERSION < 11 else -3]  # there the preferred replica comes behind it
            return batch_at(at, bytes(rest[-1] or b""), position, aborted or ())
    return None
