"""The log: all events of this package, through the standard library's `logging`, as logger `idemconsumer`.

So a program that embeds this package gets every line in its own handlers. The message is the event and its fields, and
each field is also an attribute of the record. Secrets are removed here, before any handler sees the record (R13).
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Final

from idemconsumer.redaction import SHOWN, redact, traceback_text

_KEY_DIGITS: Final = 12
_OF_RECORDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "event"}


class Fields(dict[str, Any]):
    """The fields of an event. As text: `name=value` pairs in one line."""

    def __str__(self) -> str:
        return " ".join(f"{name}={_text(value)}" for name, value in self.items())


class Log:
    """Writes events to one logger; `bind` returns a Log that adds fields to each event. An event below the logger's
    level costs one comparison."""

    __slots__ = ("_bound", "_logger")

    def __init__(self, logger: logging.Logger, **bound: object) -> None:
        self._logger = logger
        self._bound = bound

    def bind(self, **fields: object) -> Log:
        return Log(self._logger, **{**self._bound, **fields})

    def debug(self, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(logging.DEBUG):
            self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(logging.INFO):
            self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(logging.WARNING):
            self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(logging.ERROR):
            self._write(logging.ERROR, event, fields)

    def critical(self, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(logging.CRITICAL):
            self._write(logging.CRITICAL, event, fields)

    def log(self, level: int, event: str, **fields: object) -> None:
        if self._logger.isEnabledFor(level):
            self._write(level, event, fields)

    def _write(self, level: int, event: str, given: dict[str, object]) -> None:
        """Write one record. `exc_info` among the fields must be an exception, and becomes the record's."""
        fields = Fields(self._bound | given)
        error = fields.pop("exc_info", None)
        for name, value in fields.items():
            fields[name] = _shown(value)
        frame = sys._getframe(2)
        code = frame.f_code
        text, args = (event.replace("%", "%%") + " %s", (fields,)) if fields else (event, ())
        raised = (type(error), error, error.__traceback__) if isinstance(error, BaseException) and SHOWN.text else None
        record = self._logger.makeRecord(
            self._logger.name, level, code.co_filename, frame.f_lineno, text, args, raised, code.co_name
        )
        record.event = event
        if isinstance(error, BaseException):  # formatters print this instead of formatting the traceback themselves
            record.exc_text = _printable(traceback_text(error, text=SHOWN.text))
        for name, value in fields.items():
            if name not in _OF_RECORDS:
                setattr(record, name, value)
        self._logger.handle(record)


log: Final = Log(logging.getLogger("idemconsumer"))


def _shown(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()[:_KEY_DIGITS]
    return _printable(redact(value)) if isinstance(value, str) else value


def _printable(text: str) -> str:
    """The text without characters that cannot be written everywhere or that control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _text(value: object) -> str:
    """Unchanged if it is one word; else quoted."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\n\t') else text
