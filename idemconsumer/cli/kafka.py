"""`kafka`: what a person sets in Kafka and in the database together."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from idemconsumer.cli.banner import table
from idemconsumer.cli.options import as_json, database, deciding, need_dsn, print_json
from idemconsumer.settings import load


@click.group()
def kafka() -> None:
    """Kafka: where a consumer group begins to read."""


@kafka.command()
@click.argument("place", metavar="kafka:TOPIC[/PARTITION]")
@click.option("--group", required=True, help="The consumer group.")
@click.option("--to", required=True, metavar="WHERE", help="earliest, latest, an offset, or 2026-01-31T12:00+00:00.")
@deciding
@database
@as_json
def reset(place: str, group: str, to: str, by: str, as_json: bool, **flags: Any) -> None:
    """Set where a consumer group goes on: its offsets in Kafka and in the database.

    None of its workers may run: a group with live members is refused, and so is an offset that the log does not have. A
    record that is read again is a duplicate as long as its key is on record. Deleting or losing the offsets in Kafka
    alone changes nothing, since the database still has them.
    """
    from idemconsumer.admin.resets import reset as reset_offsets

    settings = load(**flags)
    moved = asyncio.run(reset_offsets(need_dsn(settings), settings, place, group, to, by=by))
    if as_json:
        print_json(moved)
        return
    rows = [
        (f"kafka:{each.topic}/{each.partition}", "none" if each.before is None else str(each.before), str(each.offset))
        for each in moved
    ]
    click.echo(table([("place", "before", "now"), *rows]))
