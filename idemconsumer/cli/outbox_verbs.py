"""`outbox`: outgoing messages that have not reached their brokers yet."""

from __future__ import annotations

import asyncio

from idemconsumer.admin.outgoing_messages import Outbox, OutgoingChoice
from idemconsumer.admin.sender import NamedRow
from idemconsumer.cli.choices import Choice, listing
from idemconsumer.cli.flags import behind, deciding, flag, limit, number, unasked, uncounted
from idemconsumer.cli.layout import either, facts, in_words, multiline
from idemconsumer.cli.verbs import Given, Output, Verbs
from idemconsumer.errors import ConfigurationError

_SHOWN = ("id", "destination", "message_id", "key", "tries", "error", "created_at", "due_at", "parked_at")

_messages = Choice(
    "outgoing message",
    "--destination and --error",
    ("--destination", None, "Only those to this destination, such as kafka:orders."),
    ("--key", "TEXT", "Only those that were published with this key."),
    ("--error", "TEXT", "Only those with this text in their error."),
    ("--since", "DURATION", "Only those that were published in the last 2h, 7d, …"),
)

outbox = Verbs("outbox", help="Outgoing messages: published with tx=, and not yet sent to their brokers.")


@outbox.verb(
    "list",
    _messages.words,
    flag("--parked", help="Only those that their brokers refused, and that wait for a person."),
    behind("--after", 0),
    limit,
)
async def outbox_list(given: Given) -> Output:
    """List outgoing messages, oldest first."""
    which = OutgoingChoice(**_messages.given(given), parked=given.parked)
    found = await Outbox(*given.database).messages(which, after=given.after or 0, limit=given.limit)
    columns = "id, published, destination, key, state, tries, error"
    more = "--after {0.id}; `idemconsumer status` counts them all"
    return await listing(given, found, columns, map(_in_list, found), "no outgoing messages", more=more)


def _in_list(of: NamedRow) -> tuple[object, ...]:
    state = "parked" if of.parked_at is not None else "waiting" if of.due_at is None else "later"
    return of.id, of.created_at, of.destination, of.key or None, state, of.tries, (of.error or "-")[:60]


@outbox.verb("show", number)
async def outbox_show(given: Given) -> Output:
    """Show one outgoing message in full."""
    if (found := await Outbox(*given.database).message(given.number)) is None:
        raise ConfigurationError(f"there is no outgoing message {given.number}; it may have been sent")
    shown = [(name, found[name]) for name in _SHOWN]
    shown += [("header", f"{name}: {in_words(value)}") for name, value in found.headers.items()]
    return Output(_json(found), [*facts([*shown, ("body", f"{found.size} bytes")]), multiline(in_words(found.body))])


@outbox.verb("retry", _messages.with_ids("All that were refused."), deciding)
async def outbox_retry(given: Given) -> Output:
    """Send refused messages again, at once and with their full number of tries.

    Their message ids stay the same. A parked message goes out after the messages of its key that have overtaken it.
    """
    _messages.need(given)
    retried = await Outbox(*given.database).retry(OutgoingChoice(**_messages.given(given)), by=given.by)
    await _messages.need_found(given, retried)
    return Output({"retried": retried}, f"to be sent again: {retried} messages")


@outbox.verb(
    "discard",
    _messages.with_ids("All that are parked."),
    flag("--waiting", help="Also those that are not parked, and would still be sent."),
    uncounted,
    unasked,
    deciding,
)
def outbox_discard(given: Given) -> Output:
    """Delete parked messages for good; they are never sent."""
    _messages.need(given)
    which = OutgoingChoice(**_messages.given(given), parked=not given.waiting)
    outbox = Outbox(*given.database)

    async def count() -> int:
        found = await outbox.count(which)
        await _messages.need_found(given, found)
        return found

    discarded = _messages.delete(given, asyncio.run(count()), lambda: outbox.discard(which, by=given.by))
    return Output(
        {"discarded": discarded, "dry_run": given.dry_run},
        f"{'would discard' if given.dry_run else 'discarded'}: {discarded} outgoing messages",
    )


def _json(found: NamedRow) -> dict[str, object]:
    """All columns; bytes that are text as text, others in base64."""
    headers = [{"name": name, **either(value)} for name, value in found.headers.items()]
    return {**found, "headers": headers, "body": either(found.body)}
