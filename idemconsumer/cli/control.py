"""`pause`, `resume`, `drain`, `workers`, `audit`: what workers do, while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from idemconsumer.admin.control import UNRECORDED, Controls, Name
from idemconsumer.cli.banner import table
from idemconsumer.cli.options import ID, as_json, database, deciding, need_dsn, print_json, printable
from idemconsumer.settings import load

F = TypeVar("F", bound=Callable[..., Any])

NOT_REACHED = (
    "{} processes are not on record: programs that run its sagas themselves and ignore this, or workers that are "
    "just starting"
)
UNKNOWN = (
    "no handler {0!r} of app {1!r} is known, only: {2}; if it ever runs, it starts nothing until "
    "`idemconsumer resume {0} --app {1}`"
)


def _who(command: F) -> F:
    command = deciding(command)
    return click.option("--reason", metavar="TEXT", help="The reason; workers log it, and `audit` shows it.")(command)


def _controls(flags: dict[str, Any]) -> Controls:
    settings = load(**flags)
    return Controls(need_dsn(settings), settings.schema)


@click.command()
@click.argument("handler")
@click.option("--app", metavar="NAME", help="Its app, if several have a handler of this name, or none has run yet.")
@_who
@database
@as_json
def pause(handler: str, app: str | None, as_json: bool, **flags: Any) -> None:
    """Stop all workers from fetching or beginning anything for a handler.

    It takes effect within about a second, or within 15 s where workers get no notifications (behind a pooler). Runs in
    progress finish, sagas too. A message that is fetched but not begun is returned to its queue where that costs
    nothing, and waits otherwise. Workers that start later obey too, until `resume`.
    """
    _decide(Controls.pause, ("paused", "is paused already"), handler, app, flags, as_json)


@click.command()
@click.argument("handler")
@click.option("--app", metavar="NAME", help="Its app, if several have a handler of this name.")
@_who
@database
@as_json
def resume(handler: str, app: str | None, as_json: bool, **flags: Any) -> None:
    """Let workers run a paused handler again."""
    _decide(Controls.resume, ("resumed", "is not paused"), handler, app, flags, as_json)


def _decide(
    act: Callable[..., Awaitable[bool]],
    words: tuple[str, str],
    handler: str,
    app: str | None,
    flags: dict[str, Any],
    as_json: bool,
) -> None:
    by, reason = flags.pop("by"), flags.pop("reason")
    controls = _controls(flags)

    async def decide() -> tuple[str, bool, int, int, set[Name]]:
        its = app or await controls.app_of(handler)
        changed = await act(controls, its, handler, by=by, reason=reason)
        running = await controls.running(its, handler)
        unrecorded = sum(line.state == UNRECORDED for line in running)
        return its, changed, sum(line.live for line in running), unrecorded, await controls.known()

    its, changed, workers, unrecorded, known = asyncio.run(decide())
    is_known = (its, handler) in known
    if as_json:
        said = {"app": its, "handler": handler, "known": is_known, "changed": changed, "workers": workers}
        print_json(said | {"unrecorded_workers": unrecorded})
        return
    click.echo(printable(f"{its}/{handler} {words[0] if changed else words[1]}; {workers} workers run it"))
    if unrecorded:
        click.echo(f"warning: {NOT_REACHED.format(unrecorded)}", err=True)
    if act is Controls.pause and not is_known:
        others = ", ".join(sorted(name for app, name in known if app == its)) or "none"
        text = UNKNOWN.format(handler, its, others)
        click.echo(printable(f"warning: {text}"), err=True)


@click.command()
@click.argument("worker", type=ID)
@_who
@database
@as_json
def drain(worker: int, as_json: bool, **flags: Any) -> None:
    """Let one worker finish its runs, and stop.

    WORKER is an id from `workers list`. Its launcher starts no other worker in its place, until the launcher is
    restarted or gets a SIGHUP.
    """
    by, reason = flags.pop("by"), flags.pop("reason")
    changed = asyncio.run(_controls(flags).drain(worker, by=by, reason=reason))
    if as_json:
        print_json({"worker": worker, "changed": changed})
    else:
        click.echo(f"worker {worker} {'is asked to leave' if changed else 'was asked to leave already'}")


@click.group()
def workers() -> None:
    """Worker processes, as recorded in the database."""


@workers.command("list")
@click.option("--app", metavar="NAME", help="Only those of this app.")
@database
@as_json
def worker_list(app: str | None, as_json: bool, **flags: Any) -> None:
    """List recorded worker processes, and the leases of sagas whose worker is not recorded.

    A worker that was killed is `lost` for an hour. A program that runs sagas with `app.process` is not recorded, and is
    listed as `unrecorded`.
    """
    lines = asyncio.run(_controls(flags).workers(app))
    if as_json:
        print_json(lines)
        return
    rows: list[tuple[str, ...]] = [("id", "app", "host", "pid", "place", "version", "state", "seen", "handlers")]
    for line in lines:
        names = [f"{name} (paused)" if doing.paused else name for name, doing in line.handlers.items()]
        seen = "-" if line.id is None else f"{line.unseen:.0f} s ago"
        who = (line.app, line.host, str(line.pid), str(line.place), line.version, line.state, seen, ", ".join(names))
        rows.append(("-" if line.id is None else str(line.id), *map(printable, who)))
    click.echo(table(rows) if lines else "no workers")


@click.command()
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=50, metavar="N", help="List at most N.  [default: 50]"
)
@database
@as_json
def audit(limit: int, as_json: bool, **flags: Any) -> None:
    """List the decisions of people, newest first: who decided what, and why.

    Handlers paused and resumed, workers drained and reloaded, dead letters redriven and discarded, outgoing messages
    retried and discarded, keys forgotten and released, lost requests settled and released, places in Kafka skipped,
    sagas resumed, abandoned, decided about, cancelled, signalled and moved. `sagas show` lists the changes that code
    made to a saga.

    BY is the name that the person gave, ROLE the database's user.
    """
    entries = asyncio.run(_controls(flags).audit(limit))
    if as_json:
        print_json(entries)
        return
    rows: list[tuple[str, ...]] = [("at", "by", "role", "what", "target", "reason")]
    for each in entries:
        cells = (each.by, each.role, each.what, each.target, each.reason or "-")
        rows.append((f"{each.at:%Y-%m-%d %H:%M:%S}", *map(printable, cells)))
    click.echo(table(rows) if entries else "nothing was decided yet")
