"""The membership in a consumer group: the member's id, its static place, and leaving on behalf of a dead member.

A dynamic member first requests an id, and joins with it in a second request. The client reports the id only when the
group has agreed, which takes as long as its slowest member; the group would wait for a member that dies in between
(K15: so the launcher must know the id at once).

A static member has a place in its group, one for each `group_instance_id` (K16). A process that joins under that id
takes the place from the process that has it. The client that lost the place rejoins at its next heartbeat and takes it
back, so two live members would take it from each other for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from aiokafka import AIOKafkaConsumer
from aiokafka.client import ConnectionGroup
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.protocol.group import LeaveGroupRequest

from idemconsumer.brokers.kafka import kafka_client as kafka_client
from idemconsumer.brokers.kafka.kafka_client import LOSS, admin_client, words
from idemconsumer.brokers.kafka.kafka_options import connection_options
from idemconsumer.errors import BrokerUnavailable, Replaced
from idemconsumer.settings import Settings

Report = Callable[[str], None]

_SUFFIX: Final = len("-00000000-0000-0000-0000-000000000000")  # the broker appends that many characters to a static id


class Seat:
    """The static place in one group, for as long as this process lives. `instance` None: its members are dynamic."""

    def __init__(self, group: str, instance: str | None) -> None:
        self._group = group
        self.instance = instance
        self._member: str | None = None

    def taken(self, member: str) -> None:
        """Record that this process has the place, as `member`."""
        if self.instance is not None:
            self._member = member

    async def refuse(self, consumer: AIOKafkaConsumer) -> None:
        """Await this before a join that would take the place. Raises Replaced when another process has it by now.

        A process that never had the place takes it from any other: that is what a restart does. When Kafka does not
        answer, the join goes on, and the process that loses the place by it runs this check in its turn.
        """
        if self._member is None or consumer._coordinator.member_id == self._member:
            return
        mine, self._member = self._member, None  # if a join's answer was lost, only the broker knows the member id
        if any(member != mine for member in await self._members(consumer)):
            raise Replaced(
                f"kafka group {self._group!r}: another process has joined under this worker's kafka_group_instance_id, "
                f"{self.instance!r}, and has taken over its partitions; give each pod its own, such as the pod's name "
                "in a StatefulSet, or unset IDEMCONSUMER_KAFKA_GROUP_INSTANCE_ID (a Deployment needs none)"
            )

    async def _members(self, consumer: AIOKafkaConsumer) -> list[str]:
        """The members that have this place: at most one."""
        coordinator = consumer._coordinator
        try:
            async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
                await coordinator.ensure_coordinator_known()
                answer = await consumer._client.send(
                    coordinator.coordinator_id, DescribeGroupsRequest([self._group]), group=ConnectionGroup.COORDINATION
                )
        except (TimeoutError, KafkaError):
            return []
        [described] = answer.to_object()["groups"]
        names = [str(member["member_id"]) for member in described["members"]]
        return [name for name in names if name[:-_SUFFIX] == self.instance]


class _Reporting(GroupCoordinator):  # type: ignore[misc]
    """The class that the client's coordinator is changed to: the same, except that it reports its member id."""

    _report: Report

    @property
    def member_id(self) -> str:
        return str(self.__dict__["member_id"])

    @member_id.setter
    def member_id(self, member: str) -> None:
        self.__dict__["member_id"] = member
        if member:
            self._report(member)


def watch_membership(consumer: AIOKafkaConsumer, report: Report) -> None:
    """From now on, call `report` with each member id as soon as the client has it. Call this after `start`, before
    subscribing."""
    coordinator = consumer._coordinator
    coordinator._report = report
    coordinator.__class__ = _Reporting


async def leave(settings: Settings, memberships: Mapping[str, str]) -> None:
    """Make each group reassign at once what this member had (K15). Raises BrokerUnavailable.

    Unknown members are ignored. Only for members that have ended: every commit of a live one would be refused
    afterwards.
    """
    try:
        async with admin_client(connection_options(settings)) as admin:
            for group, member in memberships.items():
                coordinator = await admin.find_coordinator(group)
                await admin._send_request(LeaveGroupRequest(group, member), coordinator)
    except LOSS as error:
        raise BrokerUnavailable(
            f"Kafka at {settings.kafka}: could not leave a dead worker's groups: {words(error)}"
        ) from error
