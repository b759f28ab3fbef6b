"""One transaction of the store: opened, sealed and committed by the engine alone.

It is opened with a seal of its own, which the engine's last statement compares and sets; a deferred trigger refuses
every COMMIT without it (`guard` in migrations/0001). What the server enforces is described where it stands; this file
only sends it in the right order.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
from psycopg import pq

from idemconsumer.errors import (
    CommitUnknown,
    ConfigurationError,
    Contention,
    GuardViolated,
    HandlerFault,
    Reject,
    Retry,
    StoreUnavailable,
)
from idemconsumer.message.headers import encode_headers
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.store import Claim, DeadLetter
from idemconsumer.redaction import error_text
from idemconsumer.rules.values import Found, State
from idemconsumer.sql.connecting import OwnCursor
from idemconsumer.stores.answers import outcomes
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.literals import bytea_array, clean, written
from idemconsumer.stores.pool import LOCK_TIMEOUT, Pool
from idemconsumer.stores.sqlstates import NOT_DURABLE, broken_under_handler, translate
from idemconsumer.stores.tx import PostgresTx
from idemconsumer.user_code.cancellation import uninterrupted

_GROUP_LOCK_TIMEOUT: Final = "50ms"  # G12: a group that waits for another lane's rows is better rerun smaller


@asynccontextmanager
async def transaction(pool: Pool, *, group: int, gate: str | None = None) -> AsyncIterator[PostgresClaims]:
    """See `ports.JoinedStore`."""
    async with pool.connection() as connection:
        claims = PostgresClaims(pool, connection, group, gate)
        try:
            yield claims
        finally:
            claims.end()


class PostgresClaims:
    """See `ports.Claims`. Also what sagas and admin commands send, under the same guard."""

    def __init__(self, pool: Pool, connection: Connection, group: int, gate: str | None) -> None:
        self._pool = pool
        self._queries = pool.queries
        self._connection = connection
        self._lock_timeout = _GROUP_LOCK_TIMEOUT if group > 1 else LOCK_TIMEOUT
        self._gate = gate
        self._seal = ""
        self._tx: PostgresTx | None = None

    # ------------------------------------------------------------------------------------------------------ the opening
    async def begin(self) -> None:
        """Open the transaction; `claim` does so by itself."""
        if not self._seal:
            try:
                await self._connection.simple(self._opening())
            except psycopg.Error as error:
                raise translate(self._connection, error, ours=True) from error

    async def begin_step(self, params: dict[str, Any]) -> int | None:
        """Open the transaction, lock the saga's row and begin its step. None: fenced; 0: the step has ended already."""
        self._seal = secrets.token_hex(8)
        opening = {"seal": self._seal, "lock_timeout": self._lock_timeout}
        try:
            statements = [self._queries["begin"], self._written("begin_step", params | opening)]
            begun = (await self._connection.simple(b"; ".join(statements)))[-1].get_value(0, 0)
        except psycopg.Error as error:
            raise translate(self._connection, error, ours=True) from error
        return None if begun is None else int(begun)

    async def claim(self, claims: Sequence[Claim], *, state: State = State.COMPLETED) -> list[Found]:
        keys = [claim.key for claim in claims]
        scopes = await self._pool.scope_ids(self._connection, claims)
        statement = self._queries["claim"] % {
            b"keys": bytea_array(keys),
            b"scopes": b"'{%s}'" % b",".join(b"%d" % scope for scope in scopes),
            b"fingerprints": bytea_array([claim.fingerprint for claim in claims]),
            b"state": b"%d" % state,
        }
        try:
            # One round trip, as a pipeline would be. But psycopg ends a pipeline with a Flush after its Sync, which
            # makes the server forget idle_in_transaction_session_timeout (J6, J11).
            answers = await self._connection.simple(statement if self._seal else self._opening() + b"; " + statement)
        except psycopg.Error as error:
            raise translate(self._connection, error, ours=True) from error
        return outcomes(answers[-1], keys)

    def _opening(self) -> bytes:
        self._seal = secrets.token_hex(8)
        statements = [self._queries["begin"]]
        if self._gate is not None:
            statements.append(self._written("gate", {"gate": zlib.crc32(self._gate.encode()) - 2**31}))
        statements.append(self._written("open", {"seal": self._seal, "lock_timeout": self._lock_timeout}))
        return b"; ".join(statements)

    def _written(self, name: str, params: dict[str, Any]) -> bytes:
        return written(self._queries[name], params, self._connection)

    # --------------------------------------------------------------------------------------------------- what is inside
    async def send(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """One more statement of the engine's own in this transaction, and its rows."""
        try:
            cursor = await OwnCursor(self._connection).execute(self._queries[name], params)
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise translate(self._connection, error, ours=True) from error

    async def write_letter(self, letter: DeadLetter, key: bytes | None) -> None:
        params = {
            "identity": letter.identity,
            "key": key,
            "body": letter.body,
            "headers": encode_headers(letter.headers),
            "attempts": letter.attempts,
        } | {n: clean(getattr(letter, n)) for n in ("handler", "scope", "source", "position", "reason", "error")}
        await self.begin()
        await self.send("dead_letter", params)

    def tx(self) -> PostgresTx:
        self.end()
        self._tx = PostgresTx(self._connection)
        return self._tx

    def end(self) -> None:
        """The handler has returned: its Tx refuses to be used from now on."""
        if self._tx is not None:
            self._tx.end()
            self._tx = None

    def check(self) -> None:
        if self._connection.closed:
            raise StoreUnavailable("the connection broke while the handler ran")
        status = self._connection.info.transaction_status
        if status == pq.TransactionStatus.INERROR:
            raise HandlerFault(
                "the handler swallowed a database error, so its transaction can only roll back; "
                "let the error pass, or put the statement that may fail between SAVEPOINT and ROLLBACK TO"
            )
        if status != pq.TransactionStatus.INTRANS:
            raise GuardViolated("the handler ended the transaction it ran in, or left a statement running")

    def diagnose(self, error: Exception) -> Exception:
        if self._connection.closed:
            return broken_under_handler(error)
        if isinstance(error, psycopg.Error):
            return translate(self._connection, error)
        if isinstance(error.__cause__, psycopg.Error) and not isinstance(error, Reject | Retry):
            wrapped = translate(self._connection, error.__cause__)  # as SQLAlchemy does
            return wrapped if isinstance(wrapped, Contention | StoreUnavailable) else error
        return error

    # ---------------------------------------------------------------------------------------------------------- the end
    async def complete(
        self,
        results: Sequence[tuple[bytes, StoredResult]],
        forget: Sequence[bytes],
        *,
        failed: tuple[Claim, str] | None = None,
        last: tuple[str, dict[str, Any]] | None = None,
    ) -> int:
        """See `ports.Claims`. `last` is one more statement, sent with the others, which seals."""
        # J4: a connection that is given back busy would commit later.
        self.end()
        return await uninterrupted(self._complete(results, forget, failed, last))

    async def _complete(
        self,
        results: Sequence[tuple[bytes, StoredResult]],
        forget: Sequence[bytes],
        failed: tuple[Claim, str] | None,
        last: tuple[str, dict[str, Any]] | None,
    ) -> int:
        connection = self._connection
        statements = []
        if failed is not None:
            claim, error = failed
            (scope,) = await self._pool.scope_ids(connection, [claim])  # known: it was claimed before it failed
            attempt = {"key": claim.key, "scope": scope, "error": clean(error)}
            statements.append(self._written("count_attempt", attempt))
        if results:
            columns = {
                "keys": [key for key, _ in results],
                "bodies": [result.body for _, result in results],
                "types": [result.content_type for _, result in results],
            }
            statements.append(self._written("store_results", columns))
        if forget:
            statements.append(self._written("forget_attempts", {"keys": list(forget)}))
        seal = {"seal": self._seal}
        statements.append(self._written("seal", seal) if last is None else self._written(last[0], last[1] | seal))
        try:
            answers = await connection.simple(b"; ".join([*statements, b"COMMIT"]))
        except psycopg.Error as error:
            if connection.closed:
                raise CommitUnknown(f"the answer to COMMIT was lost: {error_text(error)}") from error
            if error.sqlstate == NOT_DURABLE and not await _durable(connection):
                raise ConfigurationError(f"database: {error.diag.message_primary}; set it to on") from error
            raise translate(connection, error) from error
        # Postgres answers COMMIT of a failed transaction with ROLLBACK, and no error (J9).
        if (tag := answers[-1].command_status) != b"COMMIT":
            raise GuardViolated(f"COMMIT was answered by {tag!r}: the transaction had failed before")
        return 0 if failed is None else int(answers[0].get_value(0, 0) or 0)


async def _durable(connection: Connection) -> bool:
    """Whether synchronous_commit is on outside of the transaction that was refused: then its handler had set it off."""
    await connection.rollback()
    row = await (await OwnCursor(connection).execute("select current_setting('synchronous_commit')")).fetchone()
    return row is not None and row[0] != "off"
