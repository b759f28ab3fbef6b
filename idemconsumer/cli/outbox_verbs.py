"""`outbox`: outgoing messages that are not with their brokers yet."""

from __future__ import annotations

import asyncio

import click
import msgspec
from click import option

from idemconsumer.admin.outgoing_messages import Outbox, OutgoingChoice, OutgoingDetail, OutgoingMessage
from idemconsumer.cli.choices import listing, need_choice, need_found, seconds
from idemconsumer.cli.dead_letter_text import either, in_words, multiline
from idemconsumer.cli.flags import deciding, flag, ids, limit, number, together, unasked, uncounted
from idemconsumer.cli.verbs import Given, Output, Verbs, facts
from idemconsumer.errors import ConfigurationError

_ERROR_WIDTH = 60
_CHOICES = ("destination", "key", "error", "since")
_SUCH_AS = "--destination and --error"
_SHOWN = ("id", "destination", "message_id", "key", "tries", "error", "created_at", "due_at", "parked_at")

_chosen = together(
    option("--destination", help="Only those to this destination, such as kafka:orders."),
    option("--key", metavar="TEXT", help="Only those that were published with this key."),
    option("--error", metavar="TEXT", help="Only those with this text in their error."),
    option("--since", metavar="DURATION", help="Only those that were published in the last 2h, 7d, …"),
)


def _which(given: Given, *, parked: bool = False) -> OutgoingChoice:
    chosen = {name: getattr(given, name) for name in _CHOICES} | {"since": seconds(given.since)}
    return OutgoingChoice(**chosen, ids=getattr(given, "ids", None) or None, parked=parked)


outbox = Verbs("outbox", help="Outgoing messages: published with tx=, and not yet sent to their brokers.")


@outbox.verb(
    "list",
    _chosen,
    flag("--parked", help="Only those that their brokers refused, and that wait for a person."),
    option(
        "--after",
        type=click.IntRange(0, 2**63 - 1),
        default=0,
        metavar="ID",
        help="Go on after this one; the last line names it.",
    ),
    limit,
)
async def outbox_list(given: Given) -> Output:
    """List outgoing messages, oldest first."""
    which = _which(given, parked=given.parked)
    found = await Outbox(*given.database).messages(which, after=given.after, limit=given.limit)
    rows = []
    for each in found:
        key, error = each.key or None, (each.error or "-")[:_ERROR_WIDTH]
        rows.append((each.id, each.created_at, each.destination, key, _state(each), each.tries, error))
    columns = "id, published, destination, key, state, tries, error"
    more = "--after {0.id}; `idemconsumer status` counts them all"
    return await listing(given, found, columns, rows, "no outgoing messages", more=more)


@outbox.verb("show", number)
async def outbox_show(given: Given) -> Output:
    """Show one outgoing message in full."""
    if (found := await Outbox(*given.database).message(given.number)) is None:
        raise ConfigurationError(f"there is no outgoing message {given.number}; it may have been sent")
    shown = [(name, value) for name in _SHOWN if (value := getattr(found, name)) is not None]
    shown += [("header", f"{name}: {in_words(value)}") for name, value in found.headers.items()]
    return Output(_json(found), [*facts([*shown, ("body", f"{found.size} bytes")]), multiline(in_words(found.body))])


@outbox.verb("retry", ids, _chosen, flag("--all", "everything", help="All that were refused."), deciding)
async def outbox_retry(given: Given) -> Output:
    """Send refused messages again, at once and with their full number of tries.

    Their message ids stay the same. A parked message goes out after the messages of its key that have overtaken it.
    """
    need_choice(given, _CHOICES, _SUCH_AS)
    which = _which(given)
    retried = await Outbox(*given.database).retry(which, by=given.by)
    await need_found(given, _CHOICES, retried, "outgoing message")
    return Output({"retried": retried}, f"to be sent again: {retried} messages")


@outbox.verb(
    "discard",
    ids,
    _chosen,
    flag("--all", "everything", help="All that are parked."),
    flag("--waiting", help="Also those that are not parked, and would still be sent."),
    uncounted,
    unasked,
    deciding,
)
def outbox_discard(given: Given) -> Output:
    """Delete parked messages for good; they are never sent."""
    need_choice(given, _CHOICES, _SUCH_AS)
    which, outbox = _which(given, parked=not given.waiting), Outbox(*given.database)

    async def count() -> int:
        found = await outbox.count(which)
        await need_found(given, _CHOICES, found, "outgoing message")
        return found

    discarded = asyncio.run(count())
    if not given.dry_run:
        if not given.yes and discarded:
            click.confirm(f"delete {discarded} outgoing messages for good?", abort=True, err=True)
        discarded = asyncio.run(outbox.discard(which, by=given.by))
    return Output(
        {"discarded": discarded, "dry_run": given.dry_run},
        f"{'would discard' if given.dry_run else 'discarded'}: {discarded} outgoing messages",
    )


def _state(of: OutgoingMessage) -> str:
    return "parked" if of.parked_at is not None else "waiting" if of.due_at is None else "later"


def _json(found: OutgoingDetail) -> dict[str, object]:
    """Text as text, anything else in base64."""
    headers = [{"name": name, **either(value)} for name, value in found.headers.items()]
    return {**msgspec.structs.asdict(found), "headers": headers, "body": either(found.body)}
