"""Hearing of a member's id before the group counts on that member (K15).

A dynamic member first asks for an id, and joins with it in a second request. The client tells of the id only when the
group has agreed, which takes as long as its slowest member; who dies meanwhile would be waited for.
"""

from __future__ import annotations

from collections.abc import Callable

from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.group_coordinator import GroupCoordinator

Report = Callable[[str], None]


class _Reporting(GroupCoordinator):  # type: ignore[misc]
    """What the client's coordinator becomes: of another class, and the same otherwise."""

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
    """From now on `report` is told each id as soon as the client has it. Call it after `start`, before subscribing."""
    coordinator = consumer._coordinator
    coordinator._report = report
    coordinator.__class__ = _Reporting
