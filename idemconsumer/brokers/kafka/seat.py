"""The place of a static member in its group, of which there is one for each `group_instance_id` (K16).

Whoever joins under that id takes the place from who has it. The client of whom it was taken joins again at its next
heartbeat and takes it back, so that two live members would take it from each other for ever.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiokafka import AIOKafkaConsumer
from aiokafka.client import ConnectionGroup
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import DescribeGroupsRequest

from idemconsumer.brokers.kafka import client as kafka_client
from idemconsumer.errors import Replaced

_SUFFIX: Final = len("-00000000-0000-0000-0000-000000000000")  # the broker puts it behind the id, as the member's id


class Seat:
    """Of one group, for as long as this process lives; `instance` None: the members of this process are dynamic."""

    def __init__(self, group: str, instance: str | None) -> None:
        self._group = group
        self.instance = instance
        self._member: str | None = None

    def taken(self, member: str) -> None:
        """This process has it, as `member`."""
        if self.instance is not None:
            self._member = member

    async def refuse(self, consumer: AIOKafkaConsumer) -> None:
        """To be awaited before a join that would take the place. Raises Replaced when somebody else has it by now.

        Who has never had it takes it from whomever: that is what a restart does. When Kafka does not answer, the join
        goes on, and whoever loses the place by it asks in its turn.
        """
        if self._member is None or consumer._coordinator.member_id == self._member:
            return
        mine, self._member = self._member, None  # of a join whose answer is lost only the broker knows the member
        if any(member != mine for member in await self._members(consumer)):
            raise Replaced(
                f"kafka group {self._group!r}: another process has joined under this worker's kafka_group_instance_id, "
                f"{self.instance!r}, and has its partitions; give each pod its own, such as the pod's name in a "
                "StatefulSet, or unset IDEMCONSUMER_KAFKA_GROUP_INSTANCE_ID (a Deployment needs none)"
            )

    async def _members(self, consumer: AIOKafkaConsumer) -> list[str]:
        """Who has this place: at most one."""
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
