"""Positions in Kafka's partitions, in Postgres, to notice if Kafka or the database is ahead of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from idemconsumer.stores.literals import clean
from idemconsumer.stores.pool import Pool


@dataclass(frozen=True, slots=True)
class Kept:
    """What the database knows of a partition: every message from `base` up to `position` is decided in it.

    `history` names the reading that began at `base`; `counter` grows with each write, also from one history to the
    next. `quiet`: the counter at which its last reader left with nothing in flight. `leader`: an epoch. All that the
    log has of this and earlier epochs below `position` is what was read (K21). None if unknown.
    """

    history: str
    base: int
    counter: int = 0
    position: int = 0
    quiet: int | None = None
    leader: int | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """Up to where a reader has finished, and the leader epoch of the message before that. `left`: the counter of its
    last write, if it leaves with nothing in flight."""

    history: str
    position: int
    leader: int | None = None
    left: int | None = None


Place = tuple[str, int]  # topic and partition


class PostgresPositions:
    """Every method raises StoreUnavailable when the database is down, and CommitUnknown when an answer was lost."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def server_started(self) -> datetime:
        """See `Pool`."""
        return await self._pool.server_started()

    async def read(self, cluster: str, group: str, topics: Sequence[str]) -> tuple[datetime, Mapping[Place, Kept]]:
        """When the answering server was started, and what it knows of the partitions."""
        given = {"cluster": cluster, "group": group, "topics": list(topics)}
        rows = await self._pool.alone("kafka_positions", given)
        return rows[0][0], {(topic, partition): Kept(*kept) for _, topic, partition, *kept in rows if topic is not None}

    async def begin(
        self, cluster: str, group: str, histories: Mapping[Place, Kept], server: datetime
    ) -> Mapping[Place, int]:
        """Record that these are being read: an existing history is continued, any other begins at its `base`. Returns
        their counters; none if another server answers now, and nothing was written."""
        its = {"histories": "history", "bases": "base", "counters": "counter", "positions": "position"}
        its["leaders"] = "leader"
        return await self._write("begin_kafka_positions", cluster, group, histories, server, its)

    async def save(
        self, cluster: str, group: str, positions: Mapping[Place, Reached], server: datetime
    ) -> Mapping[Place, int]:
        """Save the position in each history; returns their counters. A partition that has another history by now is
        missing; all are missing if another server answers. The record of a reader that has `left` is deleted, unless
        another one has written since."""
        its = {"histories": "history", "positions": "position", "leaders": "leader", "left": "left"}
        return await self._write("save_kafka_positions", cluster, group, positions, server, its)

    async def _write(
        self, name: str, cluster: str, group: str, rows: Mapping[Place, Any], server: datetime, its: Mapping[str, str]
    ) -> Mapping[Place, int]:
        """The counter of each. `its`: which field of a row goes into which array of the statement."""
        given: dict[str, Any] = {"cluster": cluster, "group": group, "server": server}
        given |= {"topics": [topic for topic, _ in rows], "partitions": [partition for _, partition in rows]}
        given |= {array: [getattr(each, field) for each in rows.values()] for array, field in its.items()}
        return {(topic, partition): counter for topic, partition, counter in await self._pool.alone(name, given)}

    async def stop(self, cluster: str, group: str, place: Place, first: int, following: int, error: str) -> bool:
        """Record that a reader has stopped at messages it cannot read, from `first` up to `following`. Returns whether
        a person wants a dead letter in their place."""
        given = _at(cluster, group, place) | {"first": first, "next": following, "error": clean(error)}
        return bool((await self._pool.alone("stop_kafka_partition", given))[0][0])

    async def leave(self, cluster: str, group: str, place: Place) -> None:
        """Delete that record: the messages could be read after all."""
        await self._pool.alone("leave_kafka_stop", _at(cluster, group, place))


@runtime_checkable
class KeepsPositions(Protocol):
    """A broker whose sessions compare their positions with those in the database."""

    def keep_positions_in(self, positions: PostgresPositions) -> None:
        """To be called before a session is opened."""


def _at(cluster: str, group: str, place: Place) -> dict[str, Any]:
    return {"cluster": cluster, "group": group, "topic": place[0], "partition": place[1]}
