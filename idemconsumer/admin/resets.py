"""Where a Kafka group begins: a person sets its offsets in Kafka and its rows in the database together (K20)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from idemconsumer.admin.audit import Trace
from idemconsumer.admin.sender import Statements
from idemconsumer.brokers.kafka.resetting import Move, group_offsets
from idemconsumer.brokers.kafka.start import history_of, next_counter
from idemconsumer.errors import ConfigurationError
from idemconsumer.settings import Settings

_PLACE: Final = re.compile(r"kafka:([^/@\s]+)(?:/(\d+))?")


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """A group's offset in a partition, before the reset (None: it had none) and after it."""

    group: str
    topic: str
    partition: int
    before: int | None
    offset: int


async def reset(dsn: str, settings: Settings, place: str, group: str, to: str, *, by: str) -> list[Reset]:
    """Set a group's offsets in a topic, or in one partition of it, in Kafka and in the database: both or none.

    The group must have no members. Afterwards its next worker begins there, whatever the group has read before. Raises
    like `Admin`, BrokerUnavailable, and ConfigurationError for an invalid place or offset.
    """
    if (found := _PLACE.fullmatch(place)) is None:
        raise ConfigurationError(f"{place!r} is not a place in Kafka; write kafka:TOPIC, or kafka:TOPIC/PARTITION")
    topic, partition, begin = found[1], None if found[2] is None else int(found[2]), _begin(to)
    if isinstance(begin, int) and partition is None:
        raise ConfigurationError(f"offset {begin} belongs to one partition; write kafka:{topic}/PARTITION")
    async with group_offsets(settings, group) as kafka:
        moves = await kafka.moves(settings.kafka or "", topic, partition, begin)
        topic_id = await kafka.topic_id(topic)
        async with Statements(dsn, settings.schema).changing() as send:
            at = {"cluster": kafka.cluster, "group": group}
            rows = await send("kafka_positions", **at, topics=[topic])
            given = at | {"server": rows[0]["started"], "topics": [topic] * len(moves)} | _columns(moves)
            given["histories"] = [history_of(topic_id, uuid.uuid4().hex[:16]) for _ in moves]
            await send("begin_kafka_positions", **given)
            for each in moves:
                await send("leave_kafka_stop", **at, topic=topic, partition=each.partition)
            await Trace(by, "kafka reset").write(send, f"{place} in group {group} to {to}")
            # Kafka comes last. If this fails, the rows are rolled back. If the COMMIT fails afterwards, only Kafka's
            # offset is new, and it is obeyed.
            await kafka.commit(topic, moves)
    return [
        Reset(group=group, topic=topic, partition=each.partition, before=each.before, offset=each.offset)
        for each in moves
    ]


def _columns(moves: Sequence[Move]) -> dict[str, Sequence[int | None]]:
    offsets = [each.offset for each in moves]
    return {
        "partitions": [each.partition for each in moves],
        "bases": offsets,
        "counters": [next_counter(each.mark, None) for each in moves],  # and, by the statement, higher than the row's
        "positions": offsets,
        "leaders": [each.leader for each in moves],
    }


def _begin(to: str) -> str | int | datetime:
    if to in ("earliest", "latest"):
        return to
    if to.isdecimal():
        return int(to)
    try:
        time = datetime.fromisoformat(to)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise ConfigurationError(
            f"{to!r} is not a place to begin; write earliest, latest, an offset, or a time with its zone, such as "
            "2026-01-31T12:00+00:00"
        )
    return time
