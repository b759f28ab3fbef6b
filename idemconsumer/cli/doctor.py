"""`doctor`: what is wrong, or will be, for a person and for cron."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click

from idemconsumer.admin.doctor import Diagnosis, diagnose, pending
from idemconsumer.cli.options import as_json, database, need_dsn, print_json, printable
from idemconsumer.errors import ConfigurationError
from idemconsumer.process.child import Exit
from idemconsumer.settings import Settings, load

_COLORS = {"note": "cyan", "warning": "yellow", "error": "red"}


@click.command()
@click.argument("target", metavar="[MODULE:APP]", required=False)
@database
@as_json
def doctor(target: str | None, as_json: bool, **flags: Any) -> None:
    """Report what is wrong in a running system, or will be, and what to do about it.

    Exit code 0: nothing is wrong; there may be notes. 1: something is wrong, or the database cannot be reached. 2:
    wrong usage.

    Only reads. It finds pending migrations; stale leases; sagas, queues, retries and outgoing messages that no worker
    takes; sagas for review; workers that are lost or of different versions; handlers that are paused, fail, or wait for
    a lock, a source or the database; key secrets that differ from the schema's, or can be removed; long transactions,
    bloat, and tables that are larger than their rows. With MODULE:APP it also reports the warnings of `check`, such as
    brokers that keep messages longer than their records are kept.
    """
    settings = load(**flags)
    found = asyncio.run(_all(target, settings))
    if as_json:
        print_json(found)
    else:
        for each in found:
            mark = click.style(each.level.ljust(8), fg=_COLORS[each.level])
            click.echo(f"{mark} {printable(each.subject)}: {printable(each.text)}")
        if not found:
            click.echo("nothing found")
    if any(each.level != "note" for each in found):
        sys.exit(Exit.ERROR)


async def _all(target: str | None, settings: Settings) -> list[Diagnosis]:
    if target is None:
        lacking = await pending(need_dsn(settings), settings.schema)
        try:
            return lacking + await diagnose(need_dsn(settings), settings.schema)
        except ConfigurationError:
            if not lacking:
                raise
            return lacking  # which is why
    from idemconsumer.cli.inspect import findings
    from idemconsumer.cli.target import load_app

    app = load_app(target)
    found = await diagnose(need_dsn(settings), settings.schema, app.name, app.sagas)
    said = {each.subject for each in found}
    return found + [
        Diagnosis(level=each.level, subject=each.subject, text=each.text)
        async for each in findings(app, settings)
        if each.level != "ok" and not (each.subject.startswith(("sagas of ", "key_secrets")) and each.subject in said)
    ]
