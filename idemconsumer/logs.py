"""The log: what this package has to say, through the standard library's `logging`, as logger `idemconsumer`.

So a program that embeds it gets every line in its own handlers: the event and its fields as the message, each field as
an attribute of the record too. What may not be shown is taken out here, before any handler sees it (R13).
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
    """What an event is about. As text: `name=value`, in one line."""

    def __str__(self) -> str:
        return " ".join(f"{name}={_text(value)}" for name, value in self.items())


class Log:
    """Writes events of one logger; `bind` gives one that adds fields to each. A line below the logger's level costs a
    look at that level."""

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
        """`exc_info` among the fields is an exception, and becomes the record's."""
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
        if isinstance(error, BaseException):  # what formatters print, instead of a text of their own
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
    """What can be written anywhere, and steers no terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _text(value: object) -> str:
    """As it is, if that is one word; else quoted."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=\n\t') else text
