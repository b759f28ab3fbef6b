"""JoinedStore on Postgres 14 and newer: the claim, the guard and the checked COMMIT (psycopg 3).

Each transaction is opened with a mark and sealed by the engine's last statement; a deferred trigger refuses every
COMMIT without that seal (`guard` in migrations/0001). Connections default to read-only transactions and only the
engine's own opening lifts that, so what a handler writes after a ROLLBACK of its own is refused even if it then
commits. What the server enforces is described where it stands; this file only sends it in the right order.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from idemconsumer.errors import (
    CommitUnknown,
    ConfigurationError,
    Contention,
    GuardViolated,
    HandlerFault,
    Reject,
    Retry,
    StoreUnavailable,
    TransactionEnded,
)
from idemconsumer.message.headers import encode_headers, with_origin
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.ports.store import Claim, DeadLetter
from idemconsumer.rules.values import Found, Mark, Record, State
from idemconsumer.sql.queries import load
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.tx import PostgresTx
from idemconsumer.user_code.cancellation import CancellationWatch, uninterrupted

_IDLE_TOO_LONG: Final = "25P03"
_CONTENTION: Final = {"40001", "40P01", "55P03", "53200"}
# Of any statement: the disk is full, or broken. More would take a handler's own mistakes for an outage, for ever.
_SERVER_TROUBLE: Final = ("53100", "58030")
# Of our own statements also: too much in use, cancelled, read-only or in recovery after a failover, broken.
_OUR_TROUBLE: Final = ("53", "57", "58", "0A000", "25006")
_ACQUIRE_SECONDS: Final = 3.0  # an outage is noticed, and its end too, within this time
_GROUP_LOCK_TIMEOUT: Final = "50ms"  # G12: a group that waits for another lane's rows is better rerun smaller
_LOCK_TIMEOUT: Final = "10s"  # backstop only: the advisory lock means that a claim never waits


def clean(text: str) -> str:
    """Text that a text column takes: no NUL, no lone surrogates."""
    return text.replace("\x00", "�").encode("utf-8", "replace").decode("utf-8")


class PostgresStore:
    """See `ports.JoinedStore`. `open` refuses a database that would lose what it acknowledges (R6)."""

    def __init__(
        self, dsn: str, schema: str, *, connections: int, longest_run: float, lease: float | None, most_locks: int
    ) -> None:
        self._queries = load(schema)
        self._scopes: dict[str, int] = {}
        self.most_locks = most_locks
        # Queueing for a connection is no outage, however long it takes; what the pool times out on is one.
        self._free = asyncio.Semaphore(connections)
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            connection_options(dsn, longest_run, lease),
            min_size=0,
            max_size=connections,
            timeout=_ACQUIRE_SECONDS,
            reconnect_timeout=0,  # the worker has its own backoff; the pool's would outlast the outage
            connection_class=Connection,
            configure=_configure,
            open=False,
            name="idemconsumer",
        )

    @classmethod
    async def open(
        cls, dsn: str, schema: str, *, connections: int, longest_run: float, lease: float | None = None
    ) -> PostgresStore:
        """Check and open. `longest_run` is the longest handler timeout, seconds; with a `lease` no transaction may be
        idle for longer than that (L5).

        Raises ConfigurationError (see `check_database`) or StoreUnavailable.
        """
        most_locks = await check_database(dsn, schema)
        store = cls(dsn, schema, connections=connections, longest_run=longest_run, lease=lease, most_locks=most_locks)
        await store._pool.open()
        return store

    async def close(self) -> None:
        await self._pool.close(timeout=2.0)

    # ------------------------------------------------------------------------------------------------- connections
    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        outside = CancellationWatch()
        async with self._free:
            try:
                connection = await self._pool.getconn()
            except (PoolTimeout, psycopg.OperationalError) as error:
                raise StoreUnavailable(f"no connection to the database: {error}") from error
            try:
                # Python 3.11: asyncio.wait_for inside the pool can swallow a cancellation (cpython #86296). Compared,
                # as user code may have left the count raised: a failed TaskGroup does so before 3.13.
                if outside.requested:
                    raise asyncio.CancelledError
                yield connection
            except StoreUnavailable:
                await connection.close()  # it may be alive, and lead to a server that is now a standby
                raise
            finally:
                try:
                    await _leave(connection)
                finally:  # a cancellation during the rollback must not cost the pool this place
                    connection.unwatch()
                    await self._pool.putconn(connection)

    @asynccontextmanager
    async def transaction(self, *, group: int, gate: str | None = None) -> AsyncIterator[PostgresClaims]:
        async with self._connection() as connection:
            claims = PostgresClaims(self, connection, group, gate)
            try:
                yield claims
            finally:
                claims.end()

    async def scope_ids(self, connection: Connection, claims: Sequence[Claim]) -> list[int]:
        """Ids of the scopes; new ones are committed on the spot, on this same connection (J16: a second could be waited
        for by every lane at once)."""
        for claim in claims:
            if claim.scope not in self._scopes:
                rows = await self._run(connection, "scope", {"name": claim.scope, "retain": claim.retain})
                self._scopes[claim.scope] = rows[0][0]
        return [self._scopes[claim.scope] for claim in claims]

    async def _run(
        self, connection: Connection, name: str, params: dict[str, Any], *, prepare: bool | None = None
    ) -> list[tuple[Any, ...]]:
        """One statement that touches no record, in a transaction of its own."""
        try:
            async with connection.pipeline():
                await connection.execute(self._queries["begin"])
                cursor = await connection.execute(self._queries[name], params, prepare=prepare)
                await connection.execute("COMMIT")
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            cause = translate(connection, error, ours=True)
            if isinstance(cause, Contention):  # a lock of somebody else's: nothing happened, and it can be done again
                cause = StoreUnavailable(str(cause))
            raise cause from error

    async def alone(self, name: str, params: dict[str, Any], *, prepare: bool | None = None) -> list[tuple[Any, ...]]:
        async with self._connection() as connection:
            return await self._run(connection, name, params, prepare=prepare)

    # ------------------------------------------------------------------------- transactions of the engine's own
    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        rows = await self.alone("read", {"keys": list(keys)})
        found = _records(rows)
        return [found.get(key) for key in keys]

    async def mark_attempts(self, claims: Sequence[Claim]) -> set[bytes]:
        async with self._connection() as connection:
            scopes = await self.scope_ids(connection, claims)
            params = {"keys": [claim.key for claim in claims], "scopes": scopes}
            return {row[0] for row in await self._run(connection, "mark_attempts", params)}

    async def unmark_attempts(self, keys: Sequence[bytes]) -> None:
        # A plan kept from when the table was small would be a scan of all of it (G5), and this is rare.
        await self.alone("unmark_attempts", {"keys": list(keys)}, prepare=False)

    async def count_attempt(self, claim: Claim, error: str | None) -> int:
        async with self._connection() as connection:
            (scope,) = await self.scope_ids(connection, [claim])
            params = {"key": claim.key, "scope": scope, "error": None if error is None else clean(error)}
            return int((await self._run(connection, "count_attempt", params))[0][0])

    async def uncount_attempt(self, claim: Claim) -> None:
        await self.alone("uncount_attempt", {"key": claim.key})

    async def note_error(self, claim: Claim, error: str) -> int:
        rows = await self.alone("note_error", {"key": claim.key, "error": clean(error)})
        return int(rows[0][0]) if rows else await self.count_attempt(claim, error)

    async def count_dead(self, key: bytes) -> None:
        await self.alone("count_dead", {"key": key})

    async def take_over(self, queue: str, message: Message) -> None:
        headers = encode_headers(with_origin(message).headers).decode()
        await self.alone("enqueue", {"name": queue, "body": message.body, "key": None, "headers": headers})

    async def reject(self, claim: Claim, rejection: StoredResult) -> Record | None:
        return await self._finalise(claim, State.FAILED, rejection, None)

    async def bury(self, letter: DeadLetter, claim: Claim | None) -> Record | None:
        return await self._finalise(claim, State.DEAD, None, letter)

    async def _finalise(
        self, claim: Claim | None, state: State, result: StoredResult | None, letter: DeadLetter | None
    ) -> Record | None:
        async with self.transaction(group=1) as claims:
            if claim is not None:
                (found,) = await claims.claim([claim], state=state)
                if found is Mark.BUSY:
                    raise Contention("a rival holds the key")
                if isinstance(found, Record):
                    return found
            if letter is not None:
                await claims.write_letter(letter, None if claim is None else claim.key)
            results = [] if claim is None or result is None else [(claim.key, result)]
            await claims.complete(results, [] if claim is None else [claim.key])
            return None


class PostgresClaims:
    """One open transaction of the store."""

    def __init__(self, store: PostgresStore, connection: Connection, group: int, gate: str | None) -> None:
        self._store = store
        self._queries = store._queries
        self.connection = connection
        self._lock_timeout = _GROUP_LOCK_TIMEOUT if group > 1 else _LOCK_TIMEOUT
        self._gate = gate
        self._seal = ""
        self._tx: PostgresTx | None = None

    async def begin(self) -> None:
        """Open the transaction; `claim` does so by itself."""
        if not self._seal:
            try:
                await self.connection.simple(self._opening())
            except psycopg.Error as error:
                raise translate(self.connection, error, ours=True) from error

    async def begin_step(self, params: dict[str, Any]) -> int | None:
        """Open the transaction, lock the saga's row and begin its step. None: fenced; 0: the step has ended already."""
        self._seal = secrets.token_hex(8)
        opening = {"seal": self._seal, "lock_timeout": self._lock_timeout}
        try:
            statements = [self._queries["begin"], self._written("begin_step", params | opening)]
            begun = (await self.connection.simple(b"; ".join(statements)))[-1].get_value(0, 0)
        except psycopg.Error as error:
            raise translate(self.connection, error, ours=True) from error
        return None if begun is None else int(begun)

    def _opening(self) -> bytes:
        self._seal = secrets.token_hex(8)
        statements = [self._queries["begin"]]
        if self._gate is not None:
            statements.append(self._written("gate", {"gate": zlib.crc32(self._gate.encode()) - 2**31}))
        statements.append(self._written("open", {"seal": self._seal, "lock_timeout": self._lock_timeout}))
        return b"; ".join(statements)

    async def _simple(self, statements: bytes) -> psycopg.AsyncCursor[Any]:
        """Several statements as one simple query, and the last one's result.

        One round trip, as a pipeline would be. But psycopg ends a pipeline with a Flush after its Sync, which makes
        the server forget idle_in_transaction_session_timeout (J6, J11).
        """
        cursor = await self.connection.execute(statements, prepare=False)
        while cursor.nextset():
            pass
        return cursor

    async def claim(self, claims: Sequence[Claim], *, state: State = State.COMPLETED) -> list[Found]:
        keys = [claim.key for claim in claims]
        scopes = await self._store.scope_ids(self.connection, claims)
        statement = self._queries["claim"] % {
            b"keys": _array(keys),
            b"scopes": b"'{%s}'" % b",".join(b"%d" % scope for scope in scopes),
            b"fingerprints": _array([claim.fingerprint for claim in claims]),
            b"state": b"%d" % state,
        }
        try:
            cursor = await self._simple(statement if self._seal else self._opening() + b"; " + statement)
            missed = await cursor.fetchall()
        except psycopg.Error as error:
            raise translate(self.connection, error, ours=True) from error
        if not missed:
            return [Mark.CLAIMED] * len(keys)
        found: dict[bytes, Found] = {row[0]: Mark.BUSY for row in missed}
        found |= _records([row for row in missed if row[1] is not None])
        return [found.get(key, Mark.CLAIMED) for key in keys]

    def _written(self, name: str, params: dict[str, Any]) -> bytes:
        """A statement with its parameters in it. psycopg's own way to do so takes ten times as long."""
        return self._queries[name] % {key.encode(): self._literal(value) for key, value in params.items()}

    def _literal(self, value: object) -> bytes:
        match value:
            case None:
                return b"null"
            case bool() | int():
                return str(value).encode()
            case bytes():
                return b"E'\\\\x%s'" % value.hex().encode()
            case str():
                text = value.encode(self.connection.info.encoding)
                if b"\0" in text:  # libpq would cut it off there
                    raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
                return bytes(pq.Escaping(self.connection.pgconn).escape_literal(text))
            case list():
                return b"array[%s]" % b",".join(map(self._literal, value))
            case _:
                raise TypeError(f"a {type(value).__name__} is not written into statements")

    async def send(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """One more statement of the engine's own in this transaction, and its rows."""
        try:
            cursor = await self.connection.execute(self._queries[name], params)
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise translate(self.connection, error, ours=True) from error

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
        self._tx = PostgresTx(self.connection)
        return self._tx

    def end(self) -> None:
        if self._tx is not None:
            self._tx.end()
            self._tx = None

    def check(self) -> None:
        if self.connection.closed:
            raise StoreUnavailable("the connection broke while the handler ran")
        status = self.connection.info.transaction_status
        if status == pq.TransactionStatus.INERROR:
            raise HandlerFault(
                "the handler swallowed a database error, so its transaction can only roll back; "
                "let the error pass, or put the statement that may fail between SAVEPOINT and ROLLBACK TO"
            )
        if status != pq.TransactionStatus.INTRANS:
            raise GuardViolated("the handler ended the transaction it ran in, or left a statement running")

    def diagnose(self, error: Exception) -> Exception:
        if self.connection.closed:  # the handler's own text is left out: this one is logged
            states = (_sqlstate(error), _sqlstate(error.__cause__))
            kind = TransactionEnded if _IDLE_TOO_LONG in states else StoreUnavailable
            return kind(f"the connection broke while the handler ran ({type(error).__name__})")
        if isinstance(error, psycopg.Error):
            return translate(self.connection, error)
        if isinstance(error.__cause__, psycopg.Error) and not isinstance(error, Reject | Retry):
            wrapped = translate(self.connection, error.__cause__)  # as SQLAlchemy does
            return wrapped if isinstance(wrapped, Contention | StoreUnavailable) else error
        return error

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
        connection = self.connection
        statements = []
        if failed is not None:
            claim, error = failed
            (scope,) = await self._store.scope_ids(connection, [claim])  # known: it was claimed before it failed
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
        if last is None:
            statements.append(self._written("seal", {"seal": self._seal}))
        else:
            statements.append(self._written(last[0], last[1] | {"seal": self._seal}))
        try:
            answers = await connection.simple(b"; ".join([*statements, b"COMMIT"]))
        except psycopg.Error as error:
            if connection.closed:
                raise CommitUnknown(f"the answer to COMMIT was lost: {error}") from error
            if error.sqlstate == "IC002" and not await _durable(connection):
                raise ConfigurationError(f"database: {error.diag.message_primary}; set it to on") from error
            raise translate(connection, error) from error
        # Postgres answers COMMIT of a failed transaction with ROLLBACK, and no error (J9).
        if (tag := answers[-1].command_status) != b"COMMIT":
            raise GuardViolated(f"COMMIT was answered by {tag!r}: the transaction had failed before")
        return 0 if failed is None else int(answers[0].get_value(0, 0) or 0)


# ------------------------------------------------------------------------------------------------------------- helpers
def _sqlstate(error: BaseException | None) -> str:
    return (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""


def translate(connection: Connection, error: psycopg.Error, *, ours: bool = False) -> Exception:
    """A driver's error as one of ours (B5): by the connection's state first, since a dead one says nothing reliable.

    `ours`: it came from a statement of the engine, for which no message can be blamed.
    """
    if connection.closed:
        return StoreUnavailable(f"the connection to the database broke: {error}")
    state = error.sqlstate or ""
    if state in _CONTENTION:
        return Contention(f"{state}: {error.diag.message_primary}", cap_groups=state == "53200")
    if state.startswith(_OUR_TROUBLE if ours else _SERVER_TROUBLE):
        return StoreUnavailable(f"{state}: {error.diag.message_primary}")
    if state in ("IC001", "IC002"):
        return GuardViolated(str(error.diag.message_primary))
    return error


def connection_options(dsn: str, longest_run: float, lease: float | None = None) -> str:
    """The DSN with the bounds that keep a frozen worker from holding a key for ever (J6)."""
    given = conninfo_to_dict(dsn)
    bounds = {
        "idle_in_transaction_session_timeout": f"{int(min(longest_run + 5, lease or longest_run + 5) * 1000)}ms",
        "statement_timeout": f"{int((longest_run + 5) * 1000)}ms",
        "lock_timeout": _LOCK_TIMEOUT,
        "client_connection_check_interval": "5s",
        "default_transaction_read_only": "on",
    }
    options = " ".join([str(given.get("options") or ""), *(f"-c {name}={value}" for name, value in bounds.items())])
    defaults: dict[str, str | int] = {
        "connect_timeout": 5,
        "tcp_user_timeout": 30_000,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "application_name": "idemconsumer",
    }
    missing = {name: value for name, value in defaults.items() if name not in given}
    return make_conninfo(dsn, options=options.strip(), client_encoding="UTF8", **missing)


async def _configure(connection: Connection) -> None:
    # J7: the engine alone sends BEGIN. What a handler runs after a ROLLBACK of its own is by itself, and read-only.
    await connection.set_autocommit(True)
    connection.prepare_threshold = 2  # earlier than psycopg does: a rollback drops all that was prepared


async def _durable(connection: Connection) -> bool:
    """Whether synchronous_commit is on outside of the transaction that was refused: then its handler had set it off."""
    await connection.rollback()
    row = await (await connection.execute("select current_setting('synchronous_commit')")).fetchone()
    return row is not None and row[0] != "off"


async def _leave(connection: Connection) -> None:
    """Roll back what is open (J15). A connection on which that does not work is closed, and the pool drops it."""
    if connection.closed or connection.info.transaction_status == pq.TransactionStatus.IDLE:
        return
    try:
        await connection.rollback()
    except psycopg.Error:
        await connection.close()
    except BaseException:
        await connection.close()
        raise


def _array(values: Sequence[bytes | None]) -> bytes:
    """A bytea[] as it is written into a statement. psycopg's own way to do so takes four times as long."""
    items = ["null" if value is None else '"\\\\\\\\x' + value.hex() + '"' for value in values]
    return b"E'{%s}'" % ",".join(items).encode()


def _records(rows: Sequence[tuple[Any, ...]]) -> dict[bytes, Record]:
    return {
        key: Record(State(state), fingerprint, None if body is None else StoredResult(body, content_type))
        for key, state, fingerprint, body, content_type in rows
    }
