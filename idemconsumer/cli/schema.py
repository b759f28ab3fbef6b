"""`migrate`: the tables."""

from __future__ import annotations

import sys
from typing import Any

import click

from idemconsumer.cli.options import Finite, as_json, database, need_dsn, print_json
from idemconsumer.process.child import Exit
from idemconsumer.settings import load
from idemconsumer.sql.queries import check_schema
from idemconsumer.stores import grants as rights
from idemconsumer.stores import migrations
from idemconsumer.stores.migrations import Migration


@click.group()
def migrate() -> None:
    """Create or update the tables. Safe to run repeatedly and concurrently."""


@migrate.command()
@click.option(
    "--wait",
    type=Finite(0),
    metavar="SECONDS",
    help="Wait this long in total, for locks and for a database that takes no connections yet.  "
    "[default: 300 for locks; a database that cannot be reached is an error at once]",
)
@database
@as_json
def up(wait: float | None, as_json: bool, **flags: Any) -> None:
    """Apply the pending migrations, each in one transaction. Workers may go on meanwhile.

    If others hold a lock, this tries to get it for a short time, again and again, and reports the holder on stderr.

    \b
    Exit codes:
      0  all is applied
      1  a statement failed, or the database cannot be reached
      2  wrong usage, missing rights, or an applied file has changed
      5  a lock was not granted in time; earlier migrations stay, and `up` can be run again
    """
    settings = load(**flags)
    done: list[Migration] = []
    try:
        for each in migrations.apply(need_dsn(settings), settings.schema, wait=wait, say=_say):
            done.append(each)
            if not as_json:
                click.echo(f"applied {each}")
    except Exception:
        if as_json and done:  # they stay
            print_json([_row(each) for each in done])
        raise
    if as_json:
        print_json([_row(each) for each in done])
    elif not done:
        click.echo(f"schema {settings.schema} is up to date")


def _say(text: str) -> None:
    click.echo(text, err=True)


@migrate.command()
@database
@as_json
def status(as_json: bool, **flags: Any) -> None:
    """List applied and pending migrations; changes nothing.

    \b
    Exit codes:
      0  up to date
      1  the database cannot be reached
      2  wrong usage, missing rights, or an applied file has changed
      5  migrations are pending
      6  none is pending, and the schema has migrations that this version does not know
    """
    settings = load(**flags)
    found = migrations.status(need_dsn(settings), settings.schema)
    if as_json:
        print_json([_row(each) for each in found])
    else:
        for each in found:
            when = f"applied {each.applied_at:%Y-%m-%d %H:%M:%S %Z}" if each.applied_at else "pending"
            click.echo(f"{each}  {when}{'' if each.known else ', by a later version'}")
    if any(each.pending for each in found):
        sys.exit(Exit.PENDING)
    if not all(each.known for each in found):
        sys.exit(Exit.NEWER)


@migrate.command()
@click.option("--all", "everything", is_flag=True, help="Include applied migrations; needs no database.")
@database
def sql(everything: bool, **flags: Any) -> None:
    """Print the SQL that `up` would run, to run it by hand."""
    settings = load(**flags)
    wanted = (
        migrations.files()
        if everything
        else [each for each in migrations.status(need_dsn(settings), settings.schema) if each.pending]
    )
    click.echo(migrations.script(wanted, settings.schema), nl=False)


@migrate.command()
@click.option("--worker", metavar="ROLE", help="Runs handlers, and every other command that changes something.")
@click.option("--front-door", metavar="ROLE", help="Answers requests in web processes; runs `prune` and `keys forget`.")
@click.option("--producer", metavar="ROLE", help="Publishes to Postgres queues and sends signals; reads no message.")
@click.option("--reader", metavar="ROLE", help="Reads everything, payloads too; changes nothing.")
@click.option("--purge", metavar="ROLE", help="Runs `prune`; reads no results, and no messages but dead letters.")
@database
def grants(
    worker: str | None,
    front_door: str | None,
    producer: str | None,
    reader: str | None,
    purge: str | None,
    **flags: Any,
) -> None:
    """Print the SQL that gives roles the rights they need, and no others; runs nothing.

    Run that SQL as the role that migrates: once the schema exists, and again after each `migrate up`. It takes no
    rights away. No database is needed.
    """
    schema = load(**flags).schema
    check_schema(schema)
    wanted = {
        "worker": rights.worker(schema, worker) if worker else [],
        "front door": rights.front_door(schema, front_door) if front_door else [],
        "producer": rights.producer(schema, producer) if producer else [],
        "reader": rights.reader(schema, reader) if reader else [],
        "purge": rights.purge(schema, purge) if purge else [],
    }
    if not any(wanted.values()):
        raise click.UsageError("name a role: --worker, --front-door, --producer, --reader or --purge ROLE")
    for kind, statements in wanted.items():
        if statements:
            click.echo("\n".join([f"-- {kind}", *(f"{statement};" for statement in statements)]))


def _row(migration: Migration) -> dict[str, object]:
    return {
        "version": migration.version,
        "name": migration.name,
        "checksum": migration.checksum,
        "applied_at": migration.applied_at,
        "known": migration.known,
    }
