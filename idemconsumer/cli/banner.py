"""What a worker reports about itself when it starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from psycopg.conninfo import conninfo_to_dict

from idemconsumer.cli.verbs import table
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.observe.logging import is_console
from idemconsumer.settings import Settings

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60))


def announce(app: str, handlers: Sequence[BoundHandler], settings: Settings) -> None:
    """A table for a person, else the event `started`."""
    database = database_name(settings.dsn)
    names = ("handler", "sources", "key", "retain")
    rows = [(handler.name, sources(handler), handler.key_rule, retention(handler)) for handler in handlers]
    if not is_console(settings.log_format, sys.stderr):
        log.info(
            "started",
            app=app,
            database=database,
            schema=settings.schema,
            workers=settings.workers,
            concurrency=settings.concurrency,
            handlers=[dict(zip(("name", *names[1:]), row, strict=True)) for row in rows],
        )
        return
    click.echo(f"{app}: {settings.workers} x {settings.concurrency} lanes, database {database}", err=True)
    click.echo(table([names, *((name, ", ".join(of), key, retain) for name, of, key, retain in rows)]), err=True)


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
