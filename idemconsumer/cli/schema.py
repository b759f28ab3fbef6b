"""`migrate`: the tables."""

from __future__ import annotations

from typing import Any

import click

from idemconsumer.cli.options import as_json, database, need_dsn, print_json
from idemconsumer.settings import load
from idemconsumer.stores import migrations
from idemconsumer.stores.migrations import Migration


@click.group()
def migrate() -> None:
    """Create or update the tables. Safe to run repeatedly and concurrently."""


@migrate.command()
@database
@as_json
def up(as_json: bool, **flags: Any) -> None:
    """Apply the pending migrations, each in one transaction."""
    settings = load(**flags)
    done = migrations.migrate(need_dsn(settings), settings.schema)
    if as_json:
        print_json([_row(each) for each in done])
        return
    for each in done:
        click.echo(f"applied {each.version:04}_{each.name}")
    if not done:
        click.echo(f"schema {settings.schema} is up to date")


@migrate.command()
@database
@as_json
def status(as_json: bool, **flags: Any) -> None:
    """List applied and pending migrations; changes nothing."""
    settings = load(**flags)
    found = migrations.status(need_dsn(settings), settings.schema)
    if as_json:
        print_json([_row(each) for each in found])
        return
    for each in found:
        when = f"applied {each.applied_at:%Y-%m-%d %H:%M:%S %Z}" if each.applied_at else "pending"
        click.echo(f"{each.version:04}_{each.name}  {when}")


@migrate.command()
@click.option("--all", "everything", is_flag=True, help="Include applied migrations; needs no database.")
@database
def sql(everything: bool, **flags: Any) -> None:
    """Print the SQL that `up` would run, to run it by hand."""
    settings = load(**flags)
    wanted = (
        migrations.files()
        if everything
        else [each for each in migrations.status(need_dsn(settings), settings.schema) if each.applied_at is None]
    )
    click.echo(migrations.script(wanted, settings.schema), nl=False)


def _row(migration: Migration) -> dict[str, object]:
    return {
        "version": migration.version,
        "name": migration.name,
        "checksum": migration.checksum,
        "applied_at": migration.applied_at,
    }
