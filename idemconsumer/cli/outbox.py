"""`outbox`: outgoing messages that are not with their brokers yet."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from idemconsumer.admin.outbox import Outbox, OutgoingDetail, Which
from idemconsumer.cli.banner import table
from idemconsumer.cli.letters import either, time_of
from idemconsumer.cli.options import (
    ANY_ID,
    ID,
    as_json,
    database,
    deciding,
    need_choice,
    need_dsn,
    print_json,
    printable,
    say_left,
)
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.process.child import Exit
from idemconsumer.settings import load

F = TypeVar("F", bound=Callable[..., Any])

_ERROR_WIDTH = 60
_CHOICES = ("destination", "key", "error", "since")


def _chosen(command: F) -> F:
    """Options that choose messages."""
    for option in reversed(
        (
            click.option("--destination", help="Only those to this destination, such as kafka:orders."),
            click.option("--key", metavar="TEXT", help="Only those that were published with this key."),
            click.option("--error", metavar="TEXT", help="Only those with this text in their error."),
            click.option("--since", metavar="DURATION", help="Only those that were published in the last 2h, 7d, …"),
        )
    ):
        command = option(command)
    return command


def _which(flags: dict[str, Any], **more: Any) -> Which:
    """From the options of `_chosen`, which it takes out of `flags`."""
    given = {name: flags.pop(name) for name in _CHOICES}
    since = given.pop("since")
    return Which(**given, since=None if since is None else parse_duration(since), **more)


def _outbox(flags: dict[str, Any]) -> Outbox:
    settings = load(**flags)
    return Outbox(need_dsn(settings), settings.schema)


@click.group()
def outbox() -> None:
    """Outgoing messages: published with tx=, and not yet sent to their brokers."""


@outbox.command("list")
@_chosen
@click.option("--parked", is_flag=True, help="Only those that their brokers refused, and that wait for a person.")
@click.option("--after", type=ANY_ID, default=0, metavar="ID", help="Go on after this one; the last line names it.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=50, metavar="N", help="List at most N.  [default: 50]"
)
@database
@as_json
def outbox_list(parked: bool, after: int, limit: int, as_json: bool, **flags: Any) -> None:
    """List outgoing messages, oldest first."""
    which = _which(flags, parked=parked)
    found = asyncio.run(_outbox(flags).messages(which, after=after, limit=limit))
    if as_json:
        print_json(found)
        return
    rows: list[tuple[str, ...]] = [("id", "published", "destination", "key", "state", "tries", "error")]
    for each in found:
        cells = (each.destination, each.key or "-", _state(each.parked_at, each.due_at), str(each.tries))
        error = (each.error or "-")[:_ERROR_WIDTH]
        rows.append((str(each.id), time_of(each.created_at), *map(printable, (*cells, error))))
    click.echo(table(rows) if found else "no outgoing messages")
    if len(found) == limit:
        click.echo(f"there may be more: --after {found[-1].id}; `idemconsumer status` counts them all", err=True)


@outbox.command("show")
@click.argument("number", metavar="ID", type=ID)
@database
@as_json
def outbox_show(number: int, as_json: bool, **flags: Any) -> None:
    """Show one outgoing message in full."""
    if (found := asyncio.run(_outbox(flags).message(number))) is None:
        raise ConfigurationError(f"there is no outgoing message {number}; it may have been sent")
    if as_json:
        print_json(_json(found))
        return
    for name in ("id", "destination", "message_id", "key", "tries", "error", "created_at", "due_at", "parked_at"):
        if (value := getattr(found, name)) is not None:
            click.echo(f"{name:<11} {printable(str(value))}")
    for name, value in found.headers.items():
        click.echo(f"header      {printable(name)}: {printable(_text(value))}")
    click.echo(f"body        {found.size} bytes")
    click.echo("\n".join(map(printable, _text(found.body).split("\n"))))


@outbox.command("retry")
@click.argument("ids", metavar="[ID]…", type=ID, nargs=-1)
@_chosen
@click.option("--all", "everything", is_flag=True, help="All that were refused.")
@deciding
@database
@as_json
def outbox_retry(ids: tuple[int, ...], everything: bool, by: str, as_json: bool, **flags: Any) -> None:
    """Send refused messages again, at once and with their full number of tries.

    Their message ids stay the same. A parked message goes out after the messages of its key that have overtaken it.
    """
    need_choice(
        ids, {name: flags[name] for name in _CHOICES}, everything=everything, such_as="--destination and --error"
    )
    which = _which(flags, ids=ids or None)
    retried = asyncio.run(_outbox(flags).retry(which, by=by))
    _matched(retried, ids, everything=everything)
    if as_json:
        print_json({"retried": retried})
    else:
        click.echo(f"to be sent again: {retried} messages")


@outbox.command("discard")
@click.argument("ids", metavar="[ID]…", type=ID, nargs=-1)
@_chosen
@click.option("--all", "everything", is_flag=True, help="All that are parked.")
@click.option("--waiting", is_flag=True, help="Also those that are not parked, and would still be sent.")
@click.option("--dry-run", is_flag=True, help="Only count; delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@deciding
@database
@as_json
def outbox_discard(
    ids: tuple[int, ...],
    everything: bool,
    waiting: bool,
    dry_run: bool,
    yes: bool,
    by: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Delete parked messages for good; they are never sent."""
    need_choice(
        ids, {name: flags[name] for name in _CHOICES}, everything=everything, such_as="--destination and --error"
    )
    which, outbox = _which(flags, ids=ids or None, parked=not waiting), _outbox(flags)
    discarded = asyncio.run(outbox.count(which))
    _matched(discarded, ids, everything=everything)
    if not dry_run:
        if not yes and discarded:
            click.confirm(f"delete {discarded} outgoing messages for good?", abort=True, err=True)
        discarded = asyncio.run(outbox.discard(which, by=by))
    if as_json:
        print_json({"discarded": discarded, "dry_run": dry_run})
    else:
        click.echo(f"{'would discard' if dry_run else 'discarded'}: {discarded} outgoing messages")


def _matched(messages: int, ids: tuple[int, ...], *, everything: bool) -> None:
    """Exit 1 where something was chosen and nothing is there, as for dead letters."""
    say_left(ids, messages, "outgoing message")
    if not messages and not everything:
        click.echo("no outgoing message is chosen by this", err=True)
        sys.exit(Exit.ERROR)


def _state(parked: object, due: object) -> str:
    return "parked" if parked is not None else "waiting" if due is None else "later"


def _text(value: str | bytes) -> str:
    ((encoding, text),) = either(value).items()
    return text if encoding == "text" else f"base64 {text}"


def _json(found: OutgoingDetail) -> dict[str, object]:
    """Text as text, anything else in base64."""
    headers = [{"name": name, **either(value)} for name, value in found.headers.items()]
    return {**msgspec.structs.asdict(found), "headers": headers, "body": either(found.body)}
