"""`dead`: dead letters, and how to run their messages again."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

import click
import msgspec
from click import option

from idemconsumer.admin.dead_letters import Admin, DeadLetterDetail, Redrive, Which
from idemconsumer.admin.redrives import Redrives
from idemconsumer.admin.sender import NamedRow
from idemconsumer.cli.choices import Choice, listing
from idemconsumer.cli.flags import Finite, behind, count, database, deciding, flag, limit, number, unasked, uncounted
from idemconsumer.cli.layout import either, facts, in_words, listed, multiline, readable, time_of
from idemconsumer.cli.verbs import Given, Output, Verbs, print_json
from idemconsumer.errors import ConfigurationError
from idemconsumer.rules.redriven import Redriven

_LEFT = {
    Redriven.INCOMPLETE: "whose message is not stored in full; have their producer send them again",
    Redriven.SAGA: "whose sagas have begun meanwhile; repeat this",
    Redriven.BUSY: "that another command is deciding on now; repeat this",
    Redriven.REDRIVEN: "that another command has just redriven",
    Redriven.DECIDED: "whose key is not dead any more: it was applied or rejected since, or waits for its next attempt",
}

_letters = Choice(
    "dead letter",
    "--handler and --reason",
    ("--handler", None, "Only dead letters of this handler."),
    ("--reason", None, "Only dead letters with this reason."),
    ("--error", "TEXT", "Only dead letters with this text in their error."),
    ("--app", None, "Only dead letters of this app."),
    ("--tenant", None, "Only dead letters of this tenant."),
    ("--since", "DURATION", "Only those that arrived in the last 2h, 7d, …"),
    ("--until", "DURATION", "Only those that arrived before the last 2h, 7d, …"),
    ("--key", "TEXT", "Only those of this key; with --handler."),
    ("--hash prefix", "HEX", "Only those whose stored key begins with these digits."),
)
_redriven = flag("--redriven", help="Also those that were redriven and have not failed again.")


async def _which(admin: Admin, given: Given, *, redriven: bool = False) -> Which:
    chosen = _letters.given(given)
    if (key := chosen.pop("key")) is not None:
        if given.handler is None:
            raise click.UsageError("--key TEXT needs --handler NAME; or write --hash HEX")
        chosen["keys"] = await admin.stored_keys(given.handler, key, tenant=given.tenant)
    return Which(**chosen, redriven=redriven)


dead = Verbs("dead", help="Dead letters: messages that wait for a person.")


@dead.verb("list", _letters.words, _redriven, behind("--before", 1), limit)
async def dead_list(given: Given) -> Output:
    """List dead letters, newest first."""
    admin = Admin(*given.database)
    which = await _which(admin, given, redriven=given.redriven)
    letters = await admin.dead_letters(which, before=given.before, limit=given.limit)
    columns = "id, last seen, handler, reason, position, arrivals, error"
    more = "--before {0.id}; `idemconsumer dead groups` counts them all"
    return await listing(given, letters, columns, map(_in_list, letters), "no dead letters", more=more)


def _in_list(of: NamedRow) -> tuple[object, ...]:
    marks = [mark for mark, at in (("redriven", of.redriven_at), ("forwarded", of.forwarded_at)) if at]
    reason = f"{of.reason} ({', '.join(marks)})" if marks else of.reason
    return of.id, of.last_at, of.handler, reason, of.position, of.arrivals, of.error[:60]


@dead.verb("groups", _letters.words, flag("--by-tenant", help="Also by app and tenant."))
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
    """Show one dead letter with everything that its broker delivered, and what to do about it."""
    admin = Admin(*given.database)
    if (letter := await admin.dead_letter(given.number)) is None:
        raise ConfigurationError(f"there is no dead letter {given.number}; `idemconsumer dead list` lists them")
    redrives = await admin.redrives(letter)
    if given.as_json:
        return Output({**_json(letter), "redrives": redrives})
    show(letter, redrives)
    return None


@dead.verb("export", _letters.words, _redriven, ends=database)
async def dead_export(given: Given) -> None:
    """Write dead letters in full, newest first, as lines of JSON like those of `dead show --json`."""
    admin, letters = Admin(*given.database), 0
    click.echo("warning: what follows holds payloads; keep it where personal data may be kept", err=True)
    async for letter in admin.export(await _which(admin, given, redriven=given.redriven)):
        print_json(_json(letter))
        letters += 1
    await _letters.need_found(given, letters)


@dead.verb(
    "redrive",
    _letters.with_ids("All of them."),
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
    _letters.need(given)
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
    if given.run is None:  # with --run, an interrupted run may have redriven them all
        await _letters.need_found(given, chosen)
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
    option("--cancel", metavar="RUN", help="Cancel this run: messages that have not begun become dead letters again."),
    count("--limit", "List at most N.", 50, most=None),
    deciding,
)
async def dead_runs(given: Given) -> Output:
    """List the runs of `dead redrive`, or cancel one.

    The newest come first, with the results of their dead letters. After `--cancel`, messages that have begun still
    finish, and resumed sagas go on. A `dead redrive` that still works on this run ends.
    """
    redrives = Redrives(*given.database)
    if given.cancel is not None:
        letters = await redrives.cancel(given.cancel, by=given.by)
        return Output({"run": given.cancel, "cancelled": letters}, f"cancelled: {letters} dead letters")
    runs = await redrives.runs(given.limit)
    return Output(runs, listed("run, began, by, letters, came to", map(_among_runs, runs), "no runs"))


def _among_runs(of: NamedRow) -> tuple[object, ...]:
    came_to = ", ".join(f"{count} {outcome}" for outcome, count in sorted(of.outcomes.items()))
    return f"{of.run} (cancelled)" if of.cancelled else of.run, of.began_at, of.by, of.letters, came_to or None


@dead.verb("discard", _letters.with_ids("All of them."), _redriven, uncounted, unasked, deciding)
def dead_discard(given: Given) -> Output:
    """Delete dead letters for good.

    Their keys stay dead: if their messages come again, they do not run.
    """
    _letters.need(given)
    admin = Admin(*given.database)

    async def choose() -> tuple[Which, int, int]:
        which = await _which(admin, given, redriven=given.redriven)
        letters, of_sagas = await admin.count(which)
        await _letters.need_found(given, letters)
        return which, letters - of_sagas, of_sagas

    async def discard() -> int:
        with click.progressbar(length=found, label="discarding", file=sys.stderr) as bar:
            return await admin.discard(which, bar.update, by=given.by)

    which, found, of_sagas = asyncio.run(choose())
    discarded = _letters.delete(given, found, discard)
    left = f"left: {of_sagas} of sagas that wait for a person: `idemconsumer sagas list --state dead`"
    return Output(
        {"discarded": discarded, "of_sagas": of_sagas, "dry_run": given.dry_run},
        f"{'would discard' if given.dry_run else 'discarded'}: {discarded} dead letters",
        [left] if of_sagas else [],
    )


# ----------------------------------------------------------------------------------------------------- one dead letter
_SHOWN = (
    "id", "handler", "scope", "source", "position", "reason", "error", "attempts", "arrivals", "first_at", "last_at",
)  # fmt: skip
_OF_BROKER = ("message_id", "record_key", "timestamp")


def show(letter: DeadLetterDetail, redrives: Iterable[Redrive]) -> None:
    """Print one dead letter in full, and what to do about it."""
    for line in (*facts(_facts(letter, redrives)), *_message(letter)):
        click.echo(line)


def _facts(letter: DeadLetterDetail, redrives: Iterable[Redrive]) -> Iterator[tuple[str, object]]:
    yield from ((name, getattr(letter, name)) for name in _SHOWN)
    yield from ((name, in_words(value)) for name in _OF_BROKER if (value := getattr(letter, name)) is not None)
    yield from (("property", f"{name}: {value}") for name, value in letter.properties.items())
    yield from (("header", f"{name}: {in_words(value)}") for name, value in letter.headers)
    yield "forwarded", letter.forwarded_at and time_of(letter.forwarded_at)
    for each in redrives:
        ended = "" if each.ended_at is None else f" at {time_of(each.ended_at)}"
        other = "" if each.letter == letter.id else f", as letter {each.letter}"
        yield "redriven", f"{time_of(each.at)} by {each.by}{other}: {each.outcome}{ended}"
    yield "what to do", letter.hint


def _message(letter: DeadLetterDetail) -> Iterator[str]:
    if letter.traceback is not None:
        yield multiline(letter.traceback)
    if letter.emptied_at is not None:
        yield f"body        dropped at {time_of(letter.emptied_at)}, {letter.body_size} bytes"
    elif letter.tombstone:
        yield "body        none: a tombstone"
    else:
        encoding, body = readable(letter.body)
        cut = f"the first {len(letter.body)} of " if len(letter.body) < letter.body_size else ""
        yield f"body        {cut}{letter.body_size} bytes, {encoding}, SHA-256 {letter.body_sha256.hex()}"
        yield multiline(body)


def _json(letter: DeadLetterDetail) -> Mapping[str, object]:
    """All fields; bytes that are text as text, others in base64."""
    encoding, body = readable(letter.body)
    fields: dict[str, object] = msgspec.structs.asdict(letter)
    key = None if letter.key is None else letter.key.hex()
    record_key = None if letter.record_key is None else either(letter.record_key)
    headers = [{"name": name, **either(value)} for name, value in letter.headers]
    given = {"key": key, "record_key": record_key, "headers": headers, "body_sha256": letter.body_sha256.hex()}
    return fields | given | {"body": body, "body_encoding": encoding, "hint": letter.hint}
