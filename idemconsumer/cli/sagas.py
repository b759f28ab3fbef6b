"""`sagas`: which run, which wait, what happened to one, and what a person decides about it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click
import msgspec

from idemconsumer.admin.decisions import Cancellation
from idemconsumer.admin.hints import hint
from idemconsumer.admin.histories import histories
from idemconsumer.admin.saga_views import SagaDetail
from idemconsumer.admin.sagas import SagaAdmin
from idemconsumer.cli.banner import table
from idemconsumer.cli.options import ID, as_json, database, deciding, need_dsn, print_json, printable
from idemconsumer.cli.saga_lines import SHORT, facts, in_list, of_event, of_step
from idemconsumer.cli.unknown import say_unknown
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.ports.handler import Done, NotDone
from idemconsumer.process.child import Exit
from idemconsumer.rules.values import Signalled
from idemconsumer.settings import load

F = TypeVar("F", bound=Callable[..., Any])


def _which(command: F) -> F:
    """KEY, or --handler and --key."""
    for option in reversed(
        (
            click.argument("prefix", metavar="[KEY]", required=False),
            click.option("--handler", help="With --key: the handler's name."),
            click.option("--key", help="With --handler: the key's text, before hashing."),
        )
    ):
        command = option(command)
    return as_json(database(command))


def _admin(flags: dict[str, Any]) -> SagaAdmin:
    settings = load(**flags)
    return SagaAdmin(need_dsn(settings), settings.schema)


def _given(text: str, option: str, example: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise click.UsageError(f"{option} is not JSON ({error}); write e.g. {option} {example}") from None


async def _find(admin: SagaAdmin, prefix: str | None, handler: str | None, key: str | None) -> bytes:
    if (prefix is None) == (handler is None and key is None) or (handler is None) != (key is None):
        raise click.UsageError("give KEY (the first digits, as `sagas list` shows them) or --handler NAME --key TEXT")
    return await admin.find(prefix=prefix, handler=handler, key=key)


@click.group()
def sagas() -> None:
    """Sagas: multi-step work that is running or waiting for a person."""


@sagas.command("list")
@click.option("--state", type=click.Choice(["processing", "undoing", "dead"]), help="Only sagas in this state.")
@click.option("--stale", is_flag=True, help="Only sagas that lost their worker.")
@click.option("--handler", help="Only sagas of this handler.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=50, metavar="N", help="List at most N.  [default: 50]"
)
@database
@as_json
def saga_list(
    state: Literal["processing", "undoing", "dead"] | None,
    stale: bool,
    handler: str | None,
    limit: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """List sagas that have not ended, newest first."""
    settings = load(**flags)
    admin = SagaAdmin(need_dsn(settings), settings.schema)
    lines = asyncio.run(admin.sagas(handler=handler, state=state, stale=stale, limit=limit))
    if as_json:
        print_json(lines)
        return
    rows: list[tuple[str, ...]] = [("key", "begun", "handler", "state", "at", "owner", "attempt", "error")]
    for line in lines:
        rows.append(tuple(map(printable, in_list(line))))
    click.echo(table(rows) if lines else "no sagas")
    if not lines:
        say_unknown(settings, handler)


@sagas.command("show")
@_which
def saga_show(prefix: str | None, handler: str | None, key: str | None, as_json: bool, **flags: Any) -> None:
    """Show one saga: its state, its history and its steps."""
    admin = _admin(flags)

    async def read() -> SagaDetail:
        return await admin.saga(await _find(admin, prefix, handler, key))

    detail = asyncio.run(read())
    if as_json:
        hinted = None if detail.running is None or detail.running.parked is None else hint(detail.running.parked)
        print_json(msgspec.to_builtins(detail) | {"open_intents": detail.open_intents, "hint": hinted})
        return
    for name, value in facts(detail):
        click.echo(f"{name:<11} {printable(value)}")
    events: list[tuple[str, ...]] = [("at", "what", "owner", "token", "attempt", "took", "detail")]
    events += [tuple(map(printable, of_event(event))) for event in detail.timeline]
    click.echo(f"\n{table(events)}")
    if detail.steps:
        rows: list[tuple[str, ...]] = [
            ("step", "kind", "state", "attempts", "token", "started", "ended", "took", "key")
        ]
        rows += [tuple(map(printable, of_step(step))) for step in detail.steps]
        click.echo(f"\n{table(rows)}")
    else:
        click.echo("\nno step is recorded")


@sagas.command("export")
@click.option("--handler", help="Only sagas of this handler.")
@click.option("--state", type=click.Choice(["processing", "undoing", "dead"]), help="Only sagas in this state.")
@click.option("--since", metavar="DURATION", help="Only sagas that began in the last 2h, 7d, …")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=1000, metavar="N", help="At most N.  [default: 1000]"
)
@database
def saga_export(
    handler: str | None,
    state: Literal["processing", "undoing", "dead"] | None,
    since: str | None,
    limit: int,
    **flags: Any,
) -> None:
    """Write the histories of sagas that have not ended, newest first, as lines of JSON.

    They are for `idemconsumer.testing.replay`, which reports whether a changed handler would go on with these sagas.
    They hold payloads and outputs as they are stored, with all personal data in them.
    """
    settings = load(**flags)
    seconds = None if since is None else parse_duration(since)

    async def export() -> None:
        found = histories(need_dsn(settings), settings.schema, handler=handler, state=state, since=seconds, limit=limit)
        async for history in found:
            print_json(history)

    click.echo("warning: what follows holds payloads and outputs; keep it where personal data may be kept", err=True)
    asyncio.run(export())


@sagas.command("resume")
@click.option("--accept-version", is_flag=True, help="Resume even if the handler's version or steps have changed.")
@deciding
@_which
def saga_resume(
    prefix: str | None,
    handler: str | None,
    key: str | None,
    accept_version: bool,
    by: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Resume a waiting saga now, on any worker, with its full number of attempts."""
    admin = _admin(flags)

    async def resume() -> SagaDetail:
        found = await _find(admin, prefix, handler, key)
        await admin.resume(found, by=by, accept_version=accept_version)
        return await admin.saga(found)

    _say(asyncio.run(resume()), "resumed", as_json=as_json)


