"""For `check`: what a group has not read yet, beside what its topic still keeps and for how long (K11)."""

from __future__ import annotations

import math
import time
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError

from idemconsumer.brokers.kafka.client import name_of
from idemconsumer.brokers.kafka.start import Log, start_at
from idemconsumer.ports.broker import Finding


async def lag_findings(
    connection: dict[str, Any], admin: AIOKafkaAdminClient, topic: str, group: str, kept: float | None
) -> list[Finding]:
    """What was lost, and what soon may be: messages in the second half of the `kept` seconds. Raises KafkaError."""
    subject = f"kafka:{topic}"
    try:
        offsets = await admin.list_consumer_group_offsets(group)
    except GroupCoordinatorNotAvailableError:
        return []  # a new cluster makes the groups' own topic when it is first asked
    read = {at: each.offset for at, each in offsets.items() if at.topic == topic and each.offset >= 0}
    if not read:
        return []
    found = []
    async with AIOKafkaConsumer(**connection, isolation_level="read_committed") as consumer:
        starts, ends = await consumer.beginning_offsets(list(read)), await consumer.end_offsets(list(read))
        old = await _older_than(consumer, ends, None if kept is None or math.isinf(kept) else kept / 2)
    for at, offset in sorted(read.items()):
        start = start_at(offset, Log(starts[at], ends[at]), latest=False)
        where = f"{name_of(at)}: group {group!r} has read up to offset {offset}"
        if start.lost:
            text = f"{where}, and the log begins at {start.offset}: Kafka has deleted {start.lost} unread offset(s)"
            found.append(Finding("error", subject, f"{text}; keep messages longer (retention.ms), or add workers"))
        elif start.beyond:
            text = f"{where}, and the log ends at {ends[at]}: this is not the log that the group has read"
            found.append(Finding("error", subject, f"{text}; a worker reads it from the point where the logs differ"))
        elif offset < old.get(at, 0):
            text = f"{where}; the oldest unread message is older than half of its retention time"
            found.append(Finding("warning", subject, f"{text}; add workers, or keep messages longer (retention.ms)"))
    return found


async def _older_than(
    consumer: AIOKafkaConsumer, ends: dict[TopicPartition, int], seconds: float | None
) -> dict[TopicPartition, int]:
    """The offset below which all messages of a partition are older."""
    if seconds is None:
        return {}
    at_time = int((time.time() - seconds) * 1000)
    found = await consumer.offsets_for_times(dict.fromkeys(ends, at_time))
    return {at: ends[at] if found.get(at) is None else found[at].offset for at in ends}
