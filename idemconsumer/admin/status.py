"""How things stand, from what the database knows; by indexed statements that read a bounded number of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from idemconsumer.admin.control import Controls, Name, Paused, WorkerLine
from idemconsumer.admin.sender import Statements
from idemconsumer.message import keys
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.held_up import Condition, HeldUp, paused, together

MOST: Final = 10_000  # rows that are read of each queue, handler of sagas and reason of letters


class QueueLine(msgspec.Struct, frozen=True, kw_only=True):
    """A queue in Postgres with anything in it. `handler`: whose messages these are, as app/handler, None if no live
    worker reads it; `kind`: `source`, `own` (begun from code, or moved here) or `retries`. `waiting` could be taken
    now, the first for `oldest` seconds; `in_hand` of workers; `delayed` until they are due, the first at `next`, or
    `overdue` for so many seconds. `more`: not all of them were read, so there are more."""

    name: str
    kind: str
    handler: str | None
    waiting: int
    in_hand: int
    oldest: float | None
    delayed: int
    next: datetime | None
    overdue: float | None
    more: bool


class SagaStates(msgspec.Struct, frozen=True, kw_only=True):
    """Sagas of a handler that have not ended: `running` in a worker, `waiting` until they are due, `due` now and the
    first one `overdue` for so many seconds, `review` for a person. `undoing` are among these. `more` as in QueueLine.
    """

    app: str
    handler: str
    running: int
    waiting: int
    due: int
    undoing: int
    review: int
    oldest: datetime | None
    overdue: float | None
    more: bool


class OutboxLine(msgspec.Struct, frozen=True, kw_only=True):
    """Outgoing messages to one destination: `waiting` to be sent, the oldest for so many seconds; `later`, because they
    were published so or refused, perhaps with this `error`; `parked` for a person. `relayed`: a live worker on record
    can reach its broker. `more` as in QueueLine."""

    destination: str
    waiting: int
    oldest: float | None
    later: int
    parked: int
    error: str | None
    relayed: bool
    more: bool


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a route in leased mode that have not ended, the first since `oldest`: `running`, or `lost` with the
    process that ran them. `more` as in QueueLine."""

    app: str
    route: str
    running: int
    lost: int
    oldest: datetime
    more: bool


class Letters(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters that wait for a person, by reason; `newest`: when one arrived last. `more` as in QueueLine."""

    reason: str
    letters: int
    newest: datetime
    more: bool


class HandlerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A handler that a live worker runs, or that is paused. `queues` in Postgres are its own. `lag` of sources
    elsewhere, as far as workers know it. `lanes`, and `running` ones among them, in all `workers`; `outcomes` of
    deliveries since these began. `obeyed`: how many workers say that they have paused it. `conditions`: what holds it
    up, with the number of workers in which it does (O34); none: it works."""

    app: str
    handler: str
    sources: list[str]
    queues: list[str]
    lag: dict[str, Lag]
    workers: int
    lanes: int
    running: int
    outcomes: dict[str, int]
    paused: Paused | None = None
    obeyed: int = 0
    conditions: list[Condition] = []


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is the database's time. At most `most` rows of each were read, and one to see whether there are `more`."""

    at: datetime
    handlers: list[HandlerLine]
    queues: list[QueueLine]
    sagas: list[SagaStates]
    letters: list[Letters]
    workers: list[WorkerLine]
    most: int
    outbox: list[OutboxLine] = []
    requests: list[RequestLine] = []


async def status(dsn: str, schema: str, app: str | None = None, *, most: int | None = None) -> Status:
    """Of all apps in the schema, or of one; `most` is MOST unless given. Raises StoreUnavailable, and
    ConfigurationError when the schema is not migrated."""
    controls, scopes = Controls(dsn, schema), None if app is None else keys.scopes_of(app)
    most = MOST if most is None else most
    given = {"most": most, "app": None if scopes is None else scopes[:-1], "scopes": scopes}
    workers, pauses = await controls.workers(app), await controls.paused()
    async with Statements(dsn, schema).sending() as send:
        rows = {
            name: await send(f"status_{name}", **given) for name in ("queues", "sagas", "letters", "outbox", "requests")
        }
        now = await (await send.connection.execute(b"select clock_timestamp() as at")).fetchone() or {}
    relays = {each for line in workers if line.live for doing in line.handlers.values() for each in doing.relays}
    handlers = [line for line in handler_lines(workers, pauses, now["at"]) if app in (None, line.app)]
    return Status(
        at=now["at"],
        handlers=handlers,
        queues=[line for row in rows["queues"] if (line := queue_line(row, handlers)).handler or app is None],
        sagas=[SagaStates(**row | {"app": unquote(row["app"])}) for row in rows["sagas"]],
        letters=[Letters(**row) for row in rows["letters"]],
        workers=workers,
        most=most,
        outbox=[OutboxLine(**row, relayed=_scheme(row) in relays) for row in rows["outbox"] if app is None],
        requests=[
            RequestLine(**row | {each: unquote(row[each]) for each in ("app", "route")}) for row in rows["requests"]
        ],
    )


def _scheme(row: Mapping[str, Any]) -> str:
    return str(row["destination"]).partition(":")[0]


def in_words(each: Condition, line: HandlerLine, at: datetime) -> str:
    """What holds a handler up, since when, and in how many of its workers, as of then."""
    part = "" if each.workers == line.workers else f", in {each.workers} of {line.workers} workers"
    return f"{each.text} since {at - timedelta(seconds=each.seconds):%Y-%m-%d %H:%M:%S}{part}"


def _conditions(pause: Paused | None, its: Sequence[WorkerLine], name: str, at: datetime) -> list[Condition]:
    """As people have decided, and as its workers say, who have last been heard of a while ago."""
    said = [(line, each) for line in its for each in line.handlers[name].conditions if each.by is not HeldUp.PAUSED]
    known = together(msgspec.structs.replace(each, seconds=each.seconds + line.unseen) for line, each in said)
    if pause is None:
        return known
    obeyed = sum(line.handlers[name].paused for line in its)
    return [paused(pause.by, pause.reason, (at - pause.at).total_seconds(), obeyed), *known]


def handler_lines(workers: Sequence[WorkerLine], paused: Sequence[Paused], at: datetime) -> list[HandlerLine]:
    """By app and name, as of then."""
    pauses = {(each.app, each.handler): each for each in paused}
    running: dict[Name, list[WorkerLine]] = {name: [] for name in pauses}
    for line in workers:
        for name in line.handlers if line.live else ():
            running.setdefault((line.app, name), []).append(line)
    return [
        _handler_line(app, name, pauses.get((app, name)), lines, at) for (app, name), lines in sorted(running.items())
    ]


def _handler_line(
    app: str, name: str, pause: Paused | None, workers: Sequence[WorkerLine], at: datetime
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


def queue_line(row: Mapping[str, Any], handlers: Sequence[HandlerLine]) -> QueueLine:
    """With whose it is."""
    source = f"postgres:{row['name']}"
    kind = "retries" if row["name"].startswith("~~") else "own" if row["name"].startswith("~") else "source"
    readers = [f"{each.app}/{each.handler}" for each in handlers if source in each.sources or source in each.queues]
    return QueueLine(kind=kind, handler=readers[0] if readers else None, **row)
