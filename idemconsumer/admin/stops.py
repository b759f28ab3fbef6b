"""Kafka partitions that are stopped at an unreadable record (K13), and the decision to skip it."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

import msgspec

from idemconsumer.admin.audit import Trace
from idemconsumer.admin.sender import Statements
from idemconsumer.errors import ConfigurationError

_PLACE: Final = re.compile(r"kafka:([^/@\s]+)/(\d+)@(\d+)")


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """A group's reader cannot read the offsets from `first` up to, not including, `next`. A worker was last stopped
    there at `seen_at`; times are the database's."""

    group: str
    topic: str
    partition: int
    first: int
    next: int
    error: str
    since: datetime
    seen_at: datetime

    @property
    def place(self) -> str:
        return f"kafka:{self.topic}/{self.partition}@{self.first}"


class Stops:
    """The stops of one schema, with a new connection for each call. Raises like `Admin`."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema)

    async def stopped(self, group: str | None = None) -> list[Stop]:
        return await self._find(group, None, None, None)

    async def skip(self, place: str, group: str | None = None, *, by: str) -> Stop:
        """Have a worker write a dead letter for the unreadable offsets within seconds, and continue after them. `place`
        is as in `Stop.place`; `group` is needed if several groups are stopped there. Raises ConfigurationError if no
        worker is stopped at that place."""
        if (found := _PLACE.fullmatch(place)) is None:
            raise ConfigurationError(f"{place!r} is not a place in Kafka; write kafka:TOPIC/PARTITION@OFFSET")
        topic, partition, first = found[1], int(found[2]), int(found[3])
        stops = await self._find(group, topic, partition, first)
        if not stops:
            elsewhere = ", ".join(stop.place for stop in await self.stopped(group)) or "none"
            raise ConfigurationError(f"no partition is blocked at {place}; blocked: {elsewhere}")
        if len(stops) > 1:
            groups = ", ".join(stop.group for stop in stops)
            raise ConfigurationError(f"several groups are blocked at {place}: {groups}; choose one with --group")
        async with self._sql.changing() as send:
            await send("skip_kafka_stop", group=stops[0].group, topic=topic, partition=partition, first=first)
            await Trace(by, "skip").write(send, f"{stops[0].place} in group {stops[0].group}")
        return stops[0]

    async def _find(self, group: str | None, topic: str | None, partition: int | None, first: int | None) -> list[Stop]:
        given = {"group": group, "topic": topic, "partition": partition, "first": first}
        return await self._sql.values(Stop, "list_kafka_stops", **given)
