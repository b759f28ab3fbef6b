"""`dead`: messages put aside for a person, and the way back."""

from __future__ import annotations

import asyncio
import secrets
import sys
from datetime import UTC, datetime

import click
from click import option

from idemconsumer.admin.dead_letters import Admin, Which
from idemconsumer.admin.redrives import Redrives
from idemconsumer.cli.choices import listing, need_choice, need_found, seconds
from idemconsumer.cli.dead_letter_text import letter_json, show
from idemconsumer.cli.flags import (
    ID,
    Finite,
    count,
    database,
    deciding,
    flag,
    ids,
    limit,
    number,
    together,
    unasked,
    uncounted,
)
from idemconsumer.cli.verbs import Given, Output, Verbs, listed, print_json
from idemconsumer.errors import ConfigurationError
from idemconsumer.rules.redriven import Redriven

_ERROR_WIDTH = 60
_FILTERS = ("handler", "app", "tenant", "reason", "error", "since", "until", "key", "prefix")
_SUCH_AS = "--handler and --reason"
_LEFT = {
    Redriven.INCOMPLETE: "whose whole message is not kept; have their producer send them again",
    Redriven.SAGA: "whose sagas have begun meanwhile; repeat this",
    Redriven.BUSY: "about which somebody else is deciding now; repeat this",
    Redriven.REDRIVEN: "which somebody else has just redriven",
    Redriven.DECIDED: "whose key is not dead any more: it was applied or rejected since, or waits for its next attempt",
}

_chosen = together(
    option("--handler", help="Only dead letters of this handler."),
    option("--reason", help="Only dead letters with this reason."),
    option("--error", metavar="TEXT", help="Only dead letters with this text in their error."),
    option("--app", help="Only dead letters of this app."),
    option("--tenant", help="Only dead letters of this tenant."),
    option("--since", metavar="DURATION", help="Only those that arrived in the last 2h, 7d, …"),
    option("--until", metavar="DURATION", help="Only those that arrived before the last 2h, 7d, …"),
    option("--key", metavar="TEXT", help="Only those of this key; with --handler."),
    option("--hash", "prefix", metavar="HEX", help="Only those whose stored key begins with these digits."),
)
_all = flag("--all", "everything", help="All of them.")
_redriven = flag("--redriven", help="Also those that were redriven and have not failed again.")


async def _which(admin: Admin, given: Given, *, redriven: bool = False) -> Which:
    if given.key is not None and given.handler is None:
        raise click.UsageError("--key TEXT needs --handler NAME; or write --hash HEX")
    keys = None if given.key is None else await admin.stored_keys(given.handler, given.key, tenant=given.tenant)
    chosen = {name: getattr(given, name) for name in ("handler", "app", "tenant", "reason", "error", "prefix")}
    chosen |= {"since": seconds(given.since), "until": seconds(given.until), "ids": getattr(given, "ids", None) or None}
    return Which(keys=keys, **chosen, redriven=redriven)


dead = Verbs("dead", help="Dead letters: messages that wait for a person.")


@dead.verb(
    "list",
    _chosen,
    _redriven,
    option("--before", type=ID, metavar="ID", help="Go on after this one; the last line names it."),
    limit,
)
async def dead_list(given: Given) -> Output:
    """List dead letters, newest first."""
    admin = Admin(*given.database)
    which = await _which(admin, given, redriven=given.redriven)
    letters = await admin.dead_letters(which, before=given.before, limit=given.limit)
    rows = []
    for each in letters:
        marks = [mark for mark, at in (("redriven", each.redriven_at), ("forwarded", each.forwarded_at)) if at]
        reason = f"{each.reason} ({', '.join(marks)})" if marks else each.reason
        error = each.error[:_ERROR_WIDTH]
        rows.append((each.id, each.last_at, each.handler, reason, each.position, each.arrivals, error))
    columns = "id, last seen, handler, reason, position, arrivals, error"
    more = "--before {0.id}; `idemconsumer dead groups` counts them all"
    return await listing(given, letters, columns, rows, "no dead letters", more=more)


@dead.verb("groups", _chosen, flag("--by-tenant", help="Also by app and tenant."))
async def dead_groups(given: Given) -> Output:
    """Group dead letters by cause: handler, reason, and the exception's type and line. The most frequent come first."""
    admin = Admin(*given.database)
    causes = await admin.causes(await _which(admin, given), by_tenant=given.by_tenant)
    whose = "app, tenant, " if given.by_tenant else ""
    columns = f"letters, {whose}handler, reason, exception, place, arrivals, first_at, last_at, newest"
    rows = [[getattr(each, name) for name in columns.split(", ")] for each in causes]
    return Output(causes, listed(columns.replace("_at", " seen"), rows, "no dead letters"))


@dead.verb("show", number)
async def dead_show(given: Given) -> Output | None:
    """Show one dead letter with all that its broker gave, and what to do about it."""
    admin = Admin(*given.database)
    if (letter := await admin.dead_letter(given.number)) is None:
        raise ConfigurationError(f"there is no dead letter {given.number}; `idemconsumer dead list` lists them")
    redrives = await admin.redrives(letter)
    if given.as_json:
        return Output({**letter_json(letter), "redrives": redrives})
    show(letter, redrives)
    return None


