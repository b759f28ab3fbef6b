"""`keys` and `explain`: what the database stores about a key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import click
from click import option

from idemconsumer.admin.stored_keys import KeyDetail, Keys
from idemconsumer.cli.choices import listing, need_key
from idemconsumer.cli.flags import as_json, database, deciding, flag, key, limit, together, unasked
from idemconsumer.cli.in_redis import explained, is_in_redis, refuse_to_forget
from idemconsumer.cli.layout import facts, listed, short, time_of
from idemconsumer.cli.verbs import Given, Output, Verbs, verb
from idemconsumer.errors import NothingFound
from idemconsumer.rules.values import State
from idemconsumer.settings import load

_which = together(
    as_json,
    database,
    key,
    option("--tenant", help="With --key: the tenant."),
    option("--app", help="With --key: the app. Keys in the Redis of the settings need it."),
)


async def _found(given: Given, *, unknown: bool = False) -> tuple[Keys, bytes]:
    """The chosen stored key, and the `Keys` for queries and decisions about it."""
    known = Keys(*given.database)
    need_key(given, "keys list")
    return known, await known.find(
        prefix=given.prefix,
        handler=given.handler or "",
        key=given.key or "",
        tenant=given.tenant,
        app=given.app,
        unknown=unknown,
        elsewhere=is_in_redis,
    )


async def _forget_copy(known: Keys, key: bytes) -> None:
    """H33: forget the copy in Redis too, if Redis answers."""
    if (address := load().redis) is None:
        return
    from idemconsumer.stores.redis.copies import Copies

    copies = Copies(address, await known.born())
    try:
        await copies.forget(key)
    finally:
        await copies.close()


async def _explained(given: Given) -> KeyDetail:
    known, found = await _found(given)
    return await explained(await known.explain(found))


@verb("explain", ends=_which)
async def explain(given: Given) -> Output:
    """Show all that is known about a key, in order, and what would happen if its message came again now.

    Its deliveries are included if the setting `delivery_log` keeps them.
    """
    detail = await _explained(given)
    lines = [*facts(_facts(detail))]
    if detail.timeline:
        events = ((each.at, each.what, each.owner, each.attempt, each.detail or None) for each in detail.timeline)
        lines += ["", *listed("at, what, who, attempt, detail", events)]
    return Output(detail, [*lines, f"\nif it came again now: {detail.next}"])


keys = Verbs("keys", help="Keys: show, forget and release them.")


@keys.verb("show", ends=_which)
async def keys_show(given: Given) -> Output:
    """Show the record of a key, its result and the rows that belong to it. `explain` shows its history."""
    detail = await _explained(given)
    return Output(detail, facts(_facts(detail)))


def _facts(detail: KeyDetail) -> Iterator[tuple[str, object]]:
    yield "key", detail.key
    yield "scope", detail.scope
    since = "" if detail.changed_at is None else f" since {time_of(detail.changed_at)}"
    yield "state", f"{detail.state or 'no record'}{since}{' in Redis' if detail.store == 'redis' else ''}"
    if (request := detail.request) is not None:
        lost = "; its owner was lost, and it is not known how far it got" if request.lost else ""
        yield "request", f"running since {time_of(request.since)} in {request.owner or 'a process that is gone'}{lost}"
    if detail.created_at is not None:
        awaited = "" if detail.awaited is None else f", waits for its message from {detail.awaited}"
        yield "accepted", f"{time_of(detail.created_at)}{awaited}"
    yield "kept until", detail.until and time_of(detail.until)
    yield "due", detail.due and time_of(detail.due)
    yield "result", detail.result
    yield "attempts", detail.attempts and f"{detail.attempts.count}, {detail.attempts.error or 'no error'}"
    for letter in detail.letters:
        closed = "" if letter.redriven_at is None else ", redriven or released"
        yield "letter", f"{letter.id} {letter.reason}, {letter.arrivals} arrivals{closed}"


@keys.verb(
    "list",
    option("--handler", help="Only keys of this handler."),
    option("--tenant", help="Only keys of this tenant."),
    option("--state", type=click.Choice([each.name.lower() for each in State]), help="Only keys in this state."),
    option("--after", metavar="KEY", help="Continue after this key; the last line of the previous output names it."),
    limit,
)
async def keys_list(given: Given) -> Output:
    """List records in the order of their keys. If few records match, the command reads all records."""
    lines = await Keys(*given.database).list(
        handler=given.handler,
        tenant=given.tenant,
        state=None if given.state is None else State[given.state.upper()],
        after=given.after,
        limit=given.limit,
    )
    rows = ((short(line.key), line.scope, line.state, line.changed_at) for line in lines)
    return await listing(given, lines, "key, scope, state, since", rows, "no keys", more="--after {0.key}")


@keys.verb(
    "forget",
    flag("--record", help="Its record too: its message is then new, and runs if it comes again."),
    unasked,
    deciding,
    ends=_which,
)
def keys_forget(given: Given) -> Output:
    """Remove the personal data of a key: result, dead letters, errors, steps, fingerprint, entries in the delivery log.

    Its record stays, as a hash and a state, so its message still does not run again. Dead letters of messages without a
    key cannot be found by one: use `dead list` and `dead discard`.
    """
    known, found = asyncio.run(_found(given, unknown=True))
    if not given.yes:
        what = "and its record, so that its message would run again" if given.record else "but its record"
        click.confirm(f"forget all of {short(found)}, {what}?", abort=True, err=True)
    click.echo(f"forgetting {found.hex()}; after an interruption, repeat this with all of these digits", err=True)

    async def forget() -> int:
        try:
            letters = await known.forget(found, by=given.by, record=given.record)
        except NothingFound:
            await refuse_to_forget(found)
            raise
        await _forget_copy(known, found)
        return letters

    letters = asyncio.run(forget())
    what = "it would run if it came again" if given.record else "its record stays, so it does not run again"
    return Output(
        {"key": found.hex(), "letters": letters, "record": given.record},
        f"forgotten: {short(found)}, with {letters} dead letters; {what}",
    )


@keys.verb("release", deciding, ends=_which)
async def keys_release(given: Given) -> Output:
    """Release a dead or rejected key, or the key of a request whose owner was lost: its message or request runs when
    it comes again.

    The same works for an accepted key whose message was lost on its way from its broker. The command itself runs
    nothing: `dead redrive` runs a stored message. A completed key is never released.
    """
    known, found = await _found(given)
    await known.release(found, by=given.by)
    await _forget_copy(known, found)
    said = f"released: {short(found)}; its message runs when it comes again"
    return Output({"key": found.hex(), "released": True}, said)
