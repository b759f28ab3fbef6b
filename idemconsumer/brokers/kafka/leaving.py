"""Leaving a group for a member that has died."""

from __future__ import annotations

from collections.abc import Mapping

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.group import LeaveGroupRequest

from idemconsumer.brokers.kafka.client import words
from idemconsumer.brokers.kafka.connection import connection_options
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.settings import Settings


async def leave(settings: Settings, memberships: Mapping[str, str]) -> None:
    """Each group at once gives to others what that member had (K15). A member that is not known is ignored.

    Only for members that have ended: one that lives would be refused whatever it commits. Raises BrokerUnavailable.
    """
    admin = AIOKafkaAdminClient(**connection_options(settings))
    try:
        await admin.start()
        for group, member in memberships.items():
            coordinator = await admin.find_coordinator(group)
            await admin._send_request(LeaveGroupRequest(group, member), coordinator)
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnavailable(
            f"Kafka at {settings.kafka}: could not leave a dead worker's groups: {words(error)}"
        ) from error
    finally:
        await admin.close()
