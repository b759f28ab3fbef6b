"""`tx.connection`: the store's connection for one run of a handler, and invalid afterwards (J18).

It is a psycopg connection of its own, so that psycopg and other libraries can do with it whatever they do with one: its
adapters, row factory, cursor class and transactions are its own, and end with it. It shares with the store's connection
what belongs to the session: libpq's connection, the lock, the names of prepared statements. psycopg sends everything
through `wait`, so what is refused there never reaches a server, also from a cursor, COPY, pipeline or transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar, cast

import psycopg
from psycopg import pq
from psycopg._preparing import PrepareManager
from psycopg.adapt import AdaptersMap
from psycopg.pq.abc import PGconn, PGresult

from idemconsumer.errors import HandlerFault
from idemconsumer.sql.answering import Exchange
from idemconsumer.stores.connection import nothing
from idemconsumer.stores.session import PoolSession

RV = TypeVar("RV")

_INTERVAL: Final = 0.1  # psycopg's own default
_ENDED: Final = (
    "the handler ended the transaction it ran in, so nothing more is sent; "
    "leave COMMIT and ROLLBACK to the engine, and use tx.connection.transaction() for a savepoint"
)
OVER: Final = (
    "{} was used after its handler returned or failed, when its transaction may be over; "
    "await everything that uses it before the handler returns"
)


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse use from another thread or event loop, where the answer would never be seen (J20)."""
    if asyncio.get_running_loop() is not loop:
        raise HandlerFault(
            "tx was used outside its handler's event loop; use it in the handler, and pass a thread plain values, or "
            "have it call asyncio.run_coroutine_threadsafe with the handler's loop"
        )


class LentConnection(psycopg.AsyncConnection[Any]):
    """Valid until `end`."""

    def __init__(
        self, lender: PoolSession, rewrite: Callable[[Any], Any], blame: Callable[[psycopg.Error], BaseException]
    ) -> None:
        self._over = False
        self._loop = asyncio.get_running_loop()
        of_lender = lender.pgconn.notice_handler
        super().__init__(lender.pgconn)
        own = self._pgconn.notice_handler

        def both(notice: PGresult) -> None:
            for handler in (of_lender, own):
                if handler is not None:
                    handler(notice)

        self._pgconn.notice_handler = both  # a notice may tell the lender that another session crashed (B13)
        self.lock = lender.lock
        self.cursor_factory = LentCursor
        self.server_cursor_factory = LentServerCursor
        self.rewrite = rewrite
        self.waiting = 0  # exchanges in progress
        self._lender = lender
        self._blame = blame
        self._autocommit = lender.autocommit

    def end(self) -> None:
        """Each later use raises HandlerFault."""
        self._over = True

    def _check(self) -> None:
        if self._over:
            raise HandlerFault(OVER.format("tx.connection"))
        check_loop(self._loop)

    async def wait(self, gen: Exchange[RV], interval: float = _INTERVAL, timeout: float | None = None) -> RV:
        """See `psycopg.AsyncConnection.wait`."""
        self._check()
        if self._lender.pgconn.transaction_status == pq.TransactionStatus.IDLE:
            raise HandlerFault(_ENDED)  # J8; and behind a pooler the session belongs to another client by now (R18)
        self.waiting += 1
        try:
            return await self._lender.wait(gen, interval, timeout)
        except psycopg.Error as error:
            if self._over:
                raise HandlerFault(OVER.format("tx.connection")) from error
            if (blamed := self._blame(error)) is not error:
                raise blamed from error
            raise
        finally:
            self.waiting -= 1

    async def answered(self) -> None:
        """Wait for the answers to pipelined statements (J26): psycopg refuses some calls in pipeline mode, and checks
        that before it waits."""
        if self._lender.ahead.on:
            async with self.lock:
                await self.wait(nothing())

    @property
    def pgconn(self) -> PGconn:
        self._check()
        return self._pgconn

    @pgconn.setter
    def pgconn(self, pgconn: PGconn) -> None:
        self._pgconn = pgconn

    @property
    def _prepared(self) -> PrepareManager:  # prepare_threshold and prepared_max use it too
        self._check()
        return self._lender._prepared

    @_prepared.setter
    def _prepared(self, own: PrepareManager) -> None:
        """The names belong to the session."""

    @property
    def adapters(self) -> AdaptersMap:
        self._check()
        return super().adapters

    @asynccontextmanager
    async def pipeline(self) -> AsyncIterator[psycopg.AsyncPipeline]:
        """See `psycopg.AsyncConnection.pipeline`. After it the server counts idle time again (J22)."""
        try:
            async with super().pipeline() as pipeline:
                pipeline.__class__ = _LentPipeline
                yield pipeline
        finally:
            if self._pipeline is None and self._open():
                await self._lender.simple(b"")

    @asynccontextmanager
    async def _pipeline_nolock(self) -> AsyncIterator[psycopg.AsyncPipeline]:  # used by executemany
        try:
            async with super()._pipeline_nolock() as pipeline:
                pipeline.__class__ = _LentPipeline
                yield pipeline
        finally:
            if self._open():
                await self.wait(self._lender._simple(b""))

    def _open(self) -> bool:
        """Whether the handler's transaction is still open, and usable by it."""
        return not self._over and self._lender.pgconn.transaction_status == pq.TransactionStatus.INTRANS

    async def close(self) -> None:
        """See `psycopg.AsyncConnection.close`."""
        self._check()
        self._closed = True
        await self._lender.close()

    def __repr__(self) -> str:
        return f"<tx.connection of a handler that has ended at 0x{id(self):x}>" if self._over else super().__repr__()

    def __del__(self, *_: object) -> None:
        """Psycopg's own warns of an open connection; this one owns none."""


class _LentPipeline(psycopg.AsyncPipeline):
    def __repr__(
        self,
    ) -> str:  # psycopg logs it; its own would ask the connection for its pgconn, which raises after the run (R13)
        return f"<a pipeline of {self._conn!r}>"


class LentCursor(psycopg.AsyncCursor[Any]):
    """Replaces statements that the engine has to send in another form (`Effect`)."""

    async def execute(self, query: Any, params: Any = None, **more: Any) -> LentCursor:
        """See `psycopg.AsyncCursor.execute`."""
        if not params and (sent := cast(LentConnection, self._conn).rewrite(query)) is not query:
            query, params = sent, None  # SQLAlchemy gives no parameters as an empty dict
        return await super().execute(query, params, **more)

    async def stream(self, query: Any, params: Any = None, **more: Any) -> AsyncIterator[Any]:
        """See `psycopg.AsyncCursor.stream`."""
        await cast(LentConnection, self._conn).answered()
        async with aclosing(cast(AsyncGenerator[Any, None], super().stream(query, params, **more))) as rows:
            async for row in rows:
                yield row


class LentServerCursor(psycopg.AsyncServerCursor[Any]):
    async def execute(self, query: Any, params: Any = None, **more: Any) -> LentServerCursor:
        """See `psycopg.AsyncServerCursor.execute`."""
        await cast(LentConnection, self._conn).answered()
        return await super().execute(query, params, **more)
