"""`keys` and `explain`: what the database knows of a key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from idemconsumer.admin.keys import KeyDetail, Keys
from idemconsumer.cli.banner import table
from idemconsumer.cli.in_redis import explained, is_in_redis, refuse_to_forget
from idemconsumer.cli.letters import time_of
from idemconsumer.cli.options import as_json, database, deciding, need_dsn, print_json, printable
from idemconsumer.cli.unknown import say_unknown
from idemconsumer.errors import NothingFound
from idemconsumer.rules.values import State
from idemconsumer.settings import load

F = TypeVar("F", bound=Callable[..., Any])

_SHORT = 12  # digits of a key that a person reads


def _which(command: F) -> F:
    """KEY, or --handler and --key."""
    for option in reversed(
        (
            click.argument("prefix", metavar="[KEY]", required=False),
            click.option("--handler", help="With --key: the handler's name."),
            click.option("--key", help="With --handler: the key's text, before hashing."),
            click.option("--tenant", help="With --key: the tenant."),
            click.option("--app", help="With --key: the app. Keys in the Redis of the settings need it."),
        )
    ):
        command = option(command)
    return as_json(database(command))


def _keys(flags: dict[str, Any]) -> Keys:
    settings = load(dsn=flags.pop("dsn"), schema=flags.pop("schema"))
    return Keys(need_dsn(settings), settings.schema)


async def _find(known: Keys, given: dict[str, Any], *, unknown: bool = False) -> bytes:
    prefix, handler, key, tenant, app = (given.pop(name) for name in ("prefix", "handler", "key", "tenant", "app"))
    if (prefix is None) == (handler is None and key is None) or (handler is None) != (key is None):
        raise click.UsageError("give KEY (the first digits, as `keys list` shows them) or --handler NAME --key TEXT")
    return await known.find(
        prefix=prefix,
        handler=handler or "",
        key=key or "",
        tenant=tenant,
        app=app,
        unknown=unknown,
        elsewhere=is_in_redis,
    )


async def _forget_copy(known: Keys, key: bytes) -> None:
    """H33: what Redis has of it, if it answers."""
    if (address := load().redis) is None:
        return
    from idemconsumer.stores.redis.copies import Copies

    copies = Copies(address, await known.born())
    try:
        await copies.forget(key)
    finally:
        await copies.close()


def _explained(flags: dict[str, Any]) -> KeyDetail:
    known = _keys(flags)

    async def read() -> KeyDetail:
        return await explained(await known.explain(await _find(known, flags)))

    return asyncio.run(read())


@click.command()
@_which
def explain(as_json: bool, **flags: Any) -> None:
    """Show all that is known about a key, in order, and what would happen if its message came again now.

    Its deliveries are included if the setting `delivery_log` keeps them.
    """
    detail = _explained(flags)
    if as_json:
        print_json(detail)
        return
    _facts(detail)
    if detail.timeline:
        rows: list[tuple[str, ...]] = [("at", "what", "who", "attempt", "detail")]
        for event in detail.timeline:
            attempt = "-" if event.attempt is None else str(event.attempt)
            cells = (event.what, event.owner or "-", attempt, event.detail or "-")
            rows.append((time_of(event.at), *map(printable, cells)))
        click.echo(f"\n{table(rows)}")
    click.echo(f"\nif it came again now: {detail.next}")


@click.group()
def keys() -> None:
    """Keys: show, forget and release them."""


@keys.command("show")
@_which
def keys_show(as_json: bool, **flags: Any) -> None:
    """Show the record of a key, its result and the rows that belong to it. `explain` shows its history."""
    detail = _explained(flags)
    if as_json:
        print_json(detail)
    else:
        _facts(detail)


def _facts(detail: KeyDetail) -> None:
    for name, value in _lines(detail):
        click.echo(f"{name:<11} {printable(value)}")


def _lines(detail: KeyDetail) -> Iterator[tuple[str, str]]:
    yield "key", detail.key
    if detail.scope is not None:
        yield "scope", detail.scope
    since = "" if detail.changed_at is None else f" since {time_of(detail.changed_at)}"
    yield "state", f"{detail.state or 'no record'}{since}{' in Redis' if detail.store == 'redis' else ''}"
    if (request := detail.request) is not None:
        lost = "; its owner was lost, and it is not known how far it got" if request.lost else ""
        yield "request", f"running since {time_of(request.since)} in {request.owner or 'a process that is gone'}{lost}"
    if detail.created_at is not None:
        awaited = "" if detail.awaited is None else f", waits for its message from {detail.awaited}"
        yield "accepted", f"{time_of(detail.created_at)}{awaited}"
    if detail.until is not None:
        yield "kept until", time_of(detail.until)
    if detail.due is not None:
        yield "due", time_of(detail.due)
    if detail.result is not None:
        yield "result", detail.result
    if detail.attempts is not None:
        yield "attempts", f"{detail.attempts.count}, {detail.attempts.error or 'no error'}"
    for letter in detail.letters:
        closed = "" if letter.redriven_at is None else ", redriven or released"
        yield "letter", f"{letter.id} {letter.reason}, {letter.arrivals} arrivals{closed}"


@keys.command("list")
@click.option("--handler", help="Only keys of this handler.")
@click.option("--tenant", help="Only keys of this tenant.")
@click.option("--state", type=click.Choice([state.name.lower() for state in State]), help="Only keys in this state.")
@click.option("--after", metavar="KEY", help="Go on after this one; the last line names it.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=50, metavar="N", help="List at most N.  [default: 50]"
)
@database
@as_json
def keys_list(
    handler: str | None,
    tenant: str | None,
    state: str | None,
    after: str | None,
    limit: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """List records in the order of their keys. If few match, this reads all records."""
    settings, chosen = load(**flags), None if state is None else State[state.upper()]
    lines = asyncio.run(_keys(flags).list(handler=handler, tenant=tenant, state=chosen, after=after, limit=limit))
    if as_json:
        print_json(lines)
        return
    rows: list[tuple[str, ...]] = [("key", "scope", "state", "since")]
    rows += [(line.key[:_SHORT], printable(line.scope), line.state, time_of(line.changed_at)) for line in lines]
    click.echo(table(rows) if lines else "no keys")
    if not lines:
        say_unknown(settings, handler)
    if len(lines) == limit:
        click.echo(f"there may be more: --after {lines[-1].key}", err=True)


@keys.command("forget")
@click.option("--record", is_flag=True, help="Its record too: its message is then new, and runs if it comes again.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@deciding
@_which
def keys_forget(record: bool, yes: bool, by: str, as_json: bool, **flags: Any) -> None:
    """Remove the personal data of a key: result, dead letters, errors, steps, fingerprint, entries in the delivery log.

    Its record stays, as a hash and a state, so its message still does not run again. Dead letters of messages without a
    key cannot be found by one: use `dead list` and `dead discard`.
    """
    known = _keys(flags)
    found = asyncio.run(_find(known, flags, unknown=True))
    short = found.hex()[:_SHORT]
    if not yes:
        what = "and its record, so that its message would run again" if record else "but its record"
        click.confirm(f"forget all of {short}, {what}?", abort=True, err=True)
    click.echo(f"forgetting {found.hex()}; after an interruption, repeat this with all of these digits", err=True)

    async def forget_it() -> int:
        try:
            letters = await known.forget(found, by=by, record=record)
        except NothingFound:
            await refuse_to_forget(found)
            raise
        await _forget_copy(known, found)
        return letters

    letters = asyncio.run(forget_it())
    if as_json:
        print_json({"key": found.hex(), "letters": letters, "record": record})
    else:
        what = "it would run if it came again" if record else "its record stays, so it does not run again"
        click.echo(f"forgotten: {short}, with {letters} dead letters; {what}")


@keys.command("release")
@deciding
@_which
def keys_release(by: str, as_json: bool, **flags: Any) -> None:
    """Let the message of a dead or rejected key, or a request whose owner was lost, run when it comes again.

    The same works for an accepted key whose message was lost on its way from its broker. Runs nothing by itself:
    `dead redrive` runs a stored message. A completed key is never released.
    """
    known = _keys(flags)

    async def release() -> bytes:
        found = await _find(known, flags)
        await known.release(found, by=by)
        await _forget_copy(known, found)
        return found

    found = asyncio.run(release())
    if as_json:
        print_json({"key": found.hex(), "released": True})
    else:
        click.echo(f"released: {found.hex()[:_SHORT]}; its message runs when it comes again")
