"""`doctor`: what is wrong, or will be, for a person and for cron."""

from __future__ import annotations

import click
from click import argument

from idemconsumer.admin.doctor import Diagnosis, diagnose, pending
from idemconsumer.cli.verbs import Given, Output, printable, verb
from idemconsumer.errors import ConfigurationError
from idemconsumer.process.child import Exit

_COLORS = {"note": "cyan", "warning": "yellow", "error": "red"}


@verb("doctor", argument("target", metavar="[MODULE:APP]", required=False))
async def doctor(given: Given) -> Output:
    """Report what is wrong in a running system, or will be, and what to do about it.

    Exit code 0: nothing is wrong; there may be notes. 1: something is wrong, or the database cannot be reached. 2:
    wrong usage.

    Only reads. It finds pending migrations; stale leases; sagas, queues, retries and outgoing messages that no worker
    takes; sagas for review; workers that are lost or of different versions; handlers that are paused, fail, or wait for
    a lock, a source or the database; key secrets that differ from the schema's, or can be removed; long transactions,
    bloat, and tables that are larger than their rows. With MODULE:APP it also reports the warnings of `check`, such as
    brokers that keep messages longer than their records are kept.
    """
    found = await _all(given)
    lines = [
        f"{click.style(each.level.ljust(8), fg=_COLORS[each.level])} {printable(f'{each.subject}: {each.text}')}"
        for each in found
    ]
    wrong = any(each.level != "note" for each in found)
    return Output(found, lines or "nothing found", code=Exit.ERROR if wrong else Exit.DONE)


async def _all(given: Given) -> list[Diagnosis]:
    if given.target is None:
        lacking = await pending(*given.database)
        try:
            return lacking + await diagnose(*given.database)
        except ConfigurationError:
            if not lacking:
                raise
            return lacking  # which is why
    from idemconsumer.cli.inspect import findings
    from idemconsumer.cli.target import load_app

    settings = given.settings
    app = load_app(given.target)
    found = await diagnose(*given.database, app.name, app.sagas)
    said = {each.subject for each in found}
    return found + [
        Diagnosis(level=each.level, subject=each.subject, text=each.text)
        async for each in findings(app, settings)
        if each.level != "ok" and not (each.subject.startswith(("sagas of ", "key_secrets")) and each.subject in said)
    ]
