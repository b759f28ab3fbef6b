"""The queue in Postgres: `postgres:name`, built in, needs nothing but the database.

A delivery is a row made invisible until a deadline, which the session moves on while the delivery is held. Each
delivery carries a token of its own, so that settling an expired one changes nothing. NOTIFY only wakes a fetch early;
without it the queue is read once a second (P5).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import psycopg
import structlog

from idemconsumer.errors import BrokerUnavailable, ConfigurationError, SessionEnded
from idemconsumer.message.headers import decode_headers, encode_headers
from idemconsumer.message.message import Message, Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Finding, Outgoing
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings
from idemconsumer.sql.connecting import OwnCursor, own_session
from idemconsumer.sql.queries import load, misconfigured

log = structlog.get_logger("idemconsumer")
Connection = psycopg.AsyncConnection[Any]

VISIBILITY: Final = 10.0  # seconds until what a dead worker held is delivered again
_IDLE_SECONDS: Final = 1.0
_TIMEOUT: Final = 10.0  # of any single statement of the session
_CHANNEL: Final = "idemconsumer_queue"


async def enqueue(connection: Connection, schema: str, name: str, messages: Sequence[Outgoing]) -> None:
    """Insert into the queue on this connection, in whatever transaction is open there (P6)."""
    query = load(schema)["enqueue"]
    # A pipeline in a transaction that stays open disarms its idle time-out; publish(tx=) sends one message.
    async with connection.pipeline() if len(messages) > 1 else contextlib.nullcontext():
        for message in messages:
            headers = encode_headers(message.headers).decode()
            await OwnCursor(connection).execute(
                query, {"name": name, "body": message.body, "key": message.key, "headers": headers}
            )


class PostgresBroker:
    hands_over = False

    def __init__(self, settings: Settings) -> None:
        if settings.dsn is None:
            raise ConfigurationError("postgres: no database is given; set IDEMCONSUMER_DSN")
        self._dsn = settings.dsn
        self._schema = settings.schema

    def feed(self, subscription: Subscription) -> str:
        return subscription.source

    async def _connect(self) -> Connection:
        # enable_seqscan: a plan cached while the queue was empty must not scan it when it is full (G5).
        settings = {"enable_seqscan": "off", "statement_timeout": f"{int(_TIMEOUT * 1000)}", "lock_timeout": "5s"}
        try:
            return await psycopg.AsyncConnection.connect(
                **own_session(self._dsn, settings), connect_timeout=5, application_name="idemconsumer-queue"
            )
        except psycopg.Error as error:
            raise BrokerUnavailable(f"postgres queue: no connection to the database: {error_text(error)}") from error

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> PostgresSession:
        (subscription,) = subscriptions
        connection, listener = await self._connect(), await self._connect()
        session = PostgresSession(subscription.name, connection, listener, self._schema, bounds)
        try:
            await session.start()
        except psycopg.Error as error:
            await session.close()
            raise BrokerUnavailable(f"{subscription.source}: {error_text(error)}") from error
        return session

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        connection = await self._connect()
        try:
            async with connection, connection.transaction():
                await enqueue(connection, self._schema, name, messages)
        except psycopg.Error as error:
            if (cause := misconfigured(error, self._schema)) is not None:
                raise cause from error
            raise BrokerUnavailable(f"postgres:{name}: could not publish: {error_text(error)}") from error

    async def check(self, subscription: Subscription) -> list[Finding]:
        try:
            connection = await self._connect()
            async with connection:
                cursor = await connection.execute(load(self._schema)["waiting"], {"name": subscription.name})
                (waiting,) = await cursor.fetchone() or (0,)
        except (BrokerUnavailable, psycopg.Error) as error:
            cause = misconfigured(error, self._schema) if isinstance(error, psycopg.Error) else None
            return [Finding("error", subscription.source, error_text(cause or error))]
        return [Finding("ok", subscription.source, f"queue readable, {waiting} waiting")]

    async def close(self) -> None:
        return


class PostgresSession:
    """Two connections: one for statements, one that listens."""

    def __init__(self, name: str, connection: Connection, listener: Connection, schema: str, bounds: Bounds) -> None:
        self._name = name
        self._connection = connection
        self._listener = listener
        self._queries = load(schema)
        self._bounds = bounds
        self._epoch = Epoch()
        self._held: dict[int, int] = {}  # what is outstanding: delivery tokens by id
        self._freed = asyncio.Event()
        self._arrived = asyncio.Event()
        self._stopped = False
        self._taking = asyncio.Lock()
        self._lost: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._listener.execute(f"listen {_CHANNEL}")
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._keep_visible())]

    async def fetch(self) -> Sequence[Delivery]:
        self._raise_if_over()
        limit = self._room()
        if self._stopped or limit <= 0:
            limit = await self._wait_for_room()
        if limit <= 0:
            return []
        self._arrived.clear()
        async with self._taking:
            rows = await self._do("take", {"name": self._name, "limit": limit, "visibility": VISIBILITY})
            if rows and self._stopped:  # a drain began meanwhile
                await self._do("give_back", _handles((row[0], row[1]) for row in rows))
                return []
        if not rows:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._arrived.wait()
            self._raise_if_over()
            return []
        return [self._delivery(*row) for row in sorted(rows)]

    def _room(self) -> int:
        """Deliveries in the waiting room do not count as fetched ahead."""
        ready = len(self._held) - self._epoch.waiting
        return min(self._bounds.ahead - ready, self._bounds.in_flight - len(self._held))

    async def _wait_for_room(self) -> int:
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_SECONDS):
                await self._freed.wait()
        self._raise_if_over()
        return 0 if self._stopped else self._room()

    def _delivery(
        self, number: int, delivery_token: int, deliveries: int, message_id: str | None, body: bytes, headers: bytes
    ) -> Delivery:
        self._held[number] = delivery_token
        message = Message(
            source=f"postgres:{self._name}",
            body=body,
            headers=decode_headers(headers),
            message_id=message_id,
            position=f"{self._name}#{number}",
        )
        return Delivery(message, self._epoch, handle=(number, delivery_token), suspect=deliveries > 1, count=deliveries)

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        await self._dismiss("finish", deliveries)

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        await self._dismiss("give_back", deliveries)

    async def _dismiss(self, query: str, deliveries: Sequence[Delivery]) -> None:
        handles = [delivery.handle for delivery in deliveries if not delivery.epoch.ended]
        for number, delivery_token in handles:
            if self._held.get(number) == delivery_token:
                del self._held[number]
        self._freed.set()
        if handles:
            with contextlib.suppress(SessionEnded):
                await self._do(query, _handles(handles))

    async def idle(self) -> bool:
        rows = await self._do("waiting", {"name": self._name})
        return bool(rows[0][0] <= len(self._held))

    async def stop_fetching(self) -> None:
        self._stopped = True
        self._freed.set()
        self._arrived.set()

    async def close(self) -> None:
        self._stopped = True
        # What a take under way still brings would otherwise stay invisible until its deadline.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2), self._taking:
                pass
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in (self._connection, self._listener):
            with contextlib.suppress(psycopg.Error, TimeoutError):
                async with asyncio.timeout(2):
                    await connection.close()

    # --------------------------------------------------------------------------------------------------- the connection
    async def _do(self, query: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        try:
            async with asyncio.timeout(_TIMEOUT + 2):
                cursor = await self._connection.execute(self._queries[query], params)
                return await cursor.fetchall() if cursor.description else []
        except (psycopg.Error, TimeoutError) as error:
            self._end(error_text(error) or "no answer from the database")
            raise SessionEnded(f"postgres:{self._name}: {self._lost}") from error

    def _end(self, why: str) -> None:
        self._lost = self._lost or why
        self._epoch.end()
        self._freed.set()
        self._arrived.set()

    def _raise_if_over(self) -> None:
        if self._lost is not None:
            raise SessionEnded(f"postgres:{self._name}: {self._lost}")

    async def _listen(self) -> None:
        try:
            async for notice in self._listener.notifies():
                if notice.payload == self._name:
                    self._arrived.set()
            self._end("the listening connection ended")
        except psycopg.Error as error:
            self._end(error_text(error))

    async def _keep_visible(self) -> None:
        """Move the deadline of everything outstanding, three times per visibility timeout (P3)."""
        with contextlib.suppress(SessionEnded):
            while True:
                await asyncio.sleep(VISIBILITY / 3)
                if self._held:
                    await self._do("extend", _handles(self._held.items()) | {"visibility": VISIBILITY})


def _handles(handles: Iterable[tuple[int, int]]) -> dict[str, Any]:
    ids, delivery_tokens = zip(*handles, strict=True)
    return {"ids": list(ids), "delivery_tokens": list(delivery_tokens)}
