"""A SQLAlchemy session on a handler's own transaction: `pip install 'idemconsumer[sqlalchemy]'`.

SQLAlchemy expects a connection of its own, on which it begins and ends transactions. It gets `tx.connection` wrapped so
that it cannot end the transaction (J23): savepoints and statements pass, COMMIT is refused, and a full rollback is not
sent but prevents the engine from committing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NoReturn, cast

from psycopg.rows import tuple_row

from idemconsumer.errors import HandlerFault
from idemconsumer.handlers.arguments import Tx
from idemconsumer.missing import cannot_import
from idemconsumer.stores.tx import PostgresTx
from idemconsumer.user_code.leftovers import Everybodys

try:
    import greenlet  # noqa: F401 - without it SQLAlchemy fails at the first statement
    from sqlalchemy import Connection, Engine, NullPool, make_url, util
    from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg
    from sqlalchemy.exc import IllegalStateChangeError
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session
except ImportError as error:
    raise cannot_import("idemconsumer.sqlalchemy: SQLAlchemy 2 with asyncio", error) from error

__all__ = ["session"]

_URL: Final = make_url("postgresql+psycopg://")
_COMMIT: Final = (
    "a handler must not commit: the engine commits its writes together with the message's record; leave commit() out "
    "(what is pending is flushed at the end of the block), and use begin_nested() instead of begin()"
)
_ROLLBACK: Final = (
    "a handler must not roll back the transaction of its message; raise Reject or Retry to undo it all, or use "
    "begin_nested() for a part of it"
)
_GIVEN_UP: Final = (
    "the SQLAlchemy session failed or was closed before the end of its block, so its changes are lost, and "
    "the message's transaction can only roll back; let the error pass, or put what may fail into begin_nested()"
)
_OVER: Final = "the SQLAlchemy session was used after its block had ended; use it inside of `async with session(tx)`"


@asynccontextmanager
async def session(tx: Tx) -> AsyncIterator[AsyncSession]:
    """Open an AsyncSession in the handler's own transaction: `async with session(tx) as db:`.

    Everything that it writes is committed together with the message's record, or not at all. Pending objects are
    flushed at the end of the block. `begin_nested()` is a savepoint. `commit()` and `rollback()` raise HandlerFault:
    the engine commits, and Reject or Retry undo the message. An error that leaves the block, or a flush that fails
    outside of begin_nested(), undoes the message too, even if the handler catches it. After the block, after the
    handler has ended and in another event loop, using the session raises HandlerFault. Objects keep the values that
    they had loaded.

    This takes `tx.connection`, so the same rules hold: the connection's session is reset after the handler, and closed
    if the handler fails. Not covered: an engine of your own, whose commits are another transaction.
    """
    given = _Given(cast(PostgresTx, tx))
    engine = await _engine(given)
    db = AsyncSession(engine, sync_session_class=_Session, given=given)
    try:
        yield db
        await db.flush()
        given.check()
    except BaseException:
        given.give_up()
        raise
    finally:
        given.end()
        with suppress(IllegalStateChangeError):  # a task still uses it; the engine reports that task (J19)
            await db.close()


class _Given:
    """`tx.connection` as SQLAlchemy's dialect sees it. Nothing that ends the transaction reaches the server (J23)."""

    def __init__(self, tx: PostgresTx) -> None:
        self._tx = tx
        self._connection = tx.connection
        self._over = False
        self._given_up = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def check(self) -> None:
        """Raise HandlerFault unless the session may be used, here and now."""
        self._tx.check()
        if self._over:
            raise HandlerFault(_OVER)
        if self._given_up:
            raise HandlerFault(_GIVEN_UP)

    def cursor(self, name: str = "") -> Any:
        self.check()
        return self._connection.cursor(name, row_factory=tuple_row)  # the handler may have set another row factory

    async def commit(self) -> NoReturn:
        raise HandlerFault(_COMMIT)

    async def rollback(self) -> None:
        self.give_up()

    async def close(self) -> None:
        self.give_up()

    def give_up(self) -> None:
        """SQLAlchemy takes for undone what the server has not undone, so the transaction must never be committed."""
        if not self._over:
            self._given_up = True
            self._tx.spoil(_GIVEN_UP)

    def end(self) -> None:
        self._over = True


class _Session(Session):
    """Refuses a forbidden use at once, instead of in the middle of a flush."""

    def __init__(self, *arguments: Any, given: _Given, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._given = given

    def get_bind(self, *arguments: Any, **more: Any) -> Engine | Connection:
        self._given.check()
        return super().get_bind(*arguments, **more)

    def commit(self) -> NoReturn:
        raise HandlerFault(_COMMIT)

    def rollback(self) -> NoReturn:
        self._given.give_up()
        raise HandlerFault(_ROLLBACK)


class _Dialect(PGDialectAsync_psycopg, Everybodys):
    """The driver's dialect, with everything that SQLAlchemy learns about types."""

    supports_statement_cache = True  # each dialect must set this itself; without it no compiled statement is cached


_DIALECT: Final[Any] = _Dialect  # untyped


class _Compiled(util.LRUCache[Any, Any], Everybodys):
    """The cache of compiled statements."""


class _Known:
    """What SQLAlchemy knows of a server and has compiled for it: too slow to learn again for each message."""

    def __init__(self) -> None:
        # hstore is parsed from its text, since the driver's way must be registered again for each connection.
        self.dialect = _DIALECT(dbapi=_DIALECT.import_dbapi(), use_native_hstore=False)
        self.compiled: Any = _Compiled(500)

    def engine(self, given: _Given) -> AsyncEngine:
        """An engine whose only connection is the handler's."""

        async def give(**_: Any) -> _Given:
            return given

        pool = NullPool(lambda: self.dialect.connect(async_creator_fn=give), dialect=self.dialect, reset_on_return=None)
        options = {"compiled_cache": self.compiled}
        return AsyncEngine(Engine(pool, self.dialect, _URL, execution_options=options, hide_parameters=True))


_KNOWN: Final[dict[tuple[str, int, str, int], _Known]] = {}


async def _engine(given: _Given) -> AsyncEngine:
    info = given.info
    server = (info.host, info.port, info.dbname, info.server_version)
    if (known := _KNOWN.get(server)) is None:
        known = _Known()
        asking = _Given(given._tx)
        async with known.engine(asking).connect() as connection:
            await connection.run_sync(known.dialect.initialize)
            asking.end()
        _KNOWN[server] = known
    return known.engine(given)
