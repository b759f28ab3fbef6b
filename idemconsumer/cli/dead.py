"""`dead`: messages put aside for a person, and the way back."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from idemconsumer.admin.dead_letters import Admin, DeadLetterDetail, Redrive, Which
from idemconsumer.admin.redrives import Redrives, Run
from idemconsumer.cli.banner import table
from idemconsumer.cli.dead_runs import dead_runs
from idemconsumer.cli.letters import letter_json, show, time_of
from idemconsumer.cli.options import (
    ID,
    RATE,
    as_json,
    database,
    deciding,
    need_choice,
    need_dsn,
    print_json,
    printable,
    say_left,
)
from idemconsumer.cli.unknown import say_unknown
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.process.child import Exit
from idemconsumer.rules.letters import Redriven
from idemconsumer.settings import load

F = TypeVar("F", bound=Callable[..., Any])

_ERROR_WIDTH = 60
_FILTERS = ("handler", "app", "tenant", "reason", "error", "since", "until", "key", "prefix")
_LEFT = {
    Redriven.INCOMPLETE: "whose whole message is not kept; have their producer send them again",
    Redriven.SAGA: "whose sagas have begun meanwhile; repeat this",
    Redriven.BUSY: "about which somebody else is deciding now; repeat this",
    Redriven.REDRIVEN: "which somebody else has just redriven",
    Redriven.DECIDED: "whose key is not dead any more: it was applied or rejected since, or waits for its next attempt",
}


def _chosen(command: F) -> F:
    """Options that choose letters."""
    for option in reversed(
        (
            click.option("--handler", help="Only dead letters of this handler."),
            click.option("--reason", help="Only dead letters with this reason."),
            click.option("--error", metavar="TEXT", help="Only dead letters with this text in their error."),
            click.option("--app", help="Only dead letters of this app."),
            click.option("--tenant", help="Only dead letters of this tenant."),
            click.option("--since", metavar="DURATION", help="Only those that arrived in the last 2h, 7d, …"),
            click.option("--until", metavar="DURATION", help="Only those that arrived before the last 2h, 7d, …"),
            click.option("--key", metavar="TEXT", help="Only those of this key; with --handler."),
            click.option(
                "--hash", "prefix", metavar="HEX", help="Only those whose stored key begins with these digits."
            ),
        )
    ):
        command = option(command)
    return command


async def _which(admin: Admin, given: dict[str, Any], **more: Any) -> Which:
    """From the options of `_chosen`, which it takes out of `given`."""
    key = given.pop("key")
    chosen = {name: given.pop(name) for name in ("handler", "app", "tenant", "reason", "error", "prefix")}
    if key is not None and chosen["handler"] is None:
        raise click.UsageError("--key TEXT needs --handler NAME; or write --hash HEX")
    keys = None if key is None else await admin.stored_keys(chosen["handler"], key, tenant=chosen["tenant"])
    since, until = (None if (text := given.pop(name)) is None else parse_duration(text) for name in ("since", "until"))
    return Which(keys=keys, since=since, until=until, **chosen, **more)


def _matched(letters: int, flags: Mapping[str, Any], ids: tuple[int, ...] = ()) -> None:
    """Exit 1 where something was chosen and nothing is there: a script that misspells a handler has to learn of it."""
    say_left(ids, letters, "dead letter")
    if letters or not (ids or any(flags[name] is not None for name in _FILTERS)):
        return
    click.echo("no dead letter is chosen by this", err=True)
    say_unknown(load(dsn=flags["dsn"], schema=flags["schema"]), flags["handler"])
    sys.exit(Exit.ERROR)


def _admin(flags: dict[str, Any]) -> Admin:
    settings = load(**{name: flags.pop(name) for name in ("dsn", "schema")})
    return Admin(need_dsn(settings), settings.schema)


@click.group()
def dead() -> None:
    """Dead letters: messages that wait for a person."""


@dead.command("list")
@_chosen
@click.option("--redriven", is_flag=True, help="Also those that were redriven and have not failed again.")
@click.option("--before", type=ID, metavar="ID", help="Go on after this one; the last line names it.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=50, metavar="N", help="List at most N.  [default: 50]"
)
@database
@as_json
def dead_list(redriven: bool, before: int | None, limit: int, as_json: bool, **flags: Any) -> None:
    """List dead letters, newest first."""
    settings, handler = load(dsn=flags["dsn"], schema=flags["schema"]), flags["handler"]
    admin = _admin(flags)

    async def read() -> Any:
        return await admin.dead_letters(await _which(admin, flags, redriven=redriven), before=before, limit=limit)

    letters = asyncio.run(read())
    if as_json:
        print_json(letters)
        return
    rows: list[tuple[str, ...]] = [("id", "last seen", "handler", "reason", "position", "arrivals", "error")]
    for each in letters:
        marks = [mark for mark, at in (("redriven", each.redriven_at), ("forwarded", each.forwarded_at)) if at]
        reason = f"{each.reason} ({', '.join(marks)})" if marks else each.reason
        cells = (each.handler, reason, each.position, str(each.arrivals), each.error[:_ERROR_WIDTH])
        rows.append((str(each.id), time_of(each.last_at), *map(printable, cells)))
    click.echo(table(rows) if letters else "no dead letters")
    if not letters:
        say_unknown(settings, handler)
    if len(letters) == limit:
        click.echo(
            f"there may be more: --before {letters[-1].id}; `idemconsumer dead groups` counts them all", err=True
        )


@dead.command("groups")
@_chosen
@click.option("--by-tenant", is_flag=True, help="Also by app and tenant.")
@database
@as_json
def dead_groups(by_tenant: bool, as_json: bool, **flags: Any) -> None:
    """Group dead letters by cause: handler, reason, and the exception's type and line. The most frequent come first."""
    admin = _admin(flags)

    async def read() -> Any:
        return await admin.causes(await _which(admin, flags), by_tenant=by_tenant)

    causes = asyncio.run(read())
    if as_json:
        print_json(causes)
        return
    whose = ("app", "tenant") if by_tenant else ()
    rows: list[tuple[str, ...]] = [
        ("letters", *whose, "handler", "reason", "exception", "place", "arrivals", "first seen", "last seen", "newest")
    ]
    for each in causes:
        its = (each.app or "-", each.tenant or "-")[: len(whose)]
        cells = (each.handler, each.reason, each.exception or "-", each.place or "-", str(each.arrivals))
        times = (time_of(each.first_at), time_of(each.last_at))
        rows.append((str(each.letters), *map(printable, (*its, *cells)), *times, str(each.newest)))
    click.echo(table(rows) if causes else "no dead letters")


