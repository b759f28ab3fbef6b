"""`sagas`: lists running and waiting sagas, shows the history of one, and takes decisions about one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click
import msgspec
from click import argument, option

from idemconsumer.admin.hints import hint
from idemconsumer.admin.histories import histories
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.admin.saga_views import SagaDetail
from idemconsumer.admin.sender import NamedRow
from idemconsumer.admin.timeline import Event
from idemconsumer.cli.choices import listing, need_key, seconds
from idemconsumer.cli.flags import ID, as_json, count, database, deciding, flag, key, limit, together
from idemconsumer.cli.layout import facts as as_lines
from idemconsumer.cli.layout import listed, printable, short, time_of
from idemconsumer.cli.verbs import Given, Output, Verbs, print_json
from idemconsumer.handlers.arguments import Done, NotDone
from idemconsumer.process.child import Exit
from idemconsumer.rules.values import Signalled

_which = together(as_json, database, key)
_handler = option("--handler", help="Only sagas of this handler.")
_in_state = option("--state", type=click.Choice(["processing", "undoing", "dead"]), help="Only sagas in this state.")


def _given(text: str, option: str, example: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise click.UsageError(f"{option} is not JSON ({error}); write e.g. {option} {example}") from None


async def _found(given: Given) -> tuple[SagaAdmin, bytes]:
    """The `SagaAdmin` for decisions, and the stored key of the chosen saga."""
    admin = SagaAdmin(*given.database)
    need_key(given, "sagas list")
    return admin, await admin.find(prefix=given.prefix, handler=given.handler, key=given.key)


sagas = Verbs("sagas", help="Sagas: multi-step work that is running or waiting for a person.")


@sagas.verb("list", _in_state, flag("--stale", help="Only sagas that lost their worker."), _handler, limit)
async def saga_list(given: Given) -> Output:
    """List sagas that have not ended, newest first."""
    admin = SagaAdmin(*given.database)
    lines = await admin.sagas(handler=given.handler, state=given.state, stale=given.stale, limit=given.limit)
    columns = "key, begun, handler, state, at, owner, attempt, error"
    return await listing(given, lines, columns, map(_in_list, lines), "no sagas")


@sagas.verb("show", ends=_which)
async def saga_show(given: Given) -> Output:
    """Show one saga: its state, its history and its steps."""
    admin, found = await _found(given)
    detail = await admin.saga(found)
    hinted = None if detail.running is None or detail.running.parked is None else hint(detail.running.parked)
    events = listed("at, what, owner, token, attempt, took, detail", map(_in_history, detail.timeline))
    columns = "step, kind, state, attempts, token, started, ended, took, key"
    steps = listed(columns, map(_among_steps, detail.steps), "no step is recorded")
    text = (*as_lines(facts(detail)), "", *events, "", *steps)
    return Output(msgspec.to_builtins(detail) | {"open_intents": detail.open_intents, "hint": hinted}, text)


@sagas.verb(
    "export",
    _handler,
    _in_state,
    option("--since", metavar="DURATION", help="Only sagas that began in the last 2h, 7d, …"),
    count("--limit", "At most N.", 1000),
    ends=database,
)
async def saga_export(given: Given) -> None:
    """Write the histories of sagas that have not ended, newest first, as lines of JSON.

    They are for `idemconsumer.testing.replay`, which reports whether a changed handler would go on with these sagas.
    They hold payloads and outputs as they are stored, with all personal data in them.
    """
    since = seconds(given.since)
    click.echo("warning: what follows holds payloads and outputs; keep it where personal data may be kept", err=True)
    chosen = {"handler": given.handler, "state": given.state, "since": since, "limit": given.limit}
    async for history in histories(*given.database, **chosen):
        print_json(history)


@sagas.verb(
    "resume",
    flag("--accept-version", help="Resume even if the handler's version or steps have changed."),
    deciding,
    ends=_which,
)
async def saga_resume(given: Given) -> Output:
    """Resume a waiting saga now, on any worker, with its full number of attempts."""
    admin, found = await _found(given)
    await admin.resume(found, by=given.by, accept_version=given.accept_version)
    return _answer(await admin.saga(found), "resumed")


@sagas.verb(
    "abandon",
    option("--undo/--no-undo", default=None, help="Undo its finished steps first, or leave them.  [default: ask]"),
    deciding,
    ends=_which,
)
def saga_abandon(given: Given) -> Output:
    """End a waiting saga: it becomes failed, with the rejection `abandoned`."""
    undo = given.undo

    async def read() -> SagaDetail:
        admin, found = await _found(given)
        return await admin.saga(found)

    detail = asyncio.run(read())
    for step in detail.open_intents:
        click.echo(f"warning: it is not known whether {step!r} was done, and nothing will undo it", err=True)
    if undo is None:
        done = [step.name for step in detail.steps if step.state == "done" and step.has_undo]
        undo = click.confirm(f"undo its finished steps ({', '.join(done) or 'none has an undo'})?", err=True)

    async def abandon() -> SagaDetail:
        admin, found = SagaAdmin(*given.database), bytes.fromhex(detail.key)
        await admin.abandon(found, undo=undo, by=given.by)
        return await admin.saga(found)

    return _answer(asyncio.run(abandon()), "abandoned, to be undone by a worker" if undo else "abandoned")


@sagas.verb(
    "decide",
    argument("prefix", metavar="KEY"),
    argument("step", metavar="STEP"),
    option("--done", metavar="JSON", help="It was done, with this output: its function's return value, or null."),
    flag("--not-done", help="It was not done, and is called again."),
    option("--attempt", type=ID, help="Refuse the answer if another attempt of the step is open by now."),
    deciding,
)
async def saga_decide(given: Given) -> Output:
    """Report the unknown outcome of a call, or of the undo of a call. Then the saga goes on.

    STEP is the step's name. `sagas show` lists it, with its attempts and the key that the remote got.
    """
    if (given.done is None) != given.not_done:
        raise click.UsageError("give either --done JSON or --not-done")
    answer = NotDone() if given.done is None else Done(_given(given.done, "--done", "'\"ch_17\"' or --done null"))
    admin = SagaAdmin(*given.database)
    found = await admin.find(prefix=given.prefix)
    await admin.decide(found, given.step, answer, by=given.by, attempt=given.attempt)
    return _answer(await admin.saga(found), "decided")


@sagas.verb(
    "cancel", flag("--undo", help="Undo its finished steps.  [default: their effects stand]"), deciding, ends=_which
)
async def saga_cancel(given: Given) -> Output:
    """Cancel a saga that has not ended, even if a worker runs it: it becomes failed, with the rejection `cancelled`.

    Its worker notices within about a second. Exit code 1: it was too late.
    """
    admin, found = await _found(given)
    answer = await admin.cancel(found, undo=given.undo, by=given.by)
    state = "unknown" if answer.state is None else answer.state.name.lower()
    undone = answer.undo if answer.accepted else None
    as_json = {"key": found.hex(), "accepted": answer.accepted, "state": state, "undo": undone}
    if not answer.accepted:
        said = f"{short(found)} is not cancelled: it is {state} already"
        return Output(as_json, warnings=[said], code=Exit.ERROR)
    how = "its finished steps are undone first" if answer.undo else "its effects stand"
    return Output(as_json, f"cancelled: {short(found)}, which was {state}; {how}")


@sagas.verb(
    "signal",
    option("--name", required=True, help="The signal's name, as in saga.wait(NAME)."),
    option("--payload", metavar="JSON", help="Its payload.  [default: none]"),
    deciding,
    ends=_which,
)
async def saga_signal(given: Given) -> Output:
    """Send a signal to a saga. The next `saga.wait` for a name takes the oldest signal of that name.

    Exit code 1: the saga has ended, or is being undone, and nothing is sent.
    """
    payload = None if given.payload is None else _given(given.payload, "--payload", '\'{"by": "Ann"}\'')
    admin, found = await _found(given)
    answer = await admin.signal(found, given.name, payload, by=given.by)
    as_json = {"key": found.hex(), "signal": given.name, "answer": str(answer)}
    if answer is Signalled.ENDED:
        said = f"{short(found)} has ended, or is being undone: nothing is sent"
        return Output(as_json, warnings=[said], code=Exit.ERROR)
    return Output(as_json, f"sent: {printable(given.name)} to {short(found)}")


@sagas.verb("move", argument("source", metavar="APP/HANDLER"), argument("to", metavar="APP/HANDLER"), deciding)
async def saga_move(given: Given) -> Output:
    """Move the sagas of a renamed handler or app to another handler.

    They keep their keys, their steps and their version. Sagas leased by a live worker are left as they are. If the
    handler has no sagas, the command lists the handlers that have some.
    """
    admin = SagaAdmin(*given.database)
    moved, held = await admin.move(_app_and_handler(given.source), _app_and_handler(given.to), by=given.by)
    warnings = []
    if held:
        warnings = [f"left: {held}, which live workers own; stop those workers, and repeat this"]
    elif not moved:
        others = ", ".join(await admin.handlers()) or "none at all"
        warnings = [f"{given.source} has no unfinished sagas; unfinished sagas belong to: {others}"]
    said = f"moved: {moved} sagas of {given.source} to {given.to}"
    return Output({"moved": moved, "held": held}, said, warnings=warnings)


def _app_and_handler(text: str) -> tuple[str, str]:
    app, slash, handler = text.rpartition("/")
    if not slash or not app or not handler:
        raise click.UsageError(f"{text!r} is not APP/HANDLER; write e.g. shop/book_ride, as `idemconsumer check` does")
    return app, handler


def _answer(detail: SagaDetail, what: str) -> Output:
    said = f"{what}: {short(detail.key)} is {detail.state}"
    return Output({"key": detail.key, "state": detail.state}, said)


# ------------------------------------------------------------------------------------------------------------ one saga
def facts(detail: SagaDetail) -> Iterator[tuple[str, Any]]:
    """The facts about a saga, without its history and its steps."""
    yield "key", detail.key
    yield "scope", detail.scope
    yield "begun by", detail.parent and f"saga {short(detail.parent)}"
    if (line := detail.running) is None:
        yield "state", f"{detail.state} since {_time(detail.changed_at)}"
        yield "result", detail.result
        return
    for each in detail.signals:
        awaited = "waited for" if each.awaited else "no wait has asked for it"
        yield "signal", f"{each.name}: {each.signals} since {_time(each.first_at)}, {awaited}"
    yield "state", _state(line)
    yield "message", f"{line.source} {line.position}" + (f", id {line.message_id}" if line.message_id else "")
    yield "begun", _time(line.started_at) + (f", version {line.version}" if line.version else "")
    yield "owner", f"{_owner(line)}, token {line.token}, attempt {line.attempt}"
    if line.owner is None and line.parked is None:
        yield "due", _time(line.due)
    if line.waits:
        yield "waits for", ", ".join(line.waits)
    yield "at", line.recovery_point or "no finished step"
    yield "error", line.error
    if line.cancel is not None and line.state != "undoing":
        yield "cancel", "requested, " + ("to be undone" if line.cancel else "its effects stand")
    if detail.open_intents:
        yield "unknown", f"whether {', '.join(detail.open_intents)} was done"
    yield "what to do", line.parked and hint(line.parked)


def _in_list(line: NamedRow) -> tuple[object, ...]:
    state, error = _state(line) + _waits(line), (line.error or "")[:60]
    at = line.recovery_point or None
    return short(line.key), line.started_at, line.handler, state, at, _owner(line), line.attempt, error


def _in_history(event: Event) -> tuple[object, ...]:
    at, took = _time(event.at), _took(event.seconds)
    return at, event.what, event.owner or None, event.token, event.attempt, took, event.detail or None


def _among_steps(step: NamedRow) -> tuple[object, ...]:
    state = step.state + (", overlapped" if step.overlapped else "") + (", has undo" if step.has_undo else "")
    ended = None if step.finished_at is None else _time(step.finished_at)
    if step.state == "waiting" and step.until is not None:
        ended = f"by {_time(step.until)}"
    key = (step.undo_key if step.state.startswith("und") else step.key) or None
    began, took = _time(step.started_at), _took(step.seconds)
    return step.name, step.kind, state, step.attempts, step.token, began, ended, took, key


def _time(at: datetime) -> str:
    return f"{time_of(at)}.{at.microsecond // 1000:03}"


def _took(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.0f} ms"


def _state(line: NamedRow) -> str:
    return f"{line.state} ({line.parked})" if line.parked else line.state


def _waits(line: NamedRow) -> str:
    if not line.waits or line.owner is not None or line.parked is not None:
        return ""
    return f", {' and '.join(line.waits)} until {time_of(line.due)}"


def _owner(line: NamedRow) -> str:
    if line.owner is None:
        return "a lost worker" if line.stale else "none"
    return f"{line.owner} (lost)" if line.stale else line.owner
