"""`run` and `dev`: workers under a supervisor."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click import argument, option

from idemconsumer.addresses import listening_at
from idemconsumer.brokers.last_will import leave_for, prepare_to_leave
from idemconsumer.cli.failures import in_one_line
from idemconsumer.cli.flags import database, flag, together
from idemconsumer.errors import IdemConsumerError
from idemconsumer.logs import log
from idemconsumer.missing import cannot_import
from idemconsumer.observe.logging import configure, is_console, keep_enabled
from idemconsumer.process.child import DEV, LIFELINE, WORKER, ChildWorker, Exit, launch
from idemconsumer.process.supervisor import Supervisor, python_changes
from idemconsumer.redaction import SHOWN, error_text
from idemconsumer.settings import FORMATS, LEVELS, PREFIX, Settings, load, log_format

if TYPE_CHECKING:
    from idemconsumer.observe.fleet import Fleet

_FORMAT: Final = "idemconsumer.log_format"
_RESTARTS: Final = 10


_worker_options = together(
    database,
    option("--workers", type=int, metavar="N", help="Number of worker processes.  [default: 1]"),
    option(
        "--concurrency",
        type=int,
        metavar="N",
        help="Messages or groups that a handler runs at a time in one process.  [default: 8]",
    ),
    option("--handlers", metavar="A,B", help="Run only these handlers of the app."),
    option("--drain-timeout", type=float, metavar="S", help="Drain timeout in seconds.  [default: 20]"),
    option("--log-format", type=click.Choice(FORMATS, case_sensitive=False), help="[default: auto]"),
    option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), help="[default: info]"),
    option("--ops-port", metavar="[HOST:]PORT", help="Serve /metrics, /livez and /readyz there."),
    option("--tracing", is_flag=True, default=None, help="Trace messages with OpenTelemetry."),
)


class _Service(click.Command):
    """A command that reports everything in the format of its log, even that it cannot run."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> click.Context:
        given = log_format(_flag(args))
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if is_console(given, sys.stderr):
                raise
            configure(given, "info", app=False)
            log.critical("cannot run", error=error.format_message())
            sys.exit(Exit.USAGE)
        context.meta[_FORMAT] = given
        return context

    def invoke(self, ctx: click.Context) -> Any:
        if is_console(ctx.meta[_FORMAT], sys.stderr):
            return super().invoke(ctx)
        configure(ctx.meta[_FORMAT], "info", app=False)  # until the settings are read
        with in_one_line(lambda text, _: log.critical("cannot run", error=text)):
            return super().invoke(ctx)


def _flag(words: Sequence[str]) -> str | None:
    """The value of `--log-format`, even if other words cannot be parsed."""
    found = [after for word, after in pairwise(words) if word == "--log-format"]
    found += [word.partition("=")[2] for word in words if word.startswith("--log-format=")]
    return found[-1] if found else None


@click.command(cls=_Service)
@argument("target", metavar="MODULE:APP")
@_worker_options
@option("--until-empty", is_flag=True, default=None, help="Exit when every source is empty.")
@option(
    "--max-restarts", type=click.IntRange(0), default=_RESTARTS, metavar="N", show_default=True,
    help="Crashes per worker allowed in ten minutes.",
)  # fmt: skip
@flag("--reload", help="Restart when a .py file in this folder tree changes.")
def run(target: str, max_restarts: int, reload: bool, **flags: Any) -> None:
    """Run the handlers of an app until a signal stops them.

    SIGTERM or Ctrl-C drains: workers stop fetching, and finish, commit and settle the runs in progress. A second signal
    stops immediately; runs in progress are rolled back and redelivered. SIGHUP drains the workers one after the other,
    and restarts each with the settings that pyproject.toml then has.
    """
    sys.exit(_run(target, load(**flags), flags, max_restarts=max_restarts, reload=reload))


