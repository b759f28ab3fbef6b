"""`pause`, `resume`, `drain`, `workers`, `audit`: control of running workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from click import argument, option

from idemconsumer.admin.control import UNRECORDED, Controls, WorkerLine
from idemconsumer.cli.flags import ID, deciding, limit, together
from idemconsumer.cli.layout import listed, printable
from idemconsumer.cli.verbs import Given, Output, Verbs, verb

NOT_REACHED = (
    "{} processes are not on record: programs that run the handler's sagas themselves, which ignore this command, or "
    "workers that are just starting"
)
UNKNOWN = (
    "no handler {0!r} of app {1!r} is known, only: {2}; if it ever runs, it starts nothing until "
    "`idemconsumer resume {0} --app {1}`"
)

_who = together(option("--reason", metavar="TEXT", help="The reason; workers log it, and `audit` shows it."), deciding)


@verb(
    "pause",
    argument("handler"),
    option("--app", metavar="NAME", help="Its app, if several have a handler of this name, or none has run yet."),
    _who,
)
async def pause(given: Given) -> Output:
    """Stop all workers from fetching or beginning anything for a handler.

    It takes effect within about a second, or within 15 s where workers get no notifications (behind a pooler). Runs in
    progress finish, sagas too. Of the fetched messages that have not begun, those of Postgres queues, and sagas, are
    returned at once; those of other brokers wait in their worker. Workers that start later obey too, until `resume`.
    """
    return await _decide(Controls.pause, ("paused", "is paused already"), given)


@verb(
    "resume",
    argument("handler"),
    option("--app", metavar="NAME", help="Its app, if several have a handler of this name."),
    _who,
)
async def resume(given: Given) -> Output:
    """Let workers run a paused handler again."""
    return await _decide(Controls.resume, ("resumed", "is not paused"), given)


async def _decide(act: Callable[..., Awaitable[bool]], words: tuple[str, str], given: Given) -> Output:
    controls, handler = Controls(*given.database), given.handler
    its = given.app or await controls.app_of(handler)
    changed = await act(controls, its, handler, by=given.by, reason=given.reason)
    running = await controls.running(its, handler)
    known = await controls.known()
    workers, unrecorded = sum(line.live for line in running), sum(line.state == UNRECORDED for line in running)
    notes = [NOT_REACHED.format(unrecorded)] if unrecorded else []
    if act is Controls.pause and (its, handler) not in known:
        others = ", ".join(sorted(name for app, name in known if app == its)) or "none"
        notes.append(printable(UNKNOWN.format(handler, its, others)))
    return Output(
        {
            "app": its,
            "handler": handler,
            "known": (its, handler) in known,
            "changed": changed,
            "workers": workers,
            "unrecorded_workers": unrecorded,
        },
        printable(f"{its}/{handler} {words[0] if changed else words[1]}; {workers} workers run it"),
        [f"warning: {note}" for note in notes],
    )


@verb("drain", argument("worker", type=ID), _who)
async def drain(given: Given) -> Output:
    """Let one worker finish its runs, and stop.

    WORKER is an id from `workers list`. Its launcher starts no other worker in its place, until the launcher is
    restarted or gets a SIGHUP.
    """
    changed = await Controls(*given.database).drain(given.worker, by=given.by, reason=given.reason)
    said = f"worker {given.worker} {'is asked to drain' if changed else 'was already asked to drain'}"
    return Output({"worker": given.worker, "changed": changed}, said)


workers = Verbs("workers", help="Worker processes, as recorded in the database.")


@workers.verb("list", option("--app", metavar="NAME", help="Only those of this app."))
async def worker_list(given: Given) -> Output:
    """List recorded worker processes, and the leases of sagas whose worker is not recorded.

    A worker that was killed is `lost` for an hour. A program that runs sagas with `app.process` is not recorded, and is
    listed as `unrecorded`.
    """
    lines = await Controls(*given.database).workers(given.app)
    columns = "id, app, host, pid, place, version, state, seen, handlers"
    return Output(lines, listed(columns, map(_in_list, lines), "no workers"))


def _in_list(of: WorkerLine) -> tuple[object, ...]:
    names = ", ".join(f"{name} (paused)" if doing.paused else name for name, doing in of.handlers.items())
    seen = None if of.id is None else f"{of.unseen:.0f} s ago"
    return of.id, of.app, of.host, of.pid, of.place, of.version, of.state, seen, names


@verb("audit", limit)
async def audit(given: Given) -> Output:
    """List the decisions of people, newest first: who decided what, and why.

    Handlers paused and resumed, workers drained and reloaded, dead letters redriven and discarded, outgoing messages
    retried and discarded, keys forgotten and released, lost requests settled and released, places in Kafka skipped,
    sagas resumed, abandoned, decided about, cancelled, signalled and moved. `sagas show` lists the changes that code
    made to a saga.

    BY is the name that the person gave, ROLE the database's user.
    """
    found = await Controls(*given.database).audit(given.limit)
    rows = ((each.at, each.by, each.role, each.what, each.target, each.reason or None) for each in found)
    return Output(found, listed("at, by, role, what, target, reason", rows, "nothing was decided yet"))
