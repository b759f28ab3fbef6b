"""`skip`: what Kafka's client cannot read."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from idemconsumer.admin.stops import Stops
from idemconsumer.cli.banner import table
from idemconsumer.cli.options import as_json, database, deciding, need_dsn, print_json, printable
from idemconsumer.settings import load


@click.command()
@click.argument("place", metavar="[kafka:TOPIC/PARTITION@OFFSET]", required=False)
@click.option("--group", help="The consumer group, if several have stopped at that place.")
@deciding
@database
@as_json
def skip(place: str | None, group: str | None, by: str, as_json: bool, **flags: Any) -> None:
    """Skip what a Kafka worker cannot read: store it as a dead letter, and go on after it.

    A record or batch with a wrong checksum, compression or structure stops its partition; the worker logs its place
    each minute. Workers notice the decision within seconds. Without an argument, list the places where partitions have
    stopped.
    """
    settings = load(**flags)
    stops = Stops(need_dsn(settings), settings.schema)
    if place is not None:
        stop = asyncio.run(stops.skip(place, group, by=by))
        if as_json:
            print_json(stop)
        else:
            click.echo(f"{stop.place} will be skipped up to {stop.next - 1} in group {stop.group}")
        return
    found = asyncio.run(stops.stopped(group))
    if as_json:
        print_json(found)
        return
    rows: list[tuple[str, ...]] = [("place", "group", "since", "last seen", "error")]
    for each in found:
        times = (f"{each.since:%Y-%m-%d %H:%M:%S}", f"{each.seen_at:%Y-%m-%d %H:%M:%S}")
        rows.append((each.place, printable(each.group), *times, printable(each.error)))
    click.echo(table(rows) if found else "no partition is blocked")