@click.command(cls=_Service)
@argument("target", metavar="MODULE:APP")
@_worker_options
def dev(target: str, **flags: Any) -> None:
    """Migrate the database, then run with --reload.

    If no database is set, it starts a throwaway Postgres in a temporary folder, and deletes it with all its data at
    the end.
    """
    from idemconsumer.embedded.postgres import EmbeddedPostgres
    from idemconsumer.stores.migrations import migrate

    settings = load(**flags)
    configure(settings.log_format, settings.log_level, app=False)
    with ExitStack() as stack:
        if settings.dsn is None:
            server = stack.enter_context(EmbeddedPostgres())
            if is_console(settings.log_format, sys.stderr):
                click.echo(f"throwaway database: IDEMCONSUMER_DSN='{server.shown_dsn}'", err=True)
            else:
                log.info("throwaway database", dsn=server.shown_dsn)
            flags["dsn"] = server.dsn
            settings = load(**flags)
        assert settings.dsn is not None
        migrate(settings.dsn, settings.schema)
        sys.exit(_run(target, settings, flags, reload=True, dev=True))


def _run(
    target: str,
    settings: Settings,
    flags: Mapping[str, Any],
    *,
    max_restarts: int = _RESTARTS,
    reload: bool,
    dev: bool = False,
) -> Exit:
    configure(settings.log_format, settings.log_level, app=LIFELINE in os.environ)
    SHOWN.text = settings.log_error_text
    if LIFELINE in os.environ:
        return _serve(target, settings)
    crew: Fleet | None = None
    ops: AbstractAsyncContextManager[None] = nullcontext()
    if settings.ops_port is not None:
        # The HTTP server and the figures that it serves are imported only if they are wanted.
        from idemconsumer.observe.fleet import Fleet
        from idemconsumer.observe.ops import Ops

        crew = Fleet(settings.workers)
        ops = Ops(crew, settings).serving(*listening_at(settings.ops_port))
    # Passed as variables, since the children are started without options.
    given = {PREFIX + name.upper(): str(value) for name, value in flags.items() if value is not None}
    supervisor = Supervisor(
        [sys.executable, "-m", "idemconsumer", "run", target],
        workers=settings.workers,
        drain_timeout=settings.drain_timeout,
        max_restarts=max_restarts,
        until_empty=settings.until_empty,
        environment=os.environ | given | ({DEV: "1"} if dev else {}),
        changes=python_changes(Path.cwd()) if reload else None,
        execute=partial(leave_for, settings),
        prepare=prepare_to_leave,
        reread=partial(_reread, target, flags),
        crew=crew,
    )
    return asyncio.run(_supervised(supervisor, ops))


async def _supervised(supervisor: Supervisor, beside: AbstractAsyncContextManager[None]) -> Exit:
    async with beside:
        return await supervisor.run()


def _serve(target: str, settings: Settings) -> Exit:
    # Imported only here: these modules are most of the program, and the launcher starts workers without them.
    gc.disable()  # imported objects stay alive, so a collection during the imports would find no garbage
    try:
        from idemconsumer.cli.target import announce, load_app

        app = load_app(target)
    except ImportError as error:
        raise cannot_import("what idemconsumer needs", error) from error
    finally:
        gc.enable()
    keep_enabled()

    def make() -> ChildWorker:
        worker = app.worker(settings)
        if os.environ.get(WORKER, "0") == "0":
            announce(app.name, worker.handlers, settings)
        return worker

    try:
        return launch(make, settings.drain_timeout)
    except IdemConsumerError:
        raise
    except Exception as error:  # noqa: BLE001 - nothing above this would log it
        log.error("worker failed", exc_info=error)
        return Exit.ERROR


def _reread(target: str, flags: Mapping[str, Any]) -> None:
    """Read what restarted workers will read (O17), and write the reload to the audit. Raises ConfigurationError."""
    settings = load(**flags)
    # Imported only here: a launcher that gets no SIGHUP does not need it.
    from idemconsumer.admin.audit import user
    from idemconsumer.admin.control import Controls

    try:
        if settings.dsn is not None:
            noting = Controls(settings.dsn, settings.schema).note_reload(f"{target} ({os.getpid()})", by=user())
            asyncio.run(noting)
    except IdemConsumerError as error:
        log.warning("reload not written to the audit", what="reload", error=error_text(error))
