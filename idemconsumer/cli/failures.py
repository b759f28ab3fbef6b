"""Errors that a person can act on: what is said of them, in one line, and the exit code; and the least role of the
database that may run each command, as `migrate grants` makes it (O35)."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from idemconsumer.errors import ConfigurationError, IdemConsumerError, LockNotGiven, Replaced
from idemconsumer.missing import cannot_import
from idemconsumer.process.child import WORKER, Exit
from idemconsumer.redaction import error_text

_CANNOT_WRITE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _failure(error: Exception) -> tuple[str, Exit] | None:
    """What is said of it, and the exit code. None: nobody expected it."""
    if isinstance(error, ImportError):
        error = cannot_import("what idemconsumer needs", error)
    if isinstance(error, ConfigurationError):
        return error_text(error), Exit.USAGE
    if isinstance(error, LockNotGiven):
        return error_text(error), Exit.PENDING
    if isinstance(error, IdemConsumerError):
        return error_text(error), Exit.ERROR
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        return f"the output cannot be written: {error.strerror}", Exit.ERROR
    import psycopg

    return (error_text(error), Exit.ERROR) if isinstance(error, psycopg.Error) else None


@contextmanager
def in_one_line(say: Callable[[str, Exception], None]) -> Iterator[None]:
    """What is expected of the block is said, and ends the process with its code."""
    try:
        yield
    except Exception as error:
        if (found := _failure(error)) is None:
            raise
        text, code = found
        # Of several workers that cannot start the first one says it, since they all fail alike.
        if os.environ.get(WORKER, "0") == "0" or isinstance(error, Replaced):
            say(text, error)
        sys.exit(code)


# What is not named here a worker may do. `owner`: who may change the schema; `nobody`: it takes no rights in it.
LEAST: Final[Mapping[str, Collection[str]]] = {
    "nobody": ("demo", "dev", "migrate grants", "migrate sql"),
    "reader": (
        "audit", "check", "doctor", "explain", "status", "top", "workers list", "migrate status", "requests list",
        "dead export", "dead groups", "dead list", "dead show", "keys list", "keys show", "outbox list", "outbox show",
        "sagas export", "sagas list", "sagas show",
    ),
    "producer": ("publish",),
    "purge": ("prune",),
    "front-door": ("keys forget", "requests release", "requests settle"),
    "owner": ("migrate up",),
}  # fmt: skip
# Of these a reader may do the half that changes nothing.
READS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("dead discard", "dead redrive", "outbox discard", "prune"), "with --dry-run"),
    "dead runs": "without --cancel",
    "skip": "without a place",
}


def least(command: str) -> str:
    """The role that has to be granted."""
    return next((role for role, commands in LEAST.items() if command in commands), "worker")


def remedy(command: str) -> str:
    """What to do where this command was denied."""
    role, half = least(command), READS.get(command)
    also = f"; {half} a reader may run it" if half else ""
    return f"the least role for `{command}` is a {role}, see `idemconsumer migrate grants --{role} ROLE`{also}"
