"""Positions in Kafka's partitions, in Postgres. See `ports.positions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from idemconsumer.ports.positions import Kept, Place, Reached
from idemconsumer.stores.literals import clean
from idemconsumer.stores.pool import Pool


class PostgresPositions:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def server_started(self) -> datetime:
        return await self._pool.server_started()

    async def read(self, cluster: str, group: str, topics: Sequence[str]) -> tuple[datetime, Mapping[Place, Kept]]:
        given = {"cluster": cluster, "group": group, "topics": list(topics)}
        rows = await self._pool.alone("kafka_positions", given)
        return rows[0][0], {(topic, partition): Kept(*kept) for _, topic, partition, *kept in rows if topic is not None}

    async def begin(
        self, cluster: str, group: str, histories: Mapping[Place, Kept], server: datetime
    ) -> Mapping[Place, int]:
        its = {"histories": "history", "bases": "base", "counters": "counter", "positions": "position"}
        its["leaders"] = "leader"
        return await self._write("begin_kafka_positions", cluster, group, histories, server, its)

    async def save(
        self, cluster: str, group: str, positions: Mapping[Place, Reached], server: datetime
    ) -> Mapping[Place, int]:
        its = {"histories": "history", "positions": "position", "leaders": "leader", "left": "left"}
        return await self._write("save_kafka_positions", cluster, group, positions, server, its)

    async def _write(
        self, name: str, cluster: str, group: str, rows: Mapping[Place, Any], server: datetime, its: Mapping[str, str]
    ) -> Mapping[Place, int]:
        """The counter of each. `its`: what of a row is in which array of the statement."""
        given: dict[str, Any] = {"cluster": cluster, "group": group, "server": server}
        given |= {"topics": [topic for topic, _ in rows], "partitions": [partition for _, partition in rows]}
        given |= {array: [getattr(each, field) for each in rows.values()] for array, field in its.items()}
        return {(topic, partition): counter for topic, partition, counter in await self._pool.alone(name, given)}

    async def stop(self, cluster: str, group: str, place: Place, first: int, following: int, error: str) -> bool:
        given = _at(cluster, group, place) | {"first": first, "next": following, "error": clean(error)}
        return bool((await self._pool.alone("stop_kafka_partition", given))[0][0])

    async def leave(self, cluster: str, group: str, place: Place) -> None:
        await self._pool.alone("leave_kafka_stop", _at(cluster, group, place))


def _at(cluster: str, group: str, place: Place) -> dict[str, Any]:
    return {"cluster": cluster, "group": group, "topic": place[0], "partition": place[1]}
