"""The connections of one process to one schema, and what all that use them share: the statements, the scopes' ids.

Connections default to read-only transactions and only the engine's own BEGIN lifts that, so what a handler writes after
a ROLLBACK of its own is refused even if it then commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from idemconsumer.errors import Contention, StoreUnavailable
from idemconsumer.ports.store import Claim
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import READ_COMMITTED, OwnCursor, with_settings
from idemconsumer.sql.queries import load
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.sqlstates import translate
from idemconsumer.user_code.cancellation import CancellationWatch

LOCK_TIMEOUT: Final = "10s"  # backstop only: the advisory lock means that a claim never waits
_ACQUIRE_SECONDS: Final = 3.0  # an outage is noticed, and its end too, within this time
_CLOSE_SECONDS: Final = 2.0


class Pool:
    """At most `connections`, made when they are needed; more callers than that wait.

    `longest_run` is the longest handler timeout, seconds; with a `lease` no transaction may be idle for longer than
    that (L5). To be opened and closed by its owner. Raises ConfigurationError for a schema that is no name.
    """

    def __init__(
        self, dsn: str, schema: str, *, connections: int, longest_run: float, lease: float | None = None
    ) -> None:
        self.queries = load(schema)
        self._scopes: dict[str, int] = {}
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

    async def open(self) -> None:
        await self._pool.open()

    async def close(self) -> None:
        await self._pool.close(timeout=_CLOSE_SECONDS)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """One for the caller alone. What is open on it at the end is rolled back. Raises StoreUnavailable."""
        outside = CancellationWatch()
        async with self._free:
            try:
                connection = await self._pool.getconn()
            except (PoolTimeout, psycopg.OperationalError) as error:
                raise StoreUnavailable(f"no connection to the database: {error_text(error)}") from error
            try:
                # Python 3.11: asyncio.wait_for inside the pool can swallow a cancellation (cpython #86296).
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

    async def scope_ids(self, connection: Connection, claims: Sequence[Claim]) -> list[int]:
        """Ids of the scopes; new ones are committed on the spot, on this same connection (J16: a second could be waited
        for by every lane at once)."""
        for claim in claims:
            if claim.scope not in self._scopes:
                rows = await self.run(connection, "scope", {"name": claim.scope, "retain": claim.retain})
                self._scopes[claim.scope] = rows[0][0]
        return [self._scopes[claim.scope] for claim in claims]

    async def alone(self, name: str, params: dict[str, Any], *, prepare: bool | None = None) -> list[tuple[Any, ...]]:
        """One statement on tables that the guard does not watch, in a transaction of its own, and its rows.

        Raises StoreUnavailable also for a lock that a rival holds: nothing happened, and it can be done again.
        """
        async with self.connection() as connection:
            return await self.run(connection, name, params, prepare=prepare)

    async def run(
        self, connection: Connection, name: str, params: dict[str, Any], *, prepare: bool | None = None
    ) -> list[tuple[Any, ...]]:
        """As `alone`, on a connection with no open transaction."""
        try:
            async with connection.pipeline():
                await OwnCursor(connection).execute(self.queries["begin"])
                cursor = await OwnCursor(connection).execute(self.queries[name], params, prepare=prepare)
                await OwnCursor(connection).execute("COMMIT")
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            cause = translate(connection, error, ours=True)
            if isinstance(cause, Contention):
                cause = StoreUnavailable(str(cause))
            raise cause from error


def connection_options(dsn: str, longest_run: float, lease: float | None) -> str:
    """The DSN with the bounds that keep a frozen worker from holding a key for ever (J6)."""
    given = conninfo_to_dict(dsn)
    bounds = READ_COMMITTED | {
        "idle_in_transaction_session_timeout": f"{int(min(longest_run + 5, lease or longest_run + 5) * 1000)}ms",
        "statement_timeout": f"{int((longest_run + 5) * 1000)}ms",
        "lock_timeout": LOCK_TIMEOUT,
        "client_connection_check_interval": "5s",
        "default_transaction_read_only": "on",
    }
    defaults: dict[str, str | int] = {
        "connect_timeout": 5,
        "tcp_user_timeout": 30_000,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "application_name": "idemconsumer",
    }
    missing = {name: value for name, value in defaults.items() if name not in given}
    return make_conninfo(with_settings(dsn, bounds), client_encoding="UTF8", **missing)


async def _configure(connection: Connection) -> None:
    # J7: the engine alone sends BEGIN. What a handler runs after a ROLLBACK of its own is by itself, and read-only.
    await connection.set_autocommit(True)
    connection.prepare_threshold = 2  # earlier than psycopg does: a rollback drops all that was prepared


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