@dead.command("show")
@click.argument("number", metavar="ID", type=ID)
@database
@as_json
def dead_show(number: int, as_json: bool, **flags: Any) -> None:
    """Show one dead letter with all that its broker gave, and what to do about it."""
    admin = _admin(flags)

    async def read() -> tuple[DeadLetterDetail, list[Redrive]]:
        if (found := await admin.dead_letter(number)) is None:
            raise ConfigurationError(f"there is no dead letter {number}; `idemconsumer dead list` lists them")
        return found, await admin.redrives(found)

    letter, redrives = asyncio.run(read())
    if as_json:
        print_json({**letter_json(letter), "redrives": redrives})
    else:
        show(letter, redrives)


@dead.command("export")
@_chosen
@click.option("--redriven", is_flag=True, help="Also those that were redriven and have not failed again.")
@database
def dead_export(redriven: bool, **flags: Any) -> None:
    """Write dead letters in full, newest first, as lines of JSON like those of `dead show --json`."""
    given = dict(flags)
    admin = _admin(flags)

    async def export() -> int:
        letters = 0
        async for letter in admin.export(await _which(admin, flags, redriven=redriven)):
            print_json(letter_json(letter))
            letters += 1
        return letters

    click.echo("warning: what follows holds payloads; keep it where personal data may be kept", err=True)
    _matched(asyncio.run(export()), given)


