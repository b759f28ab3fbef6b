"""The driver's errors as ours (B5). The connection's state comes first: a dead one's errors are unreliable."""

from __future__ import annotations

from typing import Final

import psycopg

from idemconsumer.errors import Contention, GuardViolated, StoreUnavailable, TransactionEnded
from idemconsumer.redaction import error_text
from idemconsumer.stores.connection import Connection

NOT_DURABLE: Final = "IC002"  # raised by the seal (migrations/0001): synchronous_commit is off
_GUARD: Final = ("IC001", NOT_DURABLE)
_IDLE_TOO_LONG: Final = "25P03"
_OUT_OF_LOCKS: Final = "53200"
_CONTENTION: Final = {"40001", "40P01", "55P03", _OUT_OF_LOCKS}
# On any statement: the disk is full, or broken. With more, a handler's own mistakes would count as an outage.
_SERVER_TROUBLE: Final = ("53100", "58030")
# On our own statements also: resources exhausted, cancelled, read-only or in recovery after a failover, broken.
_OUR_TROUBLE: Final = ("53", "57", "58", "0A000", "25006")


def translate(connection: Connection, error: psycopg.Error, *, ours: bool = False) -> Exception:
    """`ours`: the error came from a statement of the engine, so no message is to blame."""
    if connection.closed:
        return StoreUnavailable(f"the connection to the database broke: {error_text(error)}")
    state = error.sqlstate or ""
    if state in _CONTENTION:
        return Contention(f"{state}: {error.diag.message_primary}", cap_groups=state == _OUT_OF_LOCKS)
    if state.startswith(_OUR_TROUBLE if ours else _SERVER_TROUBLE):
        return StoreUnavailable(f"{state}: {error.diag.message_primary}")
    if state in _GUARD:
        return GuardViolated(str(error.diag.message_primary))
    return error


def broken_under_handler(error: Exception) -> StoreUnavailable:
    """The error for a connection that broke under a handler. The driver's text is left out, since this is logged."""
    drivers = (each for each in (error, error.__cause__) if isinstance(each, psycopg.Error))
    kind = TransactionEnded if _IDLE_TOO_LONG in [each.sqlstate for each in drivers] else StoreUnavailable
    return kind(f"the connection broke while the handler ran ({type(error).__name__})")
