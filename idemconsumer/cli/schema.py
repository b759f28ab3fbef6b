"""`migrate`: the schema and its migrations."""

from __future__ import annotations

from functools import partial

import click
from click import option

from idemconsumer.cli.flags import Finite, database, flag
from idemconsumer.cli.verbs import Given, Output, Verbs, print_json
from idemconsumer.process.child import Exit
from idemconsumer.sql.queries import check_schema
from idemconsumer.stores import grants as rights
from idemconsumer.stores import migrations
from idemconsumer.stores.migrations import Migration

_ROLES = {
    "worker": ("Runs handlers, and every other command that changes something.", rights.worker),
    "front-door": ("Answers requests in web processes; runs `prune` and `keys forget`.", rights.front_door),
    "producer": ("Publishes to Postgres queues and sends signals; reads no message.", rights.producer),
    "reader": ("Reads everything, payloads too; changes nothing.", rights.reader),
    "purge": ("Runs `prune`; reads no results, and no messages but dead letters.", rights.purge),
}


migrate = Verbs("migrate", help="Create or update the tables. Safe to run repeatedly and concurrently.")


@migrate.verb(
    "up",
    option(
        "--wait",
        type=Finite(0),
        metavar="SECONDS",
        help="The total time to wait for locks, and for a database that does not accept connections yet.  "
        "[default: 300 for locks; a database that cannot be reached is an error at once]",
    ),
)
def up(given: Given) -> Output:
    """Apply the pending migrations, each in one transaction. Workers can keep running.

    If another session holds a lock, the command tries again and again, briefly each time, and reports that session on
    stderr.

    \b
    Exit codes:
      0  all is applied
      1  a statement failed, or the database cannot be reached
      2  wrong usage, missing rights, or an applied file has changed
      5  a lock was not granted in time; earlier migrations stay, and `up` can be run again
    """
    dsn, schema = given.database
    done: list[Migration] = []
    try:
        for each in migrations.apply(dsn, schema, wait=given.wait, say=partial(click.echo, err=True)):
            done.append(each)
            if not given.as_json:
                click.echo(f"applied {each}")
    except Exception:
        if given.as_json and done:  # the applied ones stay
            print_json(_rows(done))
        raise
    return Output(_rows(done), () if done else f"schema {schema} is up to date")


@migrate.verb("status")
def status(given: Given) -> Output:
    """List applied and pending migrations; changes nothing.

    \b
    Exit codes:
      0  up to date
      1  the database cannot be reached
      2  wrong usage, missing rights, or an applied file has changed
      5  migrations are pending
      6  none is pending, and the schema has migrations that this version does not know
    """
    found = migrations.status(*given.database)
    lines = []
    for each in found:
        when = f"applied {each.applied_at:%Y-%m-%d %H:%M:%S %Z}" if each.applied_at else "pending"
        lines.append(f"{each}  {when}{'' if each.known else ', by a later version'}")
    newer = Exit.DONE if all(each.known for each in found) else Exit.NEWER
    return Output(_rows(found), lines, code=Exit.PENDING if any(each.pending for each in found) else newer)


@migrate.verb("sql", flag("--all", "everything", help="Include applied migrations; needs no database."), ends=database)
def sql(given: Given) -> None:
    """Print the SQL that `up` would run, to run it by hand."""
    known = migrations.files() if given.everything else migrations.status(*given.database)
    wanted = [each for each in known if given.everything or each.pending]
    click.echo(migrations.script(wanted, given.settings.schema), nl=False)


@migrate.verb(
    "grants", *(option(f"--{role}", metavar="ROLE", help=text) for role, (text, _) in _ROLES.items()), ends=database
)
def grants(given: Given) -> Output:
    """Print the SQL that gives roles the rights they need, and no others; runs nothing.

    Run that SQL as the role that migrates: once the schema exists, and again after each `migrate up`. It takes no
    rights away. No database is needed.
    """
    schema = given.settings.schema
    check_schema(schema)
    lines = list[str]()
    for role, (_, statements) in _ROLES.items():
        if name := getattr(given, role.replace("-", "_")):
            lines += [f"-- {role.replace('-', ' ')}", *(f"{each};" for each in statements(schema, name))]
    if not lines:
        raise click.UsageError("name a role: --worker, --front-door, --producer, --reader or --purge ROLE")
    return Output(text=lines)


def _rows(found: list[Migration]) -> list[dict[str, object]]:
    names = ("version", "name", "checksum", "applied_at", "known")
    return [{name: getattr(each, name) for name in names} for each in found]
