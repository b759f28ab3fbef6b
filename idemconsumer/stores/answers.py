"""Reads the database's answers to a claim. An answer that is not clear is an error, never a claim (R14)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from idemconsumer.errors import CommitUnknown, Contention, StoreUnavailable
from idemconsumer.rules.values import Found, Mark, Record, State
from idemconsumer.sql.connecting import OwnCursor
from idemconsumer.stores.columns import read_result

_ESCAPING: Final = pq.Escaping()
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def outcomes(answer: PGresult, keys: Sequence[bytes]) -> list[Found]:
    """The result for each key, from that of `claim`, which has a row for each key that was not claimed."""
    if answer.status != ExecStatus.TUPLES_OK or answer.nfields != _COLUMNS:
        raise _unclear()
    if not answer.ntuples:
        return [Mark.CLAIMED] * len(keys)
    try:
        rows = [_missed(answer, row) for row in range(answer.ntuples)]
    except ValueError as error:
        raise _unclear() from error
    found: dict[bytes, Found] = {row[0]: Mark.BUSY for row in rows}
    found |= records((row for row in rows if row[1] is not None), keys)
    if not found.keys() <= set(keys):
        raise _unclear()
    return [found.get(key, Mark.CLAIMED) for key in keys]


def standing(found: Found) -> Record | None:
    """The record of a single key; None: it was claimed. Raises Contention when a rival (another worker) holds it."""
    if found is Mark.BUSY:
        raise Contention("another worker holds the key")
    return found if isinstance(found, Record) else None


def begun(answer: PGresult, keys: Sequence[bytes]) -> list[Found | int]:
    """The result for each key, from that of `begin_sagas`: its saga's token, or why it was not claimed. Raises
    CommitUnknown, since the answer comes together with that of COMMIT."""
    try:
        if answer.status != ExecStatus.TUPLES_OK or answer.nfields != _COLUMNS + 1 or answer.ntuples != len(keys):
            raise _unclear()
        rows = [(*_missed(answer, row), answer.get_value(row, _COLUMNS)) for row in range(answer.ntuples)]
        found: dict[bytes, Found | int] = {key: Mark.BUSY if token is None else int(token) for key, *_, token in rows}
        found |= records((row[:_COLUMNS] for row in rows if row[1] is not None), keys)
        return [found[key] for key in keys]
    except (ValueError, KeyError, StoreUnavailable) as error:
        raise CommitUnknown("the database's answer to a claim cannot be read; the claim may be committed") from error


def claimed_request(answer: PGresult, key: bytes) -> tuple[int | None, Record | None, int | None]:
    """From the one row of `claim_request`: this process's token; else the record, which is None where a rival holds the
    key, and the token that may be taken over."""
    token, free = answer.get_value(0, _COLUMNS), answer.get_value(0, _COLUMNS + 1)
    if token is not None:
        return int(token), None, None
    row = _missed(answer, 0)
    return None, records([row], [key])[key] if row[1] is not None else None, None if free is None else int(free)


def taken_request(answer: PGresult) -> tuple[int, bool, datetime]:
    """From the one row of `take_request`: the token, whether a former owner may have run the request, and since
    when."""
    token, again, since = (answer.get_value(0, column) or b"" for column in range(3))
    return int(token), again == b"t", moment(int(since))


def loaded(connection: psycopg.AsyncConnection[Any], answer: PGresult) -> list[tuple[Any, ...]]:
    """The rows that a statement of the engine returned, with types as the engine has them (R14)."""
    transformer = Transformer(OwnCursor(connection))
    transformer.set_pgresult(answer)
    return transformer.load_rows(0, answer.ntuples, tuple)


def records(rows: Iterable[Sequence[Any]], keys: Collection[bytes]) -> dict[bytes, Record]:
    """The records by key, from rows of `claim` or `read`, which asked for these keys."""
    try:
        found = {
            key: Record(State(state), fingerprint, read_result(body, content_type, status, headers), canonical)
            for key, state, fingerprint, body, content_type, canonical, status, headers in rows
        }
    except (ValueError, msgspec.MsgspecError) as error:
        raise _unclear() from error
    if not found.keys() <= set(keys):
        raise _unclear()
    return found


def _bytea(text: bytes) -> bytes:
    return bytes(_ESCAPING.unescape_bytea(text))  # in either format of bytea_output, which a handler may have set


# The columns: key, state, fingerprint, body, content type, canonical, status and headers.
_READ: Final[Sequence[Callable[[bytes], object]]] = (_bytea, int, _bytea, _bytea, bytes.decode, _bytea, int, _bytea)
_COLUMNS: Final = len(_READ)


def _missed(answer: PGresult, row: int) -> tuple[Any, ...]:
    values = [answer.get_value(row, column) for column in range(_COLUMNS)]
    if values[0] is None:
        raise ValueError("no key")
    return tuple([None if value is None else read(value) for read, value in zip(_READ, values, strict=True)])


def _unclear() -> StoreUnavailable:
    return StoreUnavailable("the database's answer to a claim cannot be read; its transaction is rolled back")


def moment(micros: int) -> datetime:
    """The time for microseconds since 1970: a handler's session may write times in any format (R14)."""
    return _EPOCH + timedelta(microseconds=micros)
