"""`doctor`: reports present and future problems, for people and for cron."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import click
from click import argument

from idemconsumer.admin.doctor import diagnose, pending
from idemconsumer.cli.layout import printable
from idemconsumer.cli.verbs import Given, Output, verb
from idemconsumer.errors import ConfigurationError
from idemconsumer.ports.broker import Finding
from idemconsumer.process.child import Exit

_COLORS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def leveled(found: Iterable[Finding], said: Callable[[str], str] = str) -> Iterator[str]:
    """One line for each finding."""
    for each in found:
        yield f"{click.style(each.level.ljust(8), fg=_COLORS[each.level])} {said(f'{each.subject}: {each.text}')}"


@verb("doctor", argument("target", metavar="[MODULE:APP]", required=False))
async def doctor(given: Given) -> Output:
    """Report what is wrong in a running system, or will be, and what to do about it.

    Exit code 0: nothing is wrong; there may be notes. 1: something is wrong, or the database cannot be reached. 2:
    wrong usage.

    Only reads. It finds pending migrations; stale leases; sagas, queues, retries and outgoing messages that no worker
    takes; sagas that wait for a person; workers that are lost or of different versions; handlers that are paused, fail,
    or wait for a lock, a source or the database; key secrets that differ from the schema's, or can be removed; long
    transactions, bloat, and tables that are larger than their rows. With MODULE:APP it also reports the warnings of
    `check`, such as brokers that keep messages longer than their records are kept.
    """
    found = await _all(given)
    text = leveled(found, printable) if found else "nothing found"
    return Output(found, text, code=Exit.ERROR if any(each.level != "note" for each in found) else Exit.DONE)


async def _all(given: Given) -> list[Finding]:
    if given.target is None:
        lacking = await pending(*given.database)
        try:
            return lacking + await diagnose(*given.database)
        except ConfigurationError:
            if not lacking:
                raise
            return lacking  # that explains the error
    from idemconsumer.cli.inspect import findings
    from idemconsumer.cli.target import load_app

    settings = given.settings
    app = load_app(given.target)
    found = await diagnose(*given.database, app.name, app.sagas)
    said = {each.subject for each in found}
    return found + [
        each
        async for each in findings(app, settings)
        if each.level != "ok" and not (each.subject.startswith(("sagas of ", "key_secrets")) and each.subject in said)
    ]
