"""Translates the driver's errors to ours (B5). The connection's state comes first: a dead one's errors are
unreliable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from traceback import walk_tb
from typing import Final

import psycopg
from psycopg import pq

from idemconsumer.errors import (
    ConfigurationError,
    ConnectionLost,
    Contention,
    CrashedBeside,
    GuardViolated,
    Reject,
    Retry,
    ServerSilent,
    StoreChanged,
    StoreUnavailable,
    TransactionEnded,
)
from idemconsumer.redaction import error_text
from idemconsumer.sql.queries import behind, misconfigured
from idemconsumer.stores.connection import Connection

GUARD: Final = "IC001"  # raised by the guard and the seal (migrations/0001)
NOT_DURABLE: Final = "IC002"  # raised by the seal, and before it by `standby` (R22)
PRUNED: Final = "IC003"  # raised by a claim whose scope has been pruned (R30)
_GUARD: Final = (GUARD, NOT_DURABLE)
_IDLE_TOO_LONG: Final = "25P03"
_CRASHED_BESIDE: Final = "57P02"  # reported to all sessions but the one that crashed (B13)
_OUT_OF_LOCKS: Final = "53200"
_CONTENTION: Final = {"40001", "40P01", "55P03", _OUT_OF_LOCKS}
_CANCELLED: Final = "57014"
_WAITED_FOR_ROW: Final = re.compile(r'[^"\n]*\(\d+,\d+\)')  # the innermost context: "while updating tuple (0,1) in …"
_PLPGSQL_RAISE: Final = "exec_stmt_raise"  # the function's own error (B12); one that it re-raises keeps its source
# For any statement: the disk is full, or broken. With more codes, a handler's own mistakes would count as an outage.
_SERVER_TROUBLE: Final = ("53100", "58030")
# For statements of ours also: resources exhausted, cancelled, read-only or in recovery after a failover, broken; errors
# of constraints or triggers that others have put on our tables (R43).
_OUR_TROUBLE: Final = ("53", "57", "58", "0A000", "25006", "23", "P0001")

# Errors of our statements under another role, or with another search_path or statement_timeout.
_NOT_OURS: Final = ("42", _CANCELLED)


def may_be_changed(connection: Connection, error: psycopg.Error) -> bool:
    """Whether a statement of ours may have failed because the session was changed (J25)."""
    return not connection.closed and (error.sqlstate or "").startswith(_NOT_OURS)


def translate(connection: Connection, error: psycopg.Error, *, ours: bool = False) -> Exception:
    """`ours`: the error came from a statement of the engine, so no message is to blame."""
    if connection.closed:
        return StoreUnavailable(f"the connection to the database broke: {error_text(error)}")
    state = error.sqlstate or ""
    if (cause := behind(error, connection.schema)) is not None:
        return cause
    if ours and state == PRUNED:
        return Contention(f"{state}: {error.diag.message_primary}")
    if state in _CONTENTION and error.diag.source_function != _PLPGSQL_RAISE:
        return Contention(f"{state}: {error.diag.message_primary}", cap_groups=state == _OUT_OF_LOCKS)
    if state == _CANCELLED and _WAITED_FOR_ROW.match(error.diag.context or ""):  # by a statement_timeout (B14)
        return Contention(f"{state}: {error.diag.message_primary}, {error.diag.context}")
    if ours and (changed := misconfigured(error, connection.schema)) is not None:
        return StoreChanged(str(changed))
    if state.startswith(_OUR_TROUBLE if ours else _SERVER_TROUBLE):
        return StoreUnavailable(f"{state}: {error.diag.message_primary}")
    if state in _GUARD:
        return GuardViolated(str(error.diag.message_primary))
    return error


def not_durable(error: psycopg.Error) -> str:
    """What is wrong with the database's settings, and what to set instead."""
    return f"database: {error.diag.message_primary}; {error.diag.message_hint or 'set it to on'}"


def diagnosed(connection: Connection, error: Exception) -> Exception:
    """The real cause of an error that left a handler: StoreUnavailable, Contention, or the handler's own."""
    if connection.silent:
        return ServerSilent(f"the database did not answer a handler's statement ({type(error).__name__})")
    if connection.closed:
        return _broken_under_handler(error)
    wraps = not isinstance(error, psycopg.Error | Reject | Retry)  # as SQLAlchemy does
    cause = error.__cause__ if wraps else error
    if not isinstance(cause, psycopg.Error) or not _raised_on(connection, cause):
        return error
    # An error of ours means that a statement of ours failed: `app.publish` in a handler's transaction.
    known = translate(connection, cause, ours=isinstance(error, ConfigurationError | StoreUnavailable))
    return known if cause is error or isinstance(known, Contention | StoreUnavailable) else error


def _raised_on(connection: Connection, error: psycopg.Error) -> bool:
    """Whether `error` came from a statement on this connection, not on another one that a function used (B12).

    That is so if the transaction has failed. The function may have rolled back to a savepoint; then the error's
    traceback shows it.
    """
    if connection.info.transaction_status == pq.TransactionStatus.INERROR:
        return True
    for frame, _ in walk_tb(error.__traceback__):
        within = frame.f_locals.get("self")
        if within is connection:
            return True
        if isinstance(within, psycopg.AsyncCursor) and within._pgconn is connection.pgconn:  # psycopg cuts it off there
            return True
    return False


def _broken_under_handler(error: Exception) -> ConnectionLost:
    """The error for a connection that broke under a handler. The driver's text is left out, since this is logged."""
    kind = ConnectionLost
    if _IDLE_TOO_LONG in [each.sqlstate for each in (error, error.__cause__) if isinstance(each, psycopg.Error)]:
        kind = TransactionEnded
    elif any(isinstance(each, psycopg.Error) and each.sqlstate == _CRASHED_BESIDE for each in _behind(error)):
        kind = CrashedBeside
    return kind(f"the connection broke while the handler ran ({type(error).__name__})")


def _behind(error: BaseException) -> Iterator[BaseException]:
    """`error`, and those it was raised from or while handling: a function may raise its own error in their place."""
    seen, behind = set[int](), [error]
    while behind:
        each = behind.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            behind += [more for more in (each.__cause__, each.__context__) if more is not None]
