"""Logging of a worker process: one stream, one format, for our events and for all others.

Never shown: payloads, and the local variables of a traceback, which may hold one. Keys are shown as the first 12
hex digits of their digest.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

# These log the same thing hundreds of times while a server is down; our adapters log it once.
_LOUD = ("aiokafka", "aio_pika", "aiormq", "aiobotocore", "botocore")
# Never shown, not even at debug: its pool quotes addresses and statements, and is noisy.
_SILENT = ("psycopg", "psycopg.pool")
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
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.CRITICAL)
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def is_console(log_format: str, stream: TextIO) -> bool:
    """Whether a person reads the log as it is written."""
    return log_format == "console" or (log_format == "auto" and stream.isatty())


def _rendering(*, console: bool, colors: bool) -> list[Processor]:
    if console:
        # Not its default for exceptions, which prints local variables where `rich` is installed.
        return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]


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
