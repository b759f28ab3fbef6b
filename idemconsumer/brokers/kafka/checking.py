"""For `check`, and a worker's start: what there is to say of a subscription's topics and group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from idemconsumer.brokers.kafka.client import ALLOW_READ, create_command
from idemconsumer.brokers.kafka.lag import lag_findings
from idemconsumer.brokers.kafka.limits import group_findings
from idemconsumer.brokers.kafka.topic_ids import lacking_rights
from idemconsumer.brokers.kafka.topics import Topics
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Finding
from idemconsumer.settings import Settings


async def subscription_findings(
    connection: dict[str, Any], admin: AIOKafkaAdminClient, subscription: Subscription, settings: Settings
) -> list[Finding]:
    """Raises TimeoutError, KafkaError or OSError."""
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
    found += await group_findings(admin, subject, subscription.group, settings.kafka_session_timeout)
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
        found += await lag_findings(connection, admin, topic, subscription.group, retention)
    return found


async def contested_findings(admin: AIOKafkaAdminClient, subscriptions: Iterable[Subscription]) -> list[Finding]:
    """The topics that patterns of two handlers match, in each group (K17). Raises KafkaError."""
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
    """The topic, or all that the pattern matches now."""
    topics = Topics([subscription])
    return sorted(topics.names or filter(topics.match, await admin.list_topics()))


async def partitions_of(admin: AIOKafkaAdminClient, topic: str) -> int:
    [found] = await admin.describe_topics([topic])
    return 0 if found["error_code"] else len(found["partitions"])


async def retention_of(admin: AIOKafkaAdminClient, topic: str) -> float | None:
    """How long the topic keeps a message, and so can redeliver it; `inf`: for ever, None: unknown."""
    names = dict.fromkeys(("retention.ms", "cleanup.policy"))
    [answer] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, names)])
    values = {
        entry["config_names"]: entry["config_value"]
        for resource in answer.to_object()["resources"]
        for entry in resource["config_entries"]
    }
    if "delete" not in str(values.get("cleanup.policy", "delete")):
        return math.inf  # compacted: the last message of a key stays
    if (milliseconds := values.get("retention.ms")) is None:
        return None
    return math.inf if int(milliseconds) < 0 else int(milliseconds) / 1000


def missing_text(servers: str, topics: Sequence[str]) -> str:
    commands = "; ".join(create_command(servers, name) for name in topics)
    names = ", ".join(repr(name) for name in topics)
    return f"Kafka at {servers} has no topic {names}, or this client may not see it; create it: {commands}"