@dead.command("redrive")
@click.argument("ids", metavar="[ID]…", type=ID, nargs=-1)
@_chosen
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--rate", type=RATE, metavar="N", help="At most N in a second.")
@click.option("--run", metavar="NAME", help="Go on with a run that was interrupted.  [default: a new one]")
@deciding
@click.option("--dry-run", is_flag=True, help="Only show what would be redriven.")
@database
@as_json
def dead_redrive(
    ids: tuple[int, ...],
    everything: bool,
    rate: float | None,
    run: str | None,
    by: str,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run the messages of dead letters again, oldest first, each with its full number of attempts.

    Workers take them from a queue in the database. A message that was applied meanwhile does not run again; a message
    that fails again becomes a dead letter again. Sagas that wait for a person go on where they stopped, as with
    `sagas resume`. A run redrives each dead letter once, so an interrupted run can be repeated with --run.
    """
    filters = {name: flags[name] for name in _FILTERS}
    need_choice(ids, filters, everything=everything, such_as="--handler and --reason")
    settings, given = load(dsn=flags["dsn"], schema=flags["schema"]), dict(flags)
    admin = _admin(flags)
    redrives, name = Redrives(need_dsn(settings), settings.schema), run or _run_name()

    async def act() -> tuple[int, Run]:
        which = await _which(admin, flags, ids=ids or None)
        length, _ = await admin.count(which)
        if length and not dry_run:
            click.echo(f"run {name}; to go on after an interruption, repeat this with --run {name}", err=True)
        with click.progressbar(length=length, label="redriving", file=sys.stderr) as bar:
            return length, await redrives.redrive(
                which, by=by, run=name, rate=rate, dry_run=dry_run, progress=bar.update
            )

    chosen, done = asyncio.run(act())
    if run is None:  # else they may have been redriven before it was interrupted
        _matched(chosen, given, ids)
    if as_json:
        print_json({"run": None if dry_run else name, "dry_run": dry_run, "letters": done.counts})
    else:
        sagas = done.counts.get(Redriven.RESUMES, 0)
        of_sagas = f", {sagas} of them of sagas, which go on where they stopped" if sagas else ""
        under = "" if dry_run else f"; run {name}, see `idemconsumer dead runs`"
        click.echo(f"{'would redrive' if dry_run else 'redriven'}: {done.redriven} dead letters{of_sagas}{under}")
        for verdict, text in _LEFT.items():
            if count := done.counts.get(verdict):
                click.echo(f"left: {count} {text}", err=True)


dead.add_command(dead_runs)


@dead.command("discard")
@click.argument("ids", metavar="[ID]…", type=ID, nargs=-1)
@_chosen
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--redriven", is_flag=True, help="Also those that were redriven and have not failed again.")
@click.option("--dry-run", is_flag=True, help="Only count; delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@deciding
@database
@as_json
def dead_discard(
    ids: tuple[int, ...],
    everything: bool,
    redriven: bool,
    dry_run: bool,
    yes: bool,
    by: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Delete dead letters for good.

    Their keys stay dead: if their messages come again, they do not run.
    """
    filters = {name: flags[name] for name in _FILTERS}
    need_choice(ids, filters, everything=everything, such_as="--handler and --reason")
    given = dict(flags)
    admin = _admin(flags)

    async def choose() -> tuple[Which, int, int]:
        which = await _which(admin, flags, ids=ids or None, redriven=redriven)
        return which, *await admin.count(which)

    which, letters, of_sagas = asyncio.run(choose())
    _matched(letters, given, ids)
    discarded = letters - of_sagas
    if not dry_run:
        if not yes and discarded:
            click.confirm(f"delete {discarded} dead letters for good?", abort=True, err=True)
        with click.progressbar(length=discarded, label="discarding", file=sys.stderr) as bar:
            discarded = asyncio.run(admin.discard(which, bar.update, by=by))
    if as_json:
        print_json({"discarded": discarded, "of_sagas": of_sagas, "dry_run": dry_run})
        return
    click.echo(f"{'would discard' if dry_run else 'discarded'}: {discarded} dead letters")
    if of_sagas:
        click.echo(
            f"left: {of_sagas} of sagas that wait for a person: `idemconsumer sagas list --state dead`", err=True
        )


def _run_name() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
