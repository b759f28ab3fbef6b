"""Errors that a person can act on: their text in one line, and the exit code. Also the least role of the database that
may run each command, as `migrate grants` creates it (O35)."""

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
    """The text and the exit code for an expected error; None for an unexpected one."""
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
    """Report an expected error of the block in one line, and exit with its code."""
    try:
        yield
    except Exception as error:
        if (found := _failure(error)) is None:
            raise
        text, code = found
        # If several workers cannot start, only the first one reports it, since all fail for the same reason.
        if os.environ.get(WORKER, "0") == "0" or isinstance(error, Replaced):
            say(text, error)
        sys.exit(code)


# A command that is not named here needs the rights of a worker. `owner`: a role that may change the schema; `nobody`:
# no rights in the schema are needed.
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
# A reader may run these commands in the way that changes nothing.
READS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("dead discard", "dead redrive", "outbox discard", "prune"), "with --dry-run"),
    "dead runs": "without --cancel",
    "skip": "without a place",
}


def least(command: str) -> str:
    """The least role that must be granted for a command."""
    return next((role for role, commands in LEAST.items() if command in commands), "worker")


def remedy(command: str) -> str:
    """What to do if the database denied this command."""
    role, half = least(command), READS.get(command)
    also = f"; {half} a reader may run it" if half else ""
    return f"the least role for `{command}` is a {role}, see `idemconsumer migrate grants --{role} ROLE`{also}"
