"""`status`: the present state, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Final, TypeAlias

from click import argument

from idemconsumer.admin.control import WorkerLine
from idemconsumer.admin.sender import NamedRow
from idemconsumer.admin.status import HandlerLine, Status, in_words
from idemconsumer.admin.status import status as read_status
from idemconsumer.cli.layout import cell, table
from idemconsumer.cli.verbs import Given, Output, verb
from idemconsumer.rules.held_up import WORKS

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))

Cells: TypeAlias = tuple[object, ...]
Titled: TypeAlias = tuple[str, list[tuple[str, ...]]]


@verb("status", argument("app", metavar="[APP]", required=False))
async def status(given: Given) -> Output:
    """Show the present state: handlers, Postgres queues, retries, sagas, dead letters, requests in leased mode,
    outgoing messages, workers.

    APP is an app's name; without it, all apps of the schema. Only reads: a few statements, with at most 10,000 rows for
    each queue, handler of sagas and reason. If there are more, the output says so (JSON: `more`). Messages that wait
    at Kafka, RabbitMQ and SQS are not counted.
    """
    found = await read_status(*given.database, given.app)
    return Output(found, shown(tables(found)))


def shown(found: Iterable[Titled]) -> Iterator[str]:
    """The tables as text, each with its title."""
    for title, rows in found:
        yield f"{title}: none\n" if len(rows) == 1 else f"{title}\n{table(rows)}\n"


def tables(status: Status) -> list[Titled]:
    """The tables, each with a title; the first row has the names of the columns."""
    return [
        titled(title, columns, (row(each, status) for each in getattr(status, name)))
        for name, title, columns, row in _TABLES
        if getattr(status, name) or name not in ("requests", "outbox")
    ]


def titled(title: str, columns: str, rows: Iterable[Cells]) -> Titled:
    """One table from rows of values."""
    return title, [tuple(columns.split(", ")), *(tuple(map(cell, row)) for row in rows)]


def counted(count: int, most: int, more: bool) -> str:
    """A count, marked as a lower bound if not all rows were read."""
    if count > most:
        return f"more than {most:,}"
    return f"{count:,} or more" if more else f"{count:,}"


def ago(seconds: float | None) -> str:
    """A duration in one unit."""
    if seconds is None:
        return "-"
    return next((f"{seconds / size:.0f} {unit}" for size, unit in _UNITS if seconds >= 2 * size), f"{seconds:.0f} s")


def state_of(line: HandlerLine, at: datetime) -> str:
    """What holds the handler up, or that it works."""
    return "; ".join(in_words(each, line, at) for each in line.conditions) or WORKS


def _handler(each: HandlerLine, status: Status) -> Cells:
    name, sources = f"{each.app}/{each.handler}", ", ".join(each.sources) or None
    return name, sources, each.workers, each.lanes, each.running, state_of(each, status.at)


def _queue(each: NamedRow, status: Status) -> Cells:
    waiting, in_hand, delayed = _counts(status, each.more, each.waiting, each.in_hand, each.delayed)
    oldest, overdue = ago(each.oldest) if each.waiting else None, ago(each.overdue) if each.overdue else None
    return each.name, each.kind, each.handler or "no worker", waiting, oldest, in_hand, delayed, overdue


def _saga(each: NamedRow, status: Status) -> Cells:
    running, waiting, due = _counts(status, each.more, each.running, each.waiting, each.due)
    undoing, review = _counts(status, each.more, each.undoing, each.review)
    oldest = None if each.oldest is None else f"{each.oldest:%Y-%m-%d %H:%M}"
    return f"{each.app}/{each.handler}", running, waiting, due, ago(each.overdue), undoing, review, oldest


def _letter(each: NamedRow, status: Status) -> Cells:
    return each.reason, *_counts(status, each.more, each.letters), each.newest


def _request(each: NamedRow, status: Status) -> Cells:
    return f"{each.app}: {each.route}", *_counts(status, each.more, each.running, each.lost), each.oldest


def _outgoing(each: NamedRow, status: Status) -> Cells:
    waiting, later, parked = _counts(status, each.more, each.waiting, each.later, each.parked)
    relayed, error = "yes" if each.relayed else "by no worker", (each.error or "-")[:60]
    return each.destination, waiting, ago(each.oldest), later, parked, relayed, error


def _worker(each: WorkerLine, _: Status) -> Cells:
    seen = None if each.id is None else f"{ago(each.unseen)} ago"
    return each.id, each.app, each.host, each.pid, each.version, each.state, seen


def _counts(status: Status, more: bool, *counts: int) -> Iterator[str]:
    return (counted(count, status.most, more) for count in counts)


_TABLES: Final[tuple[tuple[str, str, str, Callable[[Any, Status], Cells]], ...]] = (
    ("handlers", "handlers", "handler, sources, workers, lanes, busy, state", _handler),
    (
        "queues",
        "queues in Postgres",
        "queue, of, read by, waiting, oldest, in hand, not due, overdue",
        _queue,
    ),
    (
        "sagas",
        "sagas that have not ended",
        "handler, running, waiting, due, for, undoing, for review, oldest",
        _saga,
    ),
    ("letters", "dead letters that wait for a person", "reason, letters, newest", _letter),
    ("requests", "requests in leased mode", "route, running, lost, oldest", _request),
    ("outbox", "outgoing messages", "destination, waiting, oldest, later, parked, relayed, error", _outgoing),
    ("workers", "workers", "id, app, host, pid, version, state, seen", _worker),
)
