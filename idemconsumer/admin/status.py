"""The present state as the database knows it, read by indexed statements with a bounded number of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import unquote

import msgspec

from idemconsumer.admin.control import Controls, Name, WorkerLine
from idemconsumer.admin.sender import NamedRow, Statements
from idemconsumer.message import keys
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.held_up import Condition, HeldUp, paused, together

MOST: Final = 10_000  # rows read per queue, saga handler and reason of dead letters


class HandlerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A handler that a live worker runs, or that is paused.

    `queues`: its own queues in Postgres. `lag`: of its other sources, as far as workers know it. `lanes`, and `running`
    ones among them: in all `workers` together; `outcomes`: of deliveries since these workers started. `obeyed`: how
    many workers report that they have paused it. `conditions`: what holds it up, and in how many workers (O34); empty
    if it works.
    """

    app: str
    handler: str
    sources: list[str]
    queues: list[str]
    lag: dict[str, Lag]
    workers: int
    lanes: int
    running: int
    outcomes: dict[str, int]
    paused: NamedRow | None = None
    obeyed: int = 0
    conditions: list[Condition] = []


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The present state; `at` is the database's time. At most `most` rows of each kind were read, plus one to see
    whether there are `more`.

    `queues`, `sagas`, `letters`, `outbox` and `requests`: see `status_queues` and so on in `sql`. A queue is listed if
    it is not empty. Its `handler` is app/handler of its messages, None if no live worker reads it; its `kind` is
    `source`, `own` (sagas begun from code, or moved here) or `retries`. Outgoing messages are `relayed` if a live
    recorded worker can reach their broker.
    """

    at: datetime
    handlers: list[HandlerLine]
    queues: list[NamedRow]
    sagas: list[NamedRow]
    letters: list[NamedRow]
    workers: list[WorkerLine]
    most: int
    outbox: list[NamedRow] = []
    requests: list[NamedRow] = []


async def status(dsn: str, schema: str, app: str | None = None, *, most: int | None = None) -> Status:
    """The status of all apps in the schema, or of one; `most` is MOST unless given. Raises StoreUnavailable, and
    ConfigurationError if the schema is not migrated."""
    controls, scopes = Controls(dsn, schema), None if app is None else keys.scopes_of(app)
    most = MOST if most is None else most
    given = {"most": most, "app": None if scopes is None else scopes[:-1], "scopes": scopes}
    workers, pauses = await controls.workers(app), await controls.paused()
    async with Statements(dsn, schema).sending() as send:
        rows = {
            name: await send(f"status_{name}", **given) for name in ("queues", "sagas", "letters", "outbox", "requests")
        }
        ((at,),) = [row.values() for row in await send("status_time")]
    relays = {each for line in workers if line.live for doing in line.handlers.values() for each in doing.relays}
    handlers = [line for line in handler_lines(workers, pauses, at) if app in (None, line.app)]
    return Status(
        at=at,
        handlers=handlers,
        queues=[line for row in rows["queues"] if (line := _queue_line(row, handlers)).handler or app is None],
        sagas=[NamedRow(row, app=unquote(row.app)) for row in rows["sagas"]],
        letters=rows["letters"],
        workers=workers,
        most=most,
        outbox=[_outbox_line(row, relays) for row in rows["outbox"] if app is None],
        requests=[NamedRow(row, app=unquote(row.app), route=unquote(row.route)) for row in rows["requests"]],
    )


def _outbox_line(row: NamedRow, relays: Container[str]) -> NamedRow:
    more = row.pop("more")
    return NamedRow(row, relayed=row.destination.partition(":")[0] in relays, more=more)


def in_words(each: Condition, line: HandlerLine, at: datetime) -> str:
    """What holds a handler up, since when, and in how many of its workers, at the time `at`."""
    part = "" if each.workers == line.workers else f", in {each.workers} of {line.workers} workers"
    return f"{each.text} since {at - timedelta(seconds=each.seconds):%Y-%m-%d %H:%M:%S}{part}"


def _conditions(pause: NamedRow | None, its: Sequence[WorkerLine], name: str, at: datetime) -> list[Condition]:
    """The conditions by people's decisions and by the last reports of its workers, which may be a while old."""
    said = [(line, each) for line in its for each in line.handlers[name].conditions if each.by is not HeldUp.PAUSED]
    known = together(msgspec.structs.replace(each, seconds=each.seconds + line.unseen) for line, each in said)
    if pause is None:
        return known
    obeyed = sum(line.handlers[name].paused for line in its)
    return [paused(pause.by, pause.reason, (at - pause.at).total_seconds(), obeyed), *known]


def handler_lines(workers: Sequence[WorkerLine], paused: Sequence[NamedRow], at: datetime) -> list[HandlerLine]:
    """The handlers by app and name, at the time `at`."""
    pauses = {(each.app, each.handler): each for each in paused}
    running: dict[Name, list[WorkerLine]] = {name: [] for name in pauses}
    for line in workers:
        for name in line.handlers if line.live else ():
            running.setdefault((line.app, name), []).append(line)
    return [
        _handler_line(app, name, pauses.get((app, name)), lines, at) for (app, name), lines in sorted(running.items())
    ]


def _handler_line(
    app: str, name: str, pause: NamedRow | None, workers: Sequence[WorkerLine], at: datetime
) -> HandlerLine:
    its = [line.handlers[name] for line in workers]
    outcomes = Counter[str]()
    lags: dict[str, Lag] = {}
    for each in its:
        outcomes.update(each.outcomes)
        for source, lag in each.lag.items():
            lags[source] = lag.beside(lags[source]) if source in lags else lag
    return HandlerLine(
        app=app,
        handler=name,
        sources=sorted({source for each in its for source in each.sources}),
        queues=sorted({queue for each in its for queue in each.queues}),
        lag=lags,
        workers=len(its),
        lanes=sum(each.lanes for each in its),
        running=sum(each.running for each in its),
        outcomes=dict(outcomes),
        paused=pause,
        obeyed=sum(each.paused for each in its),
        conditions=_conditions(pause, workers, name, at),
    )


def _queue_line(row: NamedRow, handlers: Sequence[HandlerLine]) -> NamedRow:
    """The row of a queue, with its handler."""
    name = row.pop("name")
    source = f"postgres:{name}"
    kind = "retries" if name.startswith("~~") else "own" if name.startswith("~") else "source"
    readers = [f"{each.app}/{each.handler}" for each in handlers if source in each.sources or source in each.queues]
    return NamedRow({"name": name, "kind": kind, "handler": readers[0] if readers else None, **row})
