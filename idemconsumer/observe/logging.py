"""Logging of a worker process: one stream, one format, for our events and for those of every library.

Never shown: payloads, the local variables of a traceback, which may hold one, passwords of addresses, and what
Postgres quotes of rows. Keys are shown as the first 12 hex digits of their digest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from typing import Any, TextIO

import msgspec
import psycopg
import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from idemconsumer.redaction import redact, traceback_text

# These log the same thing hundreds of times while a server is down; our adapters log it once. Not below WARNING at
# debug either: there botocore writes each request with its body and the session token, aiormq each frame.
_LOUD = ("aiokafka", "aio_pika", "aiormq", "pamqp", "aiobotocore", "botocore")
# Never shown, not even at debug: its pool quotes addresses and statements, and is noisy.
_SILENT = ("psycopg", "psycopg.pool")

log = structlog.get_logger("idemconsumer")
_KEY_DIGITS = 12


def configure(log_format: str, level: str, stream: TextIO | None = None) -> None:
    """Send structlog and the standard library's logging to `stream` (default stderr).

    `auto` is `console` on a terminal, else `json`, one object a line. If the application configures
    logging at its import, that comes later and wins for the standard library's part. The values are those of the
    settings.
    """
    stream = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _with_worker,
        _with_short_keys,
        _redacted,
    ]
    rendering = _rendering(console=is_console(log_format, stream), colors=stream.isatty())
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.basicConfig(handlers=[handler], level=number, force=True)
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.WARNING if level == "debug" else logging.CRITICAL)
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # What Python itself would write to stderr: several lines, with the DETAIL of a database error in them.
    logging.captureWarnings(True)
    sys.excepthook = lambda _, error, __: log.critical("uncaught exception", exc_info=error)
    sys.unraisablehook = _log_ignored
    threading.excepthook = lambda caught: log.error("thread ended by an exception", exc_info=caught.exc_value)


def log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler. Its own logs the repr of the task, and so the text of the exception."""
    task = context.get("task") or context.get("future")
    name = task.get_name() if isinstance(task, asyncio.Task) else None
    log.error("unhandled in the event loop", what=context["message"], task=name, exc_info=context.get("exception"))


def _log_ignored(caught: sys.UnraisableHookArgs) -> None:
    # psycopg drops a pipeline of each connection that breaks. The loss of the server is logged elsewhere, once.
    level = logging.DEBUG if isinstance(caught.exc_value, psycopg.OperationalError) else logging.ERROR
    log.log(level, "exception ignored", exc_info=caught.exc_value)


def is_console(log_format: str, stream: TextIO) -> bool:
    """Whether a person reads the log as it is written."""
    return log_format == "console" or (log_format == "auto" and stream.isatty())


def _rendering(*, console: bool, colors: bool) -> list[Processor]:
    if console:
        # Not its default for exceptions, which prints local variables where `rich` is installed.
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_print_traceback)]
    formatted = structlog.processors.ExceptionRenderer(_traceback)
    return [formatted, structlog.processors.JSONRenderer(serializer=_json)]


def _traceback(exc_info: ExcInfo) -> str:
    return traceback_text(exc_info[1])


def _print_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    stream.write("\n" + _traceback(exc_info))


def _json(event: Any, **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def _with_worker(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    # Read each time: the parent of several workers has none, and names the worker that an event is about.
    if (worker := os.environ.get("IDEMCONSUMER_WORKER")) is not None:
        event.setdefault("worker", int(worker))
    return event


def _with_short_keys(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if isinstance(key := event.get("key"), bytes):
        event["key"] = key.hex()[:_KEY_DIGITS]
    return event


def _redacted(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = redact(value)
    return event
