"""The connections of one process to one schema, and what all their users share: the statements, the scopes' ids.

Connections default to read-only transactions, and only the engine's own BEGIN lifts that. So a handler's writes after a
ROLLBACK of its own are refused even if it then commits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Final, TypeVar

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from idemconsumer.errors import ConfigurationError, Contention, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.rules.claim import Claim
from idemconsumer.sql.answering import PATIENCE
from idemconsumer.sql.connecting import OwnCursor, connect_async, nobody_listens
from idemconsumer.sql.queries import load
from idemconsumer.stores.answers import loaded
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.literals import written
from idemconsumer.stores.session import PoolSession, SessionRules
from idemconsumer.stores.sharing import PARTY, Sharing
from idemconsumer.stores.slow_commits import SlowCommits
from idemconsumer.stores.sqlstates import NOT_DURABLE, may_be_changed, not_durable, translate
from idemconsumer.user_code.cancellation import CancellationWatch, run_on

T = TypeVar("T")

_ACQUIRE_SECONDS: Final = 3.0  # an outage is noticed within this time
_TRY_SECONDS: Final = 0.5  # and its end within this time
_IDLE_SECONDS: Final = 15.0  # R45: a connection that was not needed for so long is closed
_CLOSE_SECONDS: Final = 2.0
_SPARE_SECONDS: Final = 10.0  # R20: the server's own limits, five seconds beyond a handler's, come first
_READY_SECONDS: Final = 5.0  # while a connection is prepared, all checkouts wait for it
_ASK_SECONDS: Final = 1.0
_CALM: Final = 60.0  # seconds without prepared statements, once a schema has changed
_SCOPES: Final = 10_000  # that a process remembers, about 2 MB
_SCOPES_FOR: Final = 43_200.0  # seconds: R30, far less than the days after which a scope is pruned


class _Connections(AsyncConnectionPool[PoolSession]):
    @classmethod
    async def worker(cls, q: Any) -> None:
        """A pool's own worker continues if it is cancelled while it connects, and a loop that ends would wait for it
        for ever (H15)."""
        await run_on(super().worker(q), "worker of the pool")

    async def _signal_stop_worker(self) -> list[Any]:
        """`close` waits for these, then closes connections. A worker that its loop has cancelled would end it (O26)."""
        return [task for task in await super()._signal_stop_worker() if not task.done()]


class Pool:
    """At most `connections`, opened when they are needed; further checkouts wait, and `parties` share fairly.

    `longest_run`, `lease` and `beside` are those of SessionRules. With `hasty` a checkout fails at once where no server
    listens: its caller has a waiting client, which will retry (H10). With `require_standby` no transaction is committed
    unless a synchronous standby has to confirm it (R22). The owner opens and closes it. Raises ConfigurationError for
    an invalid name of a schema.
    """

    def __init__(
        self,
        dsn: str,
        schema: str,
        *,
        connections: int,
        longest_run: float,
        lease: float | None = None,
        beside: float | None = None,
        require_standby: bool = False,
        parties: Iterable[str] = (),
        hasty: bool = False,
    ) -> None:
        self.queries = load(schema)
        self.schema = schema
        self.require_standby = require_standby
        self.slow_commits = SlowCommits(dsn)
        self.unlogged = Unlogged()
        self.longest_answer = max(longest_run + _SPARE_SECONDS, PATIENCE)

        self.readers: set[int] = set()  # numbers of this process under which readings may be recorded (B17)
        self._most = connections
        self._dsn = dsn
        self.forget_scopes()
        self._silent_at = self._changed_at = self._cut_at = self._unheard_at = -math.inf
        self.missed_at = -math.inf  # when a statement of ours last lacked a right or a table (R43)
        self._failure = ""  # the error of the last attempt to connect
        self._hasty = hasty
        # Queueing for a connection is no outage, however long it takes; a timeout of the pool is one.
        self._sharing = Sharing(connections, parties)
        self._rules = SessionRules(dsn, longest_run, lease, beside)
        self._refused: ConfigurationError | None = None
        self._in_use: set[PoolSession] = set()
        self._pool = _Connections(
            self._rules.conninfo,
            kwargs={"failed": self._failed},
            min_size=0,
            max_size=connections,
            max_idle=_IDLE_SECONDS,
            reconnect_timeout=0,  # the worker has its own backoff; the pool's would outlast the outage
            connection_class=PoolSession,
            configure=self._configure,
            open=False,
            name="idemconsumer",
        )

    @property
    def usage(self) -> tuple[int, int, int]:
        """How many connections are in use, how many may be, and how many callers wait for one."""
        return self._sharing.used, self._most, self._sharing.pending

    def held_for(self, seconds: float) -> list[tuple[int, str]]:
        """The connections that were checked out for so long: each with the server's process id, and the party."""
        before = time.monotonic() - seconds
        return [(each.server_pid, each.taken_by) for each in self._in_use if each.taken_at < before and not each.closed]

    @property
    def full(self) -> bool:
        """Whether the current task would have to wait for a connection."""
        return self._sharing.full

    @property
    def held_here(self) -> bool:
        """Whether the current task has a connection of this pool."""
        return self._sharing.held_here

    @property
    def prepares(self) -> bool:
        """Whether to prepare statements: not while a schema changes. Where each tenant has one, no plan would fit for
        long (J28)."""
        return time.monotonic() - self._changed_at > _CALM

    async def open(self) -> None:
        await self._pool.open()

    async def close(self) -> None:
        try:
            await self._pool.close(timeout=_CLOSE_SECONDS)
        finally:
            await self.slow_commits.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[PoolSession]:
        """A connection for the caller alone. An open transaction is rolled back at the end, and a changed session is
        reset (J21).

        Raises StoreUnavailable, or ConfigurationError for a session on which our rules would not hold (R17).
        """
        outside = CancellationWatch()
        async with self._sharing.place():
            try:
                connection = await self._answering(outside)
            except (PoolTimeout, psycopg.OperationalError) as error:
                if refused := self._refused:  # the pool itself only reports that it had no connection in time
                    self._refused = None
                    raise refused from None
                raise StoreUnavailable(f"no connection to the database: {error_text(error)}") from error
            try:
                # Python 3.11: asyncio.wait_for inside the pool can swallow a cancellation (cpython #86296).
                if outside.requested:
                    raise asyncio.CancelledError
                connection.patience = PATIENCE
                connection.taken_at, connection.taken_by = time.monotonic(), PARTY.get()
                self._in_use.add(connection)
                yield connection
            except StoreUnavailable:
                await connection.close()  # it may be alive, and lead to a server that is now a standby
                raise
            finally:
                self._in_use.discard(connection)
                try:
                    await self._leave(connection)
                finally:  # a cancellation during the rollback must not cost the pool this place
                    if connection.silent:
                        self._silent_at = time.monotonic()
                    if connection.ahead.outdated:
                        self._changed_at = time.monotonic()
                    if connection.closed:
                        connection.unwatch()
                    await self._pool.putconn(connection)

    async def _leave(self, connection: PoolSession) -> None:
        """Roll back an open transaction (J15), and reset a changed session (J21). A connection that is not idle
        afterwards is closed, and the pool drops it."""
        if connection.closed or (connection.idle and not connection.changed):
            return
        connection.patience = min(connection.patience, PATIENCE)
        try:
            if connection.changed:
                await self.reset(connection)
            else:
                await connection.rollback()
        except psycopg.Error:
            await connection.close()
        except BaseException:
            await connection.close()
            raise
        if not connection.idle:
            await connection.close()

    async def reset(self, connection: PoolSession) -> None:
        """Roll back and reset the session, in one message, since a pooler may hand the session on after each."""
        idle = connection.info.transaction_status == pq.TransactionStatus.IDLE
        await connection.simple((b"" if idle else b"rollback; ") + self.queries["reset_session"] + connection.again)
        connection.statements.dropped()
        connection.changed, connection.state = False, ""

    def _failed(self, error: psycopg.OperationalError) -> None:
        self._failure = error_text(error)
        if nobody_listens(error):
            self._unheard_at = time.monotonic()

    async def _configure(self, connection: PoolSession) -> None:
        connection.patience = _READY_SECONDS
        try:
            await self._rules.prepare(connection)
        except ConfigurationError as error:
            self._refused = error
            raise
        connection.made, connection.schema = time.monotonic(), self.schema
        self.forget_scopes()  # it may lead to a standby or a backup, which lacks the last of them

    async def _answering(self, outside: CancellationWatch) -> PoolSession:
        """A connection that its server has not closed while it was idle (R21), and that was opened after the last time
        one fell silent: those that were idle then lead to the same server (R20). It was also opened after a schema
        changed for which statements were prepared (J28)."""
        while True:
            connection = await self._given(outside)
            connection.look()
            if not connection.closed and connection.made >= max(self._silent_at, self._changed_at):
                return connection
            if connection.closed and not connection.crashed_beside:
                self._cut_at = time.monotonic()
            await connection.close()
            await self._pool.putconn(connection)

    async def _given(self, outside: CancellationWatch) -> PoolSession:
        """Ask the pool again and again: it tries to connect once for each request, and does not report a failure
        (R8)."""
        began = time.monotonic()
        while True:
            try:
                connection = await self._pool.getconn(_TRY_SECONDS)
                self._failure = ""
                return connection
            except PoolTimeout:
                if outside.requested:  # a cancellation that asyncio.wait_for has swallowed, as above
                    raise asyncio.CancelledError from None
                if self._hasty and self._unheard_at >= began:
                    raise PoolTimeout("no server listens there") from None
                if self._refused or time.monotonic() >= began + _ACQUIRE_SECONDS:
                    raise PoolTimeout(f"none within {_ACQUIRE_SECONDS:g} s: {self._failure}".rstrip(": ")) from None

    async def waits_for_lock(self, connection: PoolSession) -> bool:
        """Whether a statement on `connection` waits for a lock, asked on a connection of its own to the same server,
        since the pool may have none left. False if there is no answer within a second."""
        with suppress(psycopg.Error, OSError, TimeoutError):
            info = connection.info
            address = {"hostaddr": info.hostaddr} if info.hostaddr else {}
            server = make_conninfo(self._dsn, host=info.host, port=info.port, **address)
            async with asyncio.timeout(_ASK_SECONDS):
                async with await connect_async(server) as asking:
                    blocked = await asking.execute(self.queries["waits_for_lock"], {"pid": connection.server_pid})
                    return bool((await blocked.fetchall())[0][0])
        return False

    def cut_within(self, seconds: float) -> bool:
        """Whether an idle connection was found closed so lately, and not because another session crashed."""
        return time.monotonic() - self._cut_at < seconds

    async def server_started(self) -> datetime:
        """When the server was started, by its clock: a different time means another server, or a restart."""
        ((started,),) = await self.read("server_started", {})
        return started  # type: ignore[no-any-return]

    async def born(self) -> str:
        """A text that distinguishes this schema from one in any other database (H33)."""
        ((born,),) = await self.read("born", {})
        return str(born)

    async def scope_ids(self, connection: PoolSession, claims: Sequence[Claim]) -> list[int]:
        """Ids of the scopes. Those that this process has not used lately are read together, and new ones are committed
        at once, on this same connection (J16: if each lane needed a second one, all could wait for one at once)."""
        if time.monotonic() - self._scopes_since > _SCOPES_FOR:
            self.forget_scopes()
        scopes = self._scopes  # kept, since `forget_scopes` may replace it while this waits
        retains = {claim.scope: claim.retain for claim in claims}
        ids = {name: scopes[name] for name in retains if name in scopes}
        for name in ids:
            scopes[name] = scopes.pop(name)
        if new := [name for name in retains if name not in ids]:
            given = {"names": new, "retains": [retains[name] for name in new]}
            met = dict(await self.run(connection, "meet_scopes", given))
            # Only now: a scope that the server has not committed may be rolled back, and its id reused (R30).
            scopes |= met
            ids |= met
        while len(scopes) > _SCOPES:
            del scopes[next(iter(scopes))]
        return [ids[claim.scope] for claim in claims]

    def forget_scopes(self) -> None:
        """R30: a scope was pruned, all are old, or the server may have given their ids to others."""
        self._scopes: dict[str, int] = {}  # the one used last at the end
        self._scopes_since = time.monotonic()

    async def alone(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Run one statement on tables that the guard does not watch, in a transaction of its own; returns its rows. It
        is planned each time: a plan made while a table was small may scan all of it when it is large (G5).

        Raises StoreUnavailable also for a lock that another transaction holds: nothing happened, so it can be repeated.
        """
        async with self.connection() as connection:
            return await self.run(connection, name, params)

    async def read(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Run one statement that writes nothing, without BEGIN and COMMIT and planned each time. Raises as `alone`."""
        async with self.connection() as connection:
            try:
                cursor = await OwnCursor(connection).execute(self.queries[name], params, prepare=False)
                return await cursor.fetchall()
            except psycopg.Error as error:
                raise cause_of(connection, error) from error

    async def look(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """As `read`, in half the time: as one simple query, like claims. Raises as `alone`."""
        async with self.connection() as connection:

            async def look() -> list[tuple[Any, ...]]:
                (answer,) = await connection.simple(self.written(connection, name, params))
                return loaded(connection, answer)

            return await self._done(connection, look)

    async def run(self, connection: PoolSession, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """As `alone`, on a connection with no open transaction.

        It is one simple query, which is answered as a whole or not at all. A cancellation of a psycopg pipeline may
        leave pipeline mode on, and on the server a part of what was to be one transaction (J15).
        """

        async def run() -> list[tuple[Any, ...]]:
            statement = self.written(connection, name, params)
            statements = [self.queries["begin"], statement, *self.standby, b"COMMIT"]
            return loaded(connection, (await connection.simple(b"; ".join(statements)))[1])

        return await self._done(connection, run)

    async def _done(self, connection: PoolSession, act: Callable[[], Awaitable[T]]) -> T:
        """The result of `act`. If a changed session may be why it fails, it is repeated after a reset (J25)."""
        try:
            try:
                return await act()
            except psycopg.Error as error:
                if not may_be_changed(connection, error):
                    raise
            await self.reset(connection)
            return await act()
        except psycopg.Error as error:
            raise cause_of(connection, error) from error

    def written(self, connection: PoolSession, name: str, params: Mapping[str, object]) -> bytes:
        """A statement as it is sent on this connection."""
        return written(self.queries[name], params, connection)

    @property
    def standby(self) -> list[bytes]:
        """Statements that refuse a COMMIT which waits for no synchronous standby, if one is required (R22)."""
        return [self.queries["standby"]] if self.require_standby else []


class Unlogged:
    """Why the delivery log cannot be written; logged once."""

    def __init__(self) -> None:
        self._problem: str | None = None

    def heard(self, problem: str | None) -> None:
        """None: it was written."""
        if problem is not None and self._problem is None:
            log.warning("the delivery log cannot be written, messages run without it", error=problem)
        elif problem is None and self._problem is not None:
            log.info("the delivery log is written again")
        self._problem = problem


def cause_of(connection: Connection, error: psycopg.Error) -> Exception:
    """The exception for an error in a small transaction of our own."""
    if error.sqlstate == NOT_DURABLE:
        return ConfigurationError(not_durable(error))
    cause = translate(connection, error, ours=True)
    return StoreUnavailable(str(cause)) if isinstance(cause, Contention) else cause
