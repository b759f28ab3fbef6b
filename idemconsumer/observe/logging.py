"""Logging of a worker process: one stream and one format, for our events and for those of every library.

Never shown: payloads, the local variables of a traceback, which may hold one, passwords in addresses, and rows that
Postgres quotes. Keys are shown as the first 12 hex digits of their digest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from idemconsumer.logs import Fields, log
from idemconsumer.redaction import SHOWN, is_of_database, redact, traceback_text

if TYPE_CHECKING:
    from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

# These log the same error hundreds of times while a server is down; our adapters log it once. Not below WARNING even at
# debug level: there botocore writes each request with its body and the session token, and aiormq each frame.
_LOUD = ("aiokafka", "aio_pika", "aiormq", "pamqp", "aiobotocore", "botocore")
# Never shown, not even at debug level: its pool quotes addresses and statements, and is noisy.
_SILENT = ("psycopg", "psycopg.pool")


def configure(log_format: str, level: str, stream: TextIO | None = None, *, app: bool = True) -> None:
    """Send the standard library's logging, and with it our events, to `stream` (default stderr).

    For an `app`, structlog's events too, in case the app uses it. A launcher has no app, and imports structlog only
    with its first line, when its worker has started (P10). `auto` means `console` on a terminal, else `json`, one
    object per line. If the application configures logging at its import, that comes later and wins. The values are
    those of the settings.
    """
    stream = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    console = is_console(log_format, stream)
    if app:
        _configure_structlog(number, stream, console=console)
    handler = _Lines(stream)
    handler.setFormatter(_Formatter(console=console, colors=stream.isatty()))
    logging.basicConfig(handlers=[handler], level=number, force=True)
    logging.getLogger("idemconsumer").setLevel(number)
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.WARNING if level == "debug" else logging.CRITICAL)
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Python itself would write these to stderr: several lines, with the DETAIL of a database error in them.
    logging.captureWarnings(True)
    sys.excepthook = lambda _, error, __: log.critical("uncaught exception", exc_info=error)
    sys.unraisablehook = _log_ignored
    threading.excepthook = lambda caught: log.error("thread ended by an exception", exc_info=caught.exc_value)


def _configure_structlog(number: int, stream: TextIO, *, console: bool) -> None:
    import structlog

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _with_worker,
            _redacted,
            *_rendering(console=console, colors=stream.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),
    )


def keep_enabled() -> None:
    """Undo what the app's import may have done: `dictConfig` disables every logger that it does not name."""
    logging.getLogger("idemconsumer").disabled = False


def log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler. The default one logs the repr of the task, and with it the text of the
    exception."""
    task = context.get("task") or context.get("future")
    name = task.get_name() if isinstance(task, asyncio.Task) else None
    error = context.get("exception")
    log.error("unhandled exception in the event loop", what=context["message"], task=name, exc_info=error)


def _log_ignored(caught: sys.UnraisableHookArgs) -> None:
    # psycopg drops a pipeline of each connection that breaks. The loss of the server is logged elsewhere, once.
    level = logging.DEBUG if is_of_database(caught.exc_value) else logging.ERROR
    log.log(level, "exception ignored", exc_info=caught.exc_value)


def is_console(log_format: str, stream: TextIO) -> bool:
    """Whether a person reads the log as it is written."""
    return log_format == "console" or (log_format == "auto" and stream.isatty())


class _Lines(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's
        """Log a call with wrong arguments in one line. Python would print twenty lines, with the arguments in them."""
        if not isinstance(error := sys.exc_info()[1], OSError) and not self.stream.closed:
            with suppress(Exception):
                place = f"{record.filename}:{record.lineno} {record.funcName}"
                log.error(
                    "cannot format a line of the log", logger=record.name, where=place, error=type(error).__name__
                )


class _Formatter(logging.Formatter):
    """Renders a record of any logger as the events of structlog are rendered."""

    def __init__(self, *, console: bool, colors: bool) -> None:
        super().__init__()
        self._console = console
        self._colors = colors

    @cached_property
    def _processors(self) -> list[Processor]:
        import structlog

        rendering = _rendering(console=self._console, colors=self._colors)
        return [structlog.contextvars.merge_contextvars, _with_worker, _redacted, *rendering]

    def format(self, record: logging.LogRecord) -> str:
        event, exception = _event(record), record.exc_text
        if exception is None and record.exc_info and record.exc_info[1] is not None:
            exception = _traceback(record.exc_info)
        if exception and not self._console:
            event["exception"] = exception
        written: Any = event
        for process in self._processors:
            written = process(None, event["level"], written)
        return f"{written}\n{exception}" if exception and self._console else str(written)


def _event(record: logging.LogRecord) -> EventDict:
    level, at = record.levelname.lower(), datetime.fromtimestamp(record.created, UTC)
    timestamp = at.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if record.name == "idemconsumer":
        fields = record.args if isinstance(record.args, Fields) else {}
        return {"event": getattr(record, "event", record.msg), **fields, "level": level, "timestamp": timestamp}
    return {"event": record.getMessage(), "logger": record.name, "level": level, "timestamp": timestamp}


def _rendering(*, console: bool, colors: bool) -> list[Processor]:
    import structlog

    if console:
        # Not its default for exceptions, which prints local variables where `rich` is installed.
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_print_traceback)]
    formatted = structlog.processors.ExceptionRenderer(_traceback)
    return [formatted, structlog.processors.JSONRenderer(serializer=_json)]


def _traceback(exc_info: ExcInfo) -> str:
    return traceback_text(exc_info[1], text=SHOWN.text)


def _print_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    stream.write("\n" + _traceback(exc_info))


def _json(event: Any, **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def _with_worker(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    # Read each time: the parent of several workers has no number, and names the worker that an event is about.
    if (worker := os.environ.get("IDEMCONSUMER_WORKER")) is not None:
        event.setdefault("worker", int(worker))
    return event


def _redacted(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = redact(value)
    return event