@sagas.command("abandon")
@click.option("--undo/--no-undo", default=None, help="Undo its finished steps first, or leave them.  [default: ask]")
@deciding
@_which
def saga_abandon(
    prefix: str | None,
    handler: str | None,
    key: str | None,
    undo: bool | None,
    by: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """End a waiting saga: it becomes failed, with the rejection `abandoned`."""
    admin = _admin(flags)

    async def read() -> tuple[bytes, SagaDetail]:
        found = await _find(admin, prefix, handler, key)
        return found, await admin.saga(found)

    found, detail = asyncio.run(read())
    for step in detail.open_intents:
        click.echo(f"warning: it is not known whether {step!r} was done, and nothing will undo it", err=True)
    if undo is None:
        done = [step.name for step in detail.steps if step.state == "done" and step.has_undo]
        undo = click.confirm(f"undo its finished steps ({', '.join(done) or 'none has an undo'})?", err=True)

    async def abandon() -> SagaDetail:
        await admin.abandon(found, undo=undo, by=by)
        return await admin.saga(found)

    _say(asyncio.run(abandon()), "abandoned, to be undone by a worker" if undo else "abandoned", as_json=as_json)


@sagas.command("decide")
@click.argument("prefix", metavar="KEY")
@click.argument("step", metavar="STEP")
@click.option("--done", metavar="JSON", help="It was done, with this output: its function's return value, or null.")
@click.option("--not-done", is_flag=True, help="It was not done, and is called again.")
@click.option("--attempt", type=ID, help="Refuse the answer if another attempt of the step is open by now.")
@deciding
@database
@as_json
def saga_decide(
    prefix: str,
    step: str,
    done: str | None,
    not_done: bool,
    attempt: int | None,
    by: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Report how a call of unknown outcome ended, or its undo. Then the saga goes on.

    STEP is its name. `sagas show` lists it, with its attempts and the key that the remote got.
    """
    if (done is None) != not_done:
        raise click.UsageError("give either --done JSON or --not-done")
    answer = NotDone() if done is None else Done(_given(done, "--done", "'\"ch_17\"' or --done null"))
    admin = _admin(flags)

    async def decide() -> SagaDetail:
        found = await admin.find(prefix=prefix)
        await admin.decide(found, step, answer, by=by, attempt=attempt)
        return await admin.saga(found)

    _say(asyncio.run(decide()), "decided", as_json=as_json)


@sagas.command("cancel")
@click.option("--undo", is_flag=True, help="Undo its finished steps.  [default: their effects stand]")
@deciding
@_which
def saga_cancel(
    prefix: str | None,
    handler: str | None,
    key: str | None,
    undo: bool,
    by: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Cancel a saga that has not ended, even if a worker runs it: it becomes failed, with the rejection `cancelled`.

    Its worker notices within about a second. Exit code 1: it was too late.
    """
    admin = _admin(flags)

    async def cancel() -> tuple[bytes, Cancellation]:
        found = await _find(admin, prefix, handler, key)
        return found, await admin.cancel(found, undo=undo, by=by)

    found, answer = asyncio.run(cancel())
    state = "unknown" if answer.state is None else answer.state.name.lower()
    if as_json:
        undone = answer.undo if answer.accepted else None
        print_json({"key": found.hex(), "accepted": answer.accepted, "state": state, "undo": undone})
    elif answer.accepted:
        how = "its finished steps are undone first" if answer.undo else "its effects stand"
        click.echo(f"cancelled: {found.hex()[:SHORT]}, which was {state}; {how}")
    if not answer.accepted:
        click.echo(f"{found.hex()[:SHORT]} is not cancelled: it is {state} already", err=True)
        sys.exit(Exit.ERROR)


@sagas.command("signal")
@click.option("--name", required=True, help="The signal's name, as in saga.wait(NAME).")
@click.option("--payload", metavar="JSON", help="Its payload.  [default: none]")
@deciding
@_which
def saga_signal(
    name: str,
    payload: str | None,
    prefix: str | None,
    handler: str | None,
    key: str | None,
    by: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Send a signal to a saga. The next wait for a name takes its oldest signal.

    Exit code 1: the saga has ended, or is being undone, and nothing is sent.
    """
    given = None if payload is None else _given(payload, "--payload", '\'{"by": "Ann"}\'')
    admin = _admin(flags)

    async def send() -> tuple[bytes, Signalled]:
        found = await _find(admin, prefix, handler, key)
        return found, await admin.signal(found, name, given, by=by)

    found, answer = asyncio.run(send())
    if as_json:
        print_json({"key": found.hex(), "signal": name, "answer": str(answer)})
    elif answer is not Signalled.ENDED:
        click.echo(f"sent: {printable(name)} to {found.hex()[:SHORT]}")
    if answer is Signalled.ENDED:
        click.echo(f"{found.hex()[:SHORT]} has ended, or is being undone: nothing is sent", err=True)
        sys.exit(Exit.ERROR)


@sagas.command("move")
@click.argument("source", metavar="APP/HANDLER")
@click.argument("to", metavar="APP/HANDLER")
@deciding
@database
@as_json
def saga_move(source: str, to: str, by: str, as_json: bool, **flags: Any) -> None:
    """Move the sagas of a renamed handler or app to another handler.

    They keep their keys, their steps and their version. Sagas leased by a live worker are left as they are. If the
    handler has no sagas, the command lists the handlers that have some.
    """
    admin = _admin(flags)
    moved, held = asyncio.run(admin.move(_app_and_handler(source), _app_and_handler(to), by=by))
    if as_json:
        print_json({"moved": moved, "held": held})
    else:
        click.echo(f"moved: {moved} sagas of {source} to {to}")
    if held:
        click.echo(f"left: {held}, which live workers own; stop those workers, and repeat this", err=True)
    elif not moved:
        others = ", ".join(asyncio.run(admin.handlers())) or "none at all"
        click.echo(f"{source} has no unfinished sagas; unfinished sagas belong to: {others}", err=True)


def _app_and_handler(text: str) -> tuple[str, str]:
    app, slash, handler = text.rpartition("/")
    if not slash or not app or not handler:
        raise click.UsageError(f"{text!r} is not APP/HANDLER; write e.g. shop/book_ride, as `idemconsumer check` does")
    return app, handler


def _say(detail: SagaDetail, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"key": detail.key, "state": detail.state})
    else:
        click.echo(f"{what}: {detail.key[:SHORT]} is {detail.state}")