@dead.verb("export", _chosen, _redriven, ends=database)
async def dead_export(given: Given) -> None:
    """Write dead letters in full, newest first, as lines of JSON like those of `dead show --json`."""
    admin, letters = Admin(*given.database), 0
    click.echo("warning: what follows holds payloads; keep it where personal data may be kept", err=True)
    async for letter in admin.export(await _which(admin, given, redriven=given.redriven)):
        print_json(letter_json(letter))
        letters += 1
    await need_found(given, _FILTERS, letters, "dead letter")


@dead.verb(
    "redrive",
    ids,
    _chosen,
    _all,
    option("--rate", type=Finite(0, min_open=True), metavar="N", help="At most N in a second."),
    option("--run", metavar="NAME", help="Go on with a run that was interrupted.  [default: a new one]"),
    deciding,
    flag("--dry-run", help="Only show what would be redriven."),
)
async def dead_redrive(given: Given) -> Output:
    """Run the messages of dead letters again, oldest first, each with its full number of attempts.

    Workers take them from a queue in the database. A message that was applied meanwhile does not run again; a message
    that fails again becomes a dead letter again. Sagas that wait for a person go on where they stopped, as with
    `sagas resume`. A run redrives each dead letter once, so an interrupted run can be repeated with --run.
    """
    need_choice(given, _FILTERS, _SUCH_AS)
    admin, redrives, dry_run = Admin(*given.database), Redrives(*given.database), given.dry_run
    name = given.run or f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
    which = await _which(admin, given)
    chosen, _ = await admin.count(which)
    if chosen and not dry_run:
        click.echo(f"run {name}; to go on after an interruption, repeat this with --run {name}", err=True)
    with click.progressbar(length=chosen, label="redriving", file=sys.stderr) as bar:
        done = await redrives.redrive(
            which, by=given.by, run=name, rate=given.rate, dry_run=dry_run, progress=bar.update
        )
    if given.run is None:  # else they may have been redriven before it was interrupted
        await need_found(given, _FILTERS, chosen, "dead letter")
    sagas = done.counts.get(Redriven.RESUMES, 0)
    of_sagas = f", {sagas} of them of sagas, which go on where they stopped" if sagas else ""
    under = "" if dry_run else f"; run {name}, see `idemconsumer dead runs`"
    return Output(
        {"run": None if dry_run else name, "dry_run": dry_run, "letters": done.counts},
        f"{'would redrive' if dry_run else 'redriven'}: {done.redriven} dead letters{of_sagas}{under}",
        [f"left: {count} {text}" for verdict, text in _LEFT.items() if (count := done.counts.get(verdict))],
    )


@dead.verb(
    "runs",
    option("--cancel", metavar="RUN", help="Turn this run's messages that have not begun back into dead letters."),
    count("--limit", "List at most N.", 50, most=None),
    deciding,
)
async def dead_runs(given: Given) -> Output:
    """List the runs of `dead redrive`, or cancel one.

    The newest come first, with the results of their dead letters. After a cancel, messages that have begun come to
    their end, and resumed sagas go on. A command that is still redriving under this name ends.
    """
    redrives = Redrives(*given.database)
    if given.cancel is not None:
        letters = await redrives.cancel(given.cancel, by=given.by)
        return Output({"run": given.cancel, "cancelled": letters}, f"cancelled: {letters} dead letters")
    runs = await redrives.runs(given.limit)
    rows = []
    for each in runs:
        came_to = ", ".join(f"{count} {outcome}" for outcome, count in sorted(each.outcomes.items()))
        name = f"{each.run} (cancelled)" if each.cancelled else each.run
        rows.append((name, each.began_at, each.by, each.letters, came_to or None))
    return Output(runs, listed("run, began, by, letters, came to", rows, "no runs"))


@dead.verb("discard", ids, _chosen, _all, _redriven, uncounted, unasked, deciding)
def dead_discard(given: Given) -> Output:
    """Delete dead letters for good.

    Their keys stay dead: if their messages come again, they do not run.
    """
    need_choice(given, _FILTERS, _SUCH_AS)
    admin = Admin(*given.database)

    async def choose() -> tuple[Which, int, int]:
        which = await _which(admin, given, redriven=given.redriven)
        letters, of_sagas = await admin.count(which)
        await need_found(given, _FILTERS, letters, "dead letter")
        return which, letters - of_sagas, of_sagas

    which, discarded, of_sagas = asyncio.run(choose())
    if not given.dry_run:
        if not given.yes and discarded:
            click.confirm(f"delete {discarded} dead letters for good?", abort=True, err=True)
        with click.progressbar(length=discarded, label="discarding", file=sys.stderr) as bar:
            discarded = asyncio.run(admin.discard(which, bar.update, by=given.by))
    left = f"left: {of_sagas} of sagas that wait for a person: `idemconsumer sagas list --state dead`"
    return Output(
        {"discarded": discarded, "of_sagas": of_sagas, "dry_run": given.dry_run},
        f"{'would discard' if given.dry_run else 'discarded'}: {discarded} dead letters",
        [left] if of_sagas else [],
    )
