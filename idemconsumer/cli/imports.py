"""`import`: the keys of a hand-written table."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import click

from idemconsumer.admin.imports import Imported, Imports
from idemconsumer.admin.old_tables import Chosen
from idemconsumer.cli.options import RATE, as_json, database, need_dsn, print_json, printable
from idemconsumer.cli.target import load_app
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.settings import Settings, load

_SAID_EVERY = 2.0  # seconds


@click.command("import")
@click.argument("target", metavar="MODULE:APP")
@click.option("--handler", help="The handler whose keys these are; needed where the app has several.")
@click.option("--table", required=True, metavar="NAME", help="The table: NAME or SCHEMA.NAME, in the same database.")
@click.option(
    "--key-column",
    "key",
    required=True,
    multiple=True,
    metavar="COLUMN",
    help="What the handler's key is made of; several for Key.all and the like, in their order.",
)
@click.option("--tenant-column", "tenant", multiple=True, metavar="COLUMN", help="As --key-column, for the tenant.")
@click.option("--state-column", "--state", "state", metavar="COLUMN", help="Says whether the message was applied.")
@click.option("--done-values", "done", metavar="A,B", help="What that column has if it was.")
@click.option("--result-column", "--result", "result", metavar="COLUMN", help="What duplicates get as the result.")
@click.option(
    "--content-type",
    metavar="TYPE",
    help="Of the results.  [default: application/json, which has to be JSON; of bytea application/octet-stream]",
)
@click.option("--created-column", "created", metavar="COLUMN", help="Since when records are kept.  [default: now]")
@click.option("--where", metavar="SQL", help="Only rows for which this holds.")
@click.option("--rate", type=RATE, metavar="N", help="At most N rows in a second.")
@click.option("--dry-run", is_flag=True, help="Only say what would be taken.")
@database
@as_json
def import_(
    target: str,
    handler: str | None,
    done: str | None,
    rate: float | None,
    dry_run: bool,
    as_json: bool,
    dsn: str | None,
    schema: str | None,
    **flags: Any,
) -> None:
    """Take over the keys of a hand-written table, so that its messages do not run again.

    Each row becomes the record of a completed message. Workers, and who writes to the table, may go on meanwhile. An
    interrupted import goes on where it was when it is repeated; a finished one reads the whole table again, and takes
    what was added since. Rows that are not done are not taken, and listed. docs/migrating.md shows the whole cut-over.
    """
    settings = load(dsn=dsn, schema=schema, handlers=handler)
    chosen = Chosen(done=[] if done is None else [each.strip() for each in done.split(",")], **flags)
    which = _handler(target, settings)
    imports, last = Imports(need_dsn(settings), settings.schema), time.monotonic()

    def say(so_far: Imported) -> None:
        nonlocal last
        if time.monotonic() - last >= _SAID_EVERY:
            last = time.monotonic()
            click.echo(f"{so_far.rows:,} rows read, {so_far.taken:,} keys taken", err=True)

    imported = asyncio.run(imports.run(which, chosen, rate=rate, dry_run=dry_run, progress=say))
    if as_json:
        print_json(imported)
    else:
        _show(imported, which, dry_run=dry_run)


def _handler(target: str, settings: Settings) -> BoundHandler:
    handlers = load_app(target).bound_handlers(settings)
    if len(handlers) != 1:
        raise click.UsageError(f"{target} has {len(handlers)} handlers; say with --handler whose keys these are")
    return handlers[0]


def _show(imported: Imported, handler: BoundHandler, *, dry_run: bool) -> None:
    before = ", behind what an interrupted run had read" if imported.resumed else ""
    verb = "would take" if dry_run else "taken"
    click.echo(f"{verb}: {imported.taken:,} keys of {handler.app}/{handler.name}, from {imported.rows:,} rows{before}")
    if imported.there:
        click.echo(f"there already: {_counts(imported.there)}")
    if imported.not_done:
        click.echo(f"left: {imported.not_done.total():,} that are not done: {_counts(imported.not_done)}", err=True)
    if imported.too_old:
        click.echo(
            f"left: {imported.too_old:,} older than the handler's retain, after which a record is pruned", err=True
        )
    if imported.unusable:
        click.echo(f"left: {imported.unusable:,} whose key no message of this handler can have", err=True)
    for each in imported.left:
        row = ", ".join(f"{name}={value}" for name, value in each.row.items())
        click.echo(printable(f"  {row}: {each.why}"), err=True)


def _counts(counts: Counter[str]) -> str:
    return printable(", ".join(f"{number:,} {name}" for name, number in counts.most_common()))
