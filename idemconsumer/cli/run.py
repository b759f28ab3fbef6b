"""`run` and `dev`: workers under a supervisor."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import structlog

from idemconsumer.brokers.connecting import leave_for, prepare_to_leave
from idemconsumer.cli.missing import cannot_import
from idemconsumer.cli.options import database
from idemconsumer.errors import ConfigurationError, IdemConsumerError, Replaced
from idemconsumer.observe.logging import configure, is_console
from idemconsumer.process.child import LIFELINE, WORKER, Exit, Worker, launch
from idemconsumer.process.supervisor import Supervisor, python_changes
from idemconsumer.redaction import error_text
from idemconsumer.settings import FORMATS, LEVELS, PREFIX, Settings, load

F = TypeVar("F", bound=Callable[..., Any])
log = structlog.get_logger("idemconsumer")


def _worker_options(command: F) -> F:
    for option in reversed(
        (
            click.option("--workers", type=int, metavar="N", help="Number of worker processes.  [default: 1]"),
            click.option(
                "--concurrency", type=int, metavar="N", help="Lanes of each handler in a process.  [default: 8]"
            ),
            click.option("--handlers", metavar="A,B", help="Run only these handlers of the app."),
            click.option("--drain-timeout", type=float, metavar="S", help="Drain timeout in seconds.  [default: 20]"),
            click.option("--log-format", type=click.Choice(FORMATS, case_sensitive=False), help="[default: auto]"),
            click.option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), help="[default: info]"),
        )
    ):
        command = option(command)
    return database(command)


@click.command()
@click.argument("target", metavar="MODULE:APP")
@_worker_options
@click.option("--max-restarts", type=int, metavar="N", help="Crashes per worker allowed in ten minutes.  [default: 10]")
@click.option("--until-empty", is_flag=True, default=None, help="Exit when every source is empty.")
@click.option("--reload", is_flag=True, default=None, help="Restart when a .py file in this folder tree changes.")
def run(target: str, **flags: Any) -> None:
    """Run the handlers of an app until a signal stops them.

    SIGTERM or Ctrl-C drains: fetching stops, and what runs is finished, committed and settled. A second signal
    stops immediately; what still runs is rolled back and redelivered.
    """
    settings = load(**flags)
    sys.exit(_run(target, settings, _as_environment(flags), reload=settings.reload))


@click.command()
@click.argument("target", metavar="MODULE:APP")
@_worker_options
def dev(target: str, **flags: Any) -> None:
    """Migrate the database, then run with --reload.

    If no database is set, it starts a throwaway Postgres in a temporary folder, and deletes it with all its data at
    the end.
    """
    from idemconsumer.embedded.postgres import EmbeddedPostgres
    from idemconsumer.stores.migrations import migrate

    settings = load(**flags)
    with ExitStack() as stack:
        if settings.dsn is None:
            server = stack.enter_context(EmbeddedPostgres())
            click.echo(f"throwaway database: IDEMCONSUMER_DSN='{server.shown_dsn}'", err=True)
            flags["dsn"] = server.dsn
            settings = load(**flags)
        assert settings.dsn is not None
        migrate(settings.dsn, settings.schema)
        sys.exit(_run(target, settings, _as_environment(flags), reload=True))


def _run(target: str, settings: Settings, environment: Mapping[str, str], *, reload: bool) -> Exit:
    configure(settings.log_format, settings.log_level)
    try:
        return _start(target, settings, environment, reload=reload)
    except IdemConsumerError as error:
        if is_console(settings.log_format, sys.stderr):
            raise
        if os.environ.get(WORKER, "0") == "0" or isinstance(error, Replaced):
            log.critical("cannot run", error=error_text(error))
        return Exit.USAGE if isinstance(error, ConfigurationError) else Exit.ERROR


def _start(target: str, settings: Settings, environment: Mapping[str, str], *, reload: bool) -> Exit:
    if LIFELINE in os.environ:
        return _serve(target, settings)
    supervisor = Supervisor(
        [sys.executable, "-m", "idemconsumer", "run", target],
        workers=settings.workers,
        drain_timeout=settings.drain_timeout,
        max_restarts=settings.max_restarts,
        until_empty=settings.until_empty,
        environment=os.environ | environment,
        changes=python_changes(Path.cwd()) if reload else None,
        execute=partial(leave_for, settings),
        prepare=prepare_to_leave,
    )
    return asyncio.run(supervisor.run())


def _serve(target: str, settings: Settings) -> Exit:
    # Only here: these are most of the program, and the launcher would import them before it starts a worker.
    try:
        from idemconsumer.cli.banner import announce
        from idemconsumer.cli.target import load_app
    except ImportError as error:
        raise cannot_import("what idemconsumer needs", error) from error

    app = load_app(target)

    def make() -> Worker:
        worker = app.worker(settings)
        if os.environ.get(WORKER, "0") == "0":
            announce(app.name, worker.handlers, settings)
        return worker

    try:
        return launch(make, settings.drain_timeout)
    except IdemConsumerError:
        raise
    except Exception:
        log.exception("worker failed")
        return Exit.ERROR


def _as_environment(flags: Mapping[str, object]) -> dict[str, str]:
    """The given options as variables, for the children: they are started without options."""
    return {PREFIX + name.upper(): str(value) for name, value in flags.items() if value is not None}
