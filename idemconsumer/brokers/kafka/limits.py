"""What a group and its brokers would refuse a new member for, read before there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import GroupAuthorizationFailedError, IncompatibleBrokerVersion, KafkaError, for_code
from aiokafka.protocol.admin import DescribeGroupsRequest_v3, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request

from idemconsumer.brokers.kafka.diagnosis import refusal
from idemconsumer.brokers.kafka.topic_ids import may_read
from idemconsumer.ports.broker import Finding

_OURS: Final = "roundrobin"  # the assignor of our members
_LEAST: Final = "group.min.session.timeout.ms"
_MOST: Final = "group.max.session.timeout.ms"


class _Question(DescribeGroupsRequest_v3):  # type: ignore[misc]
    """The client's reads the answer of version 2, which has no rights in it."""

    RESPONSE_TYPE = DescribeGroupsResponse_v3


class _Describe(Request[_Question]):  # type: ignore[misc]
    API_KEY = 15

    def __init__(self, group: str) -> None:
        self._group = group

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class([self._group], True)


async def group_findings(admin: AIOKafkaAdminClient, subject: str, group: str, session_timeout: float) -> list[Finding]:
    """Errors and warnings only. What cannot be read is left out. Raises TimeoutError."""
    found = []
    try:
        found += await _members(admin, subject, group)
    except GroupAuthorizationFailedError as error:
        found.append(Finding("error", subject, refusal(error)))
    except KafkaError:
        pass  # such as a new cluster, which makes the groups' own topic first
    with contextlib.suppress(KafkaError):  # it takes a right on the cluster that workers do not need
        found += await _session(admin, subject, session_timeout)
    return found


async def described_group(admin: AIOKafkaAdminClient, group: str) -> Mapping[str, Any]:
    """As Kafka answers. Raises KafkaError."""
    try:
        answer = await admin._send_request(_Describe(group), await admin.find_coordinator(group))
    except (IncompatibleBrokerVersion, NotImplementedError):  # before Kafka 2.3
        [answer] = await admin.describe_consumer_groups([group])
    [described] = answer.to_object()["groups"]
    if described["error_code"]:
        raise for_code(described["error_code"])()
    return dict(described)


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
    names = dict.fromkeys((_LEAST, _MOST))
    values = await config_of(admin, ConfigResource(ConfigResourceType.BROKER, str(node), names))
    least, most = (float(values.get(name) or default) / 1000 for name, default in ((_LEAST, 0), (_MOST, 1e15)))
    if least <= session_timeout <= most:
        return []
    text = (
        f"kafka_session_timeout is {session_timeout:g} s, but the brokers allow {least:g} to {most:g} s "
        f"({_LEAST}, {_MOST}); set IDEMCONSUMER_KAFKA_SESSION_TIMEOUT to a value in that range"
    )
    return [Finding("error", subject, text)]


async def config_of(admin: AIOKafkaAdminClient, resource: ConfigResource) -> Mapping[str, Any]:
    """Values by name. Raises KafkaError."""
    [answer] = await admin.describe_configs([resource])
    [described] = answer.to_object()["resources"]
    if described["error_code"]:
        raise for_code(described["error_code"])()
    return {entry["config_names"]: entry["config_value"] for entry in described["config_entries"]}
