"""For `check` and a worker's start: findings on the topics and the group of a subscription.

Reasons for which a group and its brokers would refuse a new member are read before one joins; what a group has not read
yet is compared with what its topic still keeps, and for how long (K11).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.errors import GroupAuthorizationFailedError, GroupCoordinatorNotAvailableError, KafkaError

from idemconsumer.brokers.kafka.diagnosis import refusal
from idemconsumer.brokers.kafka.kafka_client import ALLOW_READ, create_command, name_of
from idemconsumer.brokers.kafka.questions import config_of, described_group, lacking_rights, may_read
from idemconsumer.brokers.kafka.start import PartitionLog, start_at
from idemconsumer.brokers.kafka.topics import Topics
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Finding
from idemconsumer.settings import Settings

_OURS: Final = "roundrobin"  # the assignor of our members
_LEAST: Final = "group.min.session.timeout.ms"
_MOST: Final = "group.max.session.timeout.ms"


async def subscription_findings(
    connection: dict[str, Any], admin: AIOKafkaAdminClient, subscription: Subscription, settings: Settings
) -> list[Finding]:
    """Findings on one subscription. Raises TimeoutError, KafkaError or OSError."""
    subject = subscription.source
    topics = await topics_of(admin, subscription)
    if not topics:
        return [Finding("warning", subject, "matches no topic yet; a matching topic is read soon after it is created")]
    lacking = await lacking_rights(admin._client, topics)
    found = [
        Finding("error", f"kafka:{topic}", f"this user lacks {right} on the topic, so it stays unread; {ALLOW_READ}")
        for topic, right in lacking.items()
    ]
    partitions = {topic: await partitions_of(admin, topic) for topic in topics if lacking.get(topic) != "DESCRIBE"}
    if not all(partitions.values()):
        missing = [topic for topic, count in partitions.items() if not count]
        return [*found, Finding("error", subject, missing_text(settings.kafka or "", missing))]
    found += await _group_findings(admin, subject, subscription.group, settings.kafka_session_timeout)
    for topic, count in partitions.items():
        retention = await retention_of(admin, topic)
        subject = f"kafka:{topic}"
        found.append(Finding("ok", subject, f"topic {topic!r} with {count} partition(s)"))
        if retention is None:
            found.append(Finding("warning", subject, "this client may not read the topic's retention"))
        elif math.isinf(retention):
            found.append(Finding("warning", subject, "Kafka keeps messages for ever; a replay can exceed `retain`"))
        else:
            found.append(Finding("ok", subject, f"Kafka keeps messages for {retention:.0f} s"))
        found += await _lag_findings(connection, admin, topic, subscription.group, retention)
    return found


async def contested_findings(admin: AIOKafkaAdminClient, subscriptions: Iterable[Subscription]) -> list[Finding]:
    """The topics that patterns of two handlers match, in each group (K17: no handler reads such a topic). Raises
    KafkaError."""
    existing = await admin.list_topics()
    groups: dict[str, list[Subscription]] = {}
    for each in subscriptions:
        groups.setdefault(each.group, []).append(each)
    return [
        Finding(
            "error",
            f"kafka:{topic}",
            f"{' and '.join(sources)} of two handlers match it, so neither reads it; narrow one of the patterns, or "
            'give one handler a consumer_group="…" of its own',
        )
        for of_group in groups.values()
        for topic, sources in sorted(Topics(of_group).contested(existing).items())
    ]


async def topics_of(admin: AIOKafkaAdminClient, subscription: Subscription) -> Sequence[str]:
    """The topic, or all topics that the pattern matches now."""
    topics = Topics([subscription])
    return sorted(topics.names or filter(topics.match, await admin.list_topics()))


async def partitions_of(admin: AIOKafkaAdminClient, topic: str) -> int:
    [found] = await admin.describe_topics([topic])
    return 0 if found["error_code"] else len(found["partitions"])


async def retention_of(admin: AIOKafkaAdminClient, topic: str) -> float | None:
    """How long the topic keeps a message, in seconds, and so can redeliver it; `inf`: for ever, None: unknown."""
    values = await config_of(admin, ConfigResourceType.TOPIC, topic, "retention.ms", "cleanup.policy")
    if "delete" not in str(values.get("cleanup.policy", "delete")):
        return math.inf  # compacted: the last message of each key is kept
    if (milliseconds := values.get("retention.ms")) is None:
        return None
    return math.inf if int(milliseconds) < 0 else int(milliseconds) / 1000


def missing_text(servers: str, topics: Sequence[str]) -> str:
    commands = "; ".join(create_command(servers, name) for name in topics)
    names = ", ".join(repr(name) for name in topics)
    return f"Kafka at {servers} has no topic {names}, or this client may not see it; create it: {commands}"


async def _group_findings(
    admin: AIOKafkaAdminClient, subject: str, group: str, session_timeout: float
) -> list[Finding]:
    """Errors and warnings only; what cannot be read is left out. Raises TimeoutError."""
    found = []
    try:
        found += await _members(admin, subject, group)
    except GroupAuthorizationFailedError as error:
        found.append(Finding("error", subject, refusal(error)))
    except KafkaError:
        pass  # for example a new cluster, which has yet to create the topic of group offsets
    with contextlib.suppress(KafkaError):  # this needs a right on the cluster that workers do not need
        found += await _session(admin, subject, session_timeout)
    return found


async def _members(admin: AIOKafkaAdminClient, subject: str, group: str) -> list[Finding]:
    described = await described_group(admin, group)
    if not may_read(described.get("authorized_operations", 0)):
        text = f"this user lacks READ on the group {group!r}, so no worker can join it; allow it to READ the group"
        return [Finding("error", subject, text)]
    kind, assignor, members = described["protocol_type"], described["protocol"], described["members"]
    if not members or (kind == "consumer" and assignor in ("", _OURS)):
        return []
    clients = ", ".join(sorted({f"{member['client_id']} at {member['client_host']}" for member in members}))
    text = (
        f"live members of the group {group!r} assign partitions by {assignor or kind!r}, and workers by {_OURS!r}, so "
        f"Kafka lets no worker join ({clients}); stop these members, or give the handler another consumer_group=…"
    )
    return [Finding("error", subject, text)]


async def _session(admin: AIOKafkaAdminClient, subject: str, session_timeout: float) -> list[Finding]:
    [node, *_] = [broker.nodeId for broker in admin._client.cluster.brokers()]
    values = await config_of(admin, ConfigResourceType.BROKER, str(node), _LEAST, _MOST)
    least, most = (float(values.get(name) or default) / 1000 for name, default in ((_LEAST, 0), (_MOST, 1e15)))
    if least <= session_timeout <= most:
        return []
    text = (
        f"kafka_session_timeout is {session_timeout:g} s, but the brokers allow {least:g} to {most:g} s "
        f"({_LEAST}, {_MOST}); set IDEMCONSUMER_KAFKA_SESSION_TIMEOUT to a value in that range"
    )
    return [Finding("error", subject, text)]


async def _lag_findings(
    connection: dict[str, Any], admin: AIOKafkaAdminClient, topic: str, group: str, kept: float | None
) -> list[Finding]:
    """Messages that were lost, or soon may be: those in the second half of the `kept` seconds. Raises KafkaError."""
    subject = f"kafka:{topic}"
    try:
        offsets = await admin.list_consumer_group_offsets(group)
    except GroupCoordinatorNotAvailableError:
        return []  # a new cluster creates the topic of group offsets on the first request
    read = {at: each.offset for at, each in offsets.items() if at.topic == topic and each.offset >= 0}
    if not read:
        return []
    found = []
    async with AIOKafkaConsumer(**connection, isolation_level="read_committed") as consumer:
        starts, ends = await consumer.beginning_offsets(list(read)), await consumer.end_offsets(list(read))
        old = await _older_than(consumer, ends, None if kept is None or math.isinf(kept) else kept / 2)
    for at, offset in sorted(read.items()):
        start = start_at(offset, PartitionLog(starts[at], ends[at]), latest=False)
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
    """For each partition, the offset below which all messages are older than `seconds`."""
    if seconds is None:
        return {}
    at_time = int((time.time() - seconds) * 1000)
    found = await consumer.offsets_for_times(dict.fromkeys(ends, at_time))
    return {at: ends[at] if found.get(at) is None else found[at].offset for at in ends}
