"""The built-in queue `postgres:name`, which needs only the database. Consuming is in `postgres_session`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import psycopg

from idemconsumer.brokers.postgres_session import CONTROL, OUTBOX, SAGA, TIMEOUT, PostgresSession, sources
from idemconsumer.brokers.publishers import Publishers
from idemconsumer.errors import BrokerUnavailable, ConfigurationError, SessionEnded, StoreUnavailable
from idemconsumer.message.headers import encode_headers
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Finding, Outgoing
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings
from idemconsumer.sql.answering import AnsweringConnection
from idemconsumer.sql.connecting import OwnCursor, connect_async, is_pooled
from idemconsumer.sql.queries import load, misconfigured

Connection = psycopg.AsyncConnection[Any]
_Answering = AnsweringConnection[Any]

_PATIENCE: Final = TIMEOUT + 2.0  # seconds to wait for an answer: longer than the server's own statement timeout (R20)


async def enqueue(connection: Connection, schema: str, name: str, messages: Sequence[Outgoing]) -> None:
    """Insert the messages on this connection, in the transaction that is open there, if any (P6)."""
    # A pipeline in an open transaction disables its idle timeout; publish(tx=) sends one message, so needs no pipeline.
    async with connection.pipeline() if len(messages) > 1 else contextlib.nullcontext():
        await _insert(connection, schema, name, messages)


async def _insert(connection: Connection, schema: str, name: str, messages: Sequence[Outgoing]) -> None:
    for message in messages:
        await OwnCursor(connection).execute(*enqueuing(schema, name, message))


def enqueuing(schema: str, name: str, message: Outgoing) -> tuple[bytes, dict[str, Any]]:
    """The statement that inserts the message, and its parameters."""
    headers = encode_headers(message.headers).decode()
    given = {"name": name, "body": message.body, "key": message.key, "headers": headers}
    if message.delay:
        return load(schema)["enqueue_later"], given | {"delay": message.delay}
    return load(schema)["enqueue"], given


class PostgresBroker:
    """See `ports.Broker`. Its queues are in the same database as the records, so the process uses the connection of its
    session for other short statements too (O13)."""

    hands_over = False

    def __init__(self, settings: Settings) -> None:
        if settings.dsn is None:
            raise ConfigurationError("postgres: no database is given; set IDEMCONSUMER_DSN")
        self._dsn = settings.dsn
        self._listen_dsn = settings.listen_dsn
        self._schema = settings.schema
        self._publishers = Publishers(lambda: self._connect(self._dsn))
        self._sessions: set[PostgresSession] = set()
        self._lost: list[PostgresSession] = []  # ended sessions whose last queries are still to be run (P8)
        self._tell: dict[str, Callable[[str], None]] = {}  # by the prefix of a notification that names no queue

    def wake_sagas_by(self, wake: Callable[[], None]) -> None:
        """See `ports.BesideSagas`."""
        self._tell[SAGA] = lambda _: wake()

    def tell(self, told: Callable[[], None]) -> None:
        """`told` is called when somebody has decided about handlers or workers. Call this before a session is opened.
        Nothing may depend on the calls: some sessions receive no notifications."""
        self._tell[CONTROL] = lambda _: told()

    def relay_by(self, wake: Callable[[str], None]) -> None:
        """`wake` is called with a destination to which something can be relayed, or with "" if that is not known (X8).
        The conditions of `tell` apply."""
        self._tell[OUTBOX] = wake

    async def ask(self, statement: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The rows of a short statement, given by its name. Raises StoreUnavailable, also while no session is open. A
        failure does not end the session."""
        for session in self._sessions:
            return await session.ask(statement, params)
        raise StoreUnavailable("no session of the Postgres queue is open")

    @property
    def queues(self) -> Sequence[str]:
        """See `ports.BesideSagas`."""
        return [name for session in self._sessions if session.readable for name in session.queues]

    def looked(self, found: Mapping[str, float]) -> None:
        """See `ports.BesideSagas`."""
        for session in self._sessions:
            if session.readable:
                session.looked(found)

    def held_up(self) -> None:
        """See `ports.BesideSagas`."""
        for session in self._sessions:
            session.held_up()

    def feed(self, subscription: Subscription) -> str:
        """All queues of a process share one session, and so two connections."""
        return "postgres"

    async def _connect(self, dsn: str) -> _Answering:
        # enable_seqscan: a plan that was cached while the queue was empty must not scan it when it is full (G5).
        settings = {"enable_seqscan": "off", "statement_timeout": f"{int(TIMEOUT * 1000)}", "lock_timeout": "5s"}
        made = asyncio.ensure_future(connect_async(dsn, settings, connect_timeout=5, purpose="queue"))
        try:
            connection = await asyncio.shield(made)
        except asyncio.CancelledError:
            # psycopg leaves a half-opened connection open, and the server would wait a minute for its authentication.
            with contextlib.suppress(psycopg.Error):
                await (await made).close()
            raise
        except psycopg.Error as error:
            raise BrokerUnavailable(f"postgres queue: no connection to the database: {error_text(error)}") from error
        connection.patience = _PATIENCE
        return connection

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> PostgresSession:
        connection = await self._connect(self._dsn)
        session = PostgresSession(subscriptions, connection, self._schema, bounds, self._tell, self._closed)
        try:
            pooled = await is_pooled(connection)
            listens = self._listen_dsn is not None or not pooled
            await session.start(self._listener if listens else None, pooled=pooled)
            while self._lost:
                await session.pay(self._lost[-1].owed)
                self._lost.pop()
        except (psycopg.Error, SessionEnded) as error:
            await session.close()
            named = isinstance(error, SessionEnded)  # the text of SessionEnded names the queues already
            of = "" if named else f"{sources(each.name for each in subscriptions)}: "
            raise BrokerUnavailable(f"{of}{error_text(error)}") from error
        except BaseException:
            await session.close()
            raise
        self._sessions.add(session)
        return session

    def _closed(self, session: PostgresSession) -> None:
        self._sessions.discard(session)
        if session.owed:
            self._lost.append(session)

    async def _listener(self) -> _Answering:
        """A connection that can listen. Never through a pooler, which may give the session of a LISTEN to another
        client (R18)."""
        listener = await self._connect(self._listen_dsn or self._dsn)
        if self._listen_dsn is not None and await is_pooled(listener):
            await listener.close()
            raise ConfigurationError(
                "postgres queue: `listen_dsn` leads to a pooler, which does not forward notifications; "
                "write the server's own address, or remove it: the queue is then polled"
            )
        return listener

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        try:
            async with self._publishers.one() as connection, connection.pipeline():
                await OwnCursor(connection).execute(load(self._schema)["begin"])
                await _insert(connection, self._schema, name, messages)
                await OwnCursor(connection).execute("COMMIT")
        except psycopg.Error as error:
            cause = misconfigured(error, self._schema)
            if isinstance(cause, ConfigurationError):
                raise cause from error
            raise BrokerUnavailable(f"postgres:{name}: could not publish: {error_text(cause or error)}") from error

    async def check_destination(self, name: str) -> None:
        """Connect only: any name can be published to."""
        await (await self._connect(self._dsn)).close()

    async def check(self, subscription: Subscription) -> list[Finding]:
        try:
            connection = await self._connect(self._dsn)
            async with connection:
                cursor = await connection.execute(load(self._schema)["waiting"], {"names": [subscription.name]})
                waiting, later = await cursor.fetchone() or (0, 0)
                listens = self._listen_dsn is not None or not await is_pooled(connection)
                if listens:
                    await (await self._listener()).close()
        except (BrokerUnavailable, ConfigurationError, psycopg.Error) as error:
            cause = misconfigured(error, self._schema) if isinstance(error, psycopg.Error) else None
            return [Finding("error", subscription.source, error_text(cause or error))]
        polled = ", polled once a second: a pooler does not forward notifications" if not listens else ""
        delayed = f", {later} not due yet" if later else ""
        return [Finding("ok", subscription.source, f"queue readable, {waiting} waiting{delayed}{polled}")]

    async def close(self) -> None:
        return
