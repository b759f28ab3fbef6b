"""Where a list is empty since nothing is stored under the handler's name."""

from __future__ import annotations

import asyncio

import click

from idemconsumer.admin.dead_letters import unknown_handler
from idemconsumer.cli.options import need_dsn, printable
from idemconsumer.settings import Settings


def say_unknown(settings: Settings, handler: str | None) -> None:
    """On stderr, which names there are."""
    if handler is not None:
        text = asyncio.run(unknown_handler(need_dsn(settings), settings.schema, handler))
        if text is not None:
            click.echo(printable(text), err=True)
