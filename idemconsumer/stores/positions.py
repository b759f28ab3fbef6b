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
        given = {
            "cluster": cluster,
            "group": group,
            "server": server,
            "topics": [topic for topic, _ in histories],
            "partitions": [partition for _, partition in histories],
            "histories": [each.history for each in histories.values()],
            "bases": [each.base for each in histories.values()],
            "counters": [each.counter for each in histories.values()],
            "positions": [each.position for each in histories.values()],
            "leaders": [each.leader for each in histories.values()],
        }
        rows = await self._pool.alone("begin_kafka_positions", given)
        return {(topic, partition): counter for topic, partition, counter in rows}

    async def save(
        self, cluster: str, group: str, positions: Mapping[Place, Reached], server: datetime
    ) -> Mapping[Place, int]:
        given = {
            "cluster": cluster,
            "group": group,
            "server": server,
            "topics": [topic for topic, _ in positions],
            "partitions": [partition for _, partition in positions],
            "histories": [each.history for each in positions.values()],
            "positions": [each.position for each in positions.values()],
            "leaders": [each.leader for each in positions.values()],
            "left": [each.left for each in positions.values()],
        }
        rows = await self._pool.alone("save_kafka_positions", given)
        return {(topic, partition): counter for topic, partition, counter in rows}

    async def stop(self, cluster: str, group: str, place: Place, first: int, following: int, error: str) -> bool:
        given = _at(cluster, group, place) | {"first": first, "next": following, "error": clean(error)}
        return bool((await self._pool.alone("stop_kafka_partition", given))[0][0])

    async def leave(self, cluster: str, group: str, place: Place) -> None:
        await self._pool.alone("leave_kafka_stop", _at(cluster, group, place))


def _at(cluster: str, group: str, place: Place) -> dict[str, Any]:
    return {"cluster": cluster, "group": group, "topic": place[0], "partition": place[1]}
