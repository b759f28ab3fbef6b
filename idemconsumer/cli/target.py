"""Loads MODULE:APP from the working directory, and announces at its start what a worker runs."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import click
from psycopg.conninfo import conninfo_to_dict

from idemconsumer.app.app import App
from idemconsumer.cli.layout import table
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.missing import cannot_import
from idemconsumer.observe.logging import is_console
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60))


def load_app(target: str) -> App:
    """Import the module from the working directory, and take the App out of it. Raises ConfigurationError."""
    name, _, attribute = target.partition(":")
    module = _module(name)
    found = [key for key, value in vars(module).items() if isinstance(value, App)]
    suggestion = f"write {name}:{found[0]}" if found else "create one there with app = App('…')"
    if not attribute:
        raise ConfigurationError(f"{target!r} names a module but no app; {suggestion}")
    try:
        app = getattr(module, attribute)
    except AttributeError:
        raise ConfigurationError(f"module {name!r} has no {attribute!r}; {suggestion}") from None
    if not isinstance(app, App):
        raise ConfigurationError(f"{target} is {type(app).__name__}, not an App; {suggestion}")
    return app


def _module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if name.endswith(".py") or "/" in name:
        instead = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigurationError(f"{name!r} is a file; write the module's name, {instead}:app")
    try:
        return importlib.import_module(name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} ({_where(error)})") from error
    except SystemExit as error:
        raise ConfigurationError(
            f"{name!r} ends the process when it is imported ({_where(error)}); move that code under "
            'if __name__ == "__main__":'
        ) from error
    except Exception as error:
        missing = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and (name == missing or name.startswith(f"{missing}.")):
            raise ConfigurationError(f"there is no module {missing!r} in {folder}; write MODULE:APP") from None
        if isinstance(error, ImportError):
            raise cannot_import(repr(name), error, _where(error)) from error
        raise ConfigurationError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error_text(error)} ({_where(error)})"
        ) from error


def _where(error: BaseException) -> str:
    """The last line of the user's own code in the traceback of the error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    not_theirs = (str(Path(__file__).parent.parent), str(Path(importlib.__file__).parent), "<frozen", "<string>")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(not_theirs)]
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else "while importing it"


def announce(app: str, handlers: Sequence[BoundHandler], settings: Settings) -> None:
    """Print a table to a terminal, or log the event `started`."""
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
    """host:port/name of a database, without user and password."""
    if dsn is None:
        return "none"
    parts = conninfo_to_dict(dsn)
    return f"{parts.get('host', 'local')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"
