"""Positions of Kafka's partitions in a test's database, some of whose answers the test changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import psycopg

from idemconsumer.errors import StoreUnavailable
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.kafka_positions import Kept, Place, PostgresPositions, Reached


@dataclass
class Database(PostgresPositions):
    """Positions as a worker keeps them, some of whose answers a test changes."""

    dsn: str
    real: PostgresPositions
    away: bool = False
    moved: timedelta = field(default_factory=timedelta)

    async def server_started(self) -> datetime:
        return await self.real.server_started() + self.moved

    async def read(self, cluster: str, group: str, topics: Sequence[str]) -> tuple[datetime, Mapping[Place, Kept]]:
        if self.away:
            raise StoreUnavailable("away")
        server, kept = await self.real.read(cluster, group, topics)
        return server + self.moved, kept

    async def begin(
        self, cluster: str, group: str, histories: Mapping[Place, Kept], server: datetime
    ) -> Mapping[Place, int]:
        return await self.real.begin(cluster, group, histories, server - self.moved)

    async def save(
        self, cluster: str, group: str, positions: Mapping[Place, Reached], server: datetime
    ) -> Mapping[Place, int]:
        if self.away:
            raise StoreUnavailable("away")
        return await self.real.save(cluster, group, positions, server - self.moved)

    async def stop(self, cluster: str, group: str, place: Place, first: int, following: int, error: str) -> bool:
        return await self.real.stop(cluster, group, place, first, following, error)

    async def leave(self, cluster: str, group: str, place: Place) -> None:
        await self.real.leave(cluster, group, place)

    def do(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def position(self) -> int:
        return int(self.do("select position from idemconsumer.kafka_position")[0][0])


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[Database]:
    store = await PostgresStore.open(dsn, "idemconsumer", connections=4, longest_run=30.0)
    try:
        yield Database(dsn, PostgresPositions(store.pool))
    finally:
        await store.close()
