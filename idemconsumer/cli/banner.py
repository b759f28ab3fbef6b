"""What a worker reports about itself when it starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from psycopg.conninfo import conninfo_to_dict

from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.observe.logging import is_console
from idemconsumer.settings import Settings

_WIDEST = 100  # characters of a cell
_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60))


def announce(app: str, handlers: Sequence[BoundHandler], settings: Settings) -> None:
    """A table for a person, else the event `started`."""
    database = database_name(settings.dsn)
    if not is_console(settings.log_format, sys.stderr):
        log.info(
            "started",
            app=app,
            database=database,
            schema=settings.schema,
            workers=settings.workers,
            concurrency=settings.concurrency,
            handlers=[
                {
                    "name": handler.name,
                    "sources": sources(handler),
                    "key": handler.key_rule,
                    "retain": retention(handler),
                }
                for handler in handlers
            ],
        )
        return
    rows = [("handler", "sources", "key", "retain")]
    rows += [(handler.name, ", ".join(sources(handler)), handler.key_rule, retention(handler)) for handler in handlers]
    click.echo(f"{app}: {settings.workers} x {settings.concurrency} lanes, database {database}", err=True)
    click.echo(table(rows), err=True)


def sources(handler: BoundHandler) -> list[str]:
    """Where a handler's messages come from."""
    return [subscription.source for subscription in handler.subscriptions]


def retention(handler: BoundHandler) -> str:
    """How long a handler's records are kept, as a user would write it."""
    seconds = handler.options.retain
    return next((f"{seconds / size:g}{unit}" for unit, size in _UNITS if seconds >= size), f"{seconds:g}s")


def database_name(dsn: str | None) -> str:
    """host:port/name; no user and no password."""
    if dsn is None:
        return "none"
    parts = conninfo_to_dict(dsn)
    return f"{parts.get('host', 'local')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first one in capitals. What would make one of them wide is cut, but for the last column;
    `--json` has all of it."""
    rows = [
        [*(cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…" for cell in row[:-1]), row[-1]] for row in rows
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [[cell.upper() for cell in rows[0]], *rows[1:]]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
