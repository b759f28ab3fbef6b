"""`status`: how things stand, once."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import click

from idemconsumer.admin.status import HandlerLine, Status, in_words
from idemconsumer.admin.status import status as read_status
from idemconsumer.cli.banner import table
from idemconsumer.cli.options import as_json, database, need_dsn, print_json, printable
from idemconsumer.rules.held_up import WORKS
from idemconsumer.settings import load

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


@click.command()
@click.argument("app", metavar="[APP]", required=False)
@database
@as_json
def status(app: str | None, as_json: bool, **flags: Any) -> None:
    """Show the present state: handlers, Postgres queues, retries, sagas, dead letters, requests in leased mode,
    outgoing messages, workers.

    APP is an app's name; without it, all apps of the schema. Only reads: a few statements, with at most 10,000 rows for
    each queue, handler of sagas and reason. If there are more, the output says so; in JSON, `more` does. Messages that
    wait at Kafka, RabbitMQ and SQS are not known here.
    """
    settings = load(**flags)
    found = asyncio.run(read_status(need_dsn(settings), settings.schema, app))
    if as_json:
        print_json(found)
        return
    for title, rows in tables(found):
        click.echo(f"{title}: none\n" if len(rows) == 1 else f"{title}\n{table(rows)}\n")


def tables(status: Status) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Each with a title; the first row says what its columns are."""
    return [
        ("handlers", _handlers(status)),
        ("queues in Postgres", _queues(status)),
        ("sagas that have not ended", _sagas(status)),
        ("dead letters that wait for a person", _letters(status)),
        *([("requests in leased mode", _requests(status))] if status.requests else []),
        *([("outgoing messages", _outbox(status))] if status.outbox else []),
        ("workers", _workers(status)),
    ]


def counted(count: int, most: int, more: bool) -> str:
    """And that it may be more, where not all were read."""
    if count > most:
        return f"more than {most:,}"
    return f"{count:,} or more" if more else f"{count:,}"


def ago(seconds: float | None) -> str:
    """In one unit."""
    if seconds is None:
        return "-"
    return next((f"{seconds / size:.0f} {unit}" for size, unit in _UNITS if seconds >= 2 * size), f"{seconds:.0f} s")


def state_of(line: HandlerLine, at: datetime) -> str:
    """What holds it up, if anything does."""
    return "; ".join(in_words(each, line, at) for each in line.conditions) or WORKS


def _handlers(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("handler", "sources", "workers", "lanes", "busy", "state")]
    for each in status.handlers:
        sources = ", ".join(each.sources) or "-"
        cells = (f"{each.app}/{each.handler}", sources, str(each.workers), str(each.lanes), str(each.running))
        rows.append(tuple(map(printable, (*cells, state_of(each, status.at)))))
    return rows


def _queues(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("queue", "of", "read by", "waiting", "oldest", "in hand", "not due", "overdue"),
    ]
    for each in status.queues:
        oldest = ago(each.oldest) if each.waiting else "-"
        counts = (counted(each.in_hand, status.most, each.more), counted(each.delayed, status.most, each.more))
        overdue = ago(each.overdue) if each.overdue else "-"
        cells = (
            each.name,
            each.kind,
            each.handler or "no worker",
            counted(each.waiting, status.most, each.more),
            oldest,
        )
        rows.append(tuple(map(printable, (*cells, *counts, overdue))))
    return rows


def _sagas(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("handler", "running", "waiting", "due", "for", "undoing", "for review", "oldest"),
    ]
    for each in status.sagas:
        counts = [counted(n, status.most, each.more) for n in (each.running, each.waiting, each.due)]
        more = [counted(n, status.most, each.more) for n in (each.undoing, each.review)]
        oldest = "-" if each.oldest is None else f"{each.oldest:%Y-%m-%d %H:%M}"
        cells = (f"{each.app}/{each.handler}", *counts, ago(each.overdue), *more, oldest)
        rows.append(tuple(map(printable, cells)))
    return rows


def _letters(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("reason", "letters", "newest")]
    for each in status.letters:
        rows.append((each.reason, counted(each.letters, status.most, each.more), f"{each.newest:%Y-%m-%d %H:%M:%S}"))
    return rows


def _requests(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("route", "running", "lost", "oldest")]
    for each in status.requests:
        counts = [counted(n, status.most, each.more) for n in (each.running, each.lost)]
        rows.append(tuple(map(printable, (f"{each.app}: {each.route}", *counts, f"{each.oldest:%Y-%m-%d %H:%M:%S}"))))
    return rows


def _outbox(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("destination", "waiting", "oldest", "later", "parked", "relayed", "error")]
    for each in status.outbox:
        counts = [counted(n, status.most, each.more) for n in (each.waiting, each.later, each.parked)]
        relayed = "yes" if each.relayed else "by no worker"
        cells = (each.destination, counts[0], ago(each.oldest), *counts[1:], relayed, (each.error or "-")[:60])
        rows.append(tuple(map(printable, cells)))
    return rows


def _workers(status: Status) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("id", "app", "host", "pid", "version", "state", "seen")]
    for each in status.workers:
        seen = "-" if each.id is None else f"{ago(each.unseen)} ago"
        cells = (each.app, each.host, str(each.pid), each.version, each.state, seen)
        rows.append(("-" if each.id is None else str(each.id), *map(printable, cells)))
    return rows
