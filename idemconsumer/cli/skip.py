"""`skip` and `kafka`: what Kafka's client cannot read, and what is set in Kafka and in the database together."""

from __future__ import annotations

from click import argument, option

from idemconsumer.admin.stops import Stops
from idemconsumer.cli.flags import deciding
from idemconsumer.cli.verbs import Given, Output, Verbs, listed, verb


@verb(
    "skip",
    argument("place", metavar="[kafka:TOPIC/PARTITION@OFFSET]", required=False),
    option("--group", help="The consumer group, if several have stopped at that place."),
    deciding,
)
async def skip(given: Given) -> Output:
    """Skip what a Kafka worker cannot read: store it as a dead letter, and go on after it.

    A record or batch with a wrong checksum, compression or structure stops its partition; the worker logs its place
    each minute. Workers notice the decision within seconds. Without an argument, list the places where partitions have
    stopped.
    """
    stops = Stops(*given.database)
    if given.place is not None:
        stop = await stops.skip(given.place, given.group, by=given.by)
        return Output(stop, f"{stop.place} will be skipped up to {stop.next - 1} in group {stop.group}")
    found = await stops.stopped(given.group)
    rows = ((each.place, each.group, each.since, each.seen_at, each.error) for each in found)
    return Output(found, listed("place, group, since, last seen, error", rows, "no partition is blocked"))


kafka = Verbs("kafka", help="Kafka: where a consumer group begins to read.")


@kafka.verb(
    "reset",
    argument("place", metavar="kafka:TOPIC[/PARTITION]"),
    option("--group", required=True, help="The consumer group."),
    option("--to", required=True, metavar="WHERE", help="earliest, latest, an offset, or 2026-01-31T12:00+00:00."),
    deciding,
)
async def reset(given: Given) -> Output:
    """Set where a consumer group goes on: its offsets in Kafka and in the database.

    None of its workers may run: a group with live members is refused, and so is an offset that the log does not have. A
    record that is read again is a duplicate as long as its key is on record. Deleting or losing the offsets in Kafka
    alone changes nothing, since the database still has them.
    """
    from idemconsumer.admin import resets  # an optional driver

    dsn, _ = given.database
    moved = await resets.reset(dsn, given.settings, given.place, given.group, given.to, by=given.by)
    rows = (
        (f"kafka:{each.topic}/{each.partition}", "none" if each.before is None else each.before, each.offset)
        for each in moved
    )
    return Output(moved, listed("place, before, now", rows, ""))
