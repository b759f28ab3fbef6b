"""The checkout of a transaction's connection by one handler after another, and the reset of its session in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar
from weakref import ref

import psycopg
from psycopg import pq

from idemconsumer.errors import GuardViolated, HandlerFault, RunEagerly, StoreUnavailable
from idemconsumer.sql.answering import PATIENCE
from idemconsumer.stores.ahead import is_outdated
from idemconsumer.stores.lent import LentConnection
from idemconsumer.stores.session import PoolSession
from idemconsumer.stores.statements import Effect, special, text_of
from idemconsumer.user_code.leftovers import begin_run, left_running, name_of

T = TypeVar("T")

_REWRITTEN: Final = {Effect.ALL_IMMEDIATE: "all_immediate", Effect.RESET_ALL: "reset_all"}
_LEFT_OPEN: Final = (
    "the handler left a stream(), COPY or pipeline open, so nothing is committed; open COPY and pipelines with async "
    "with, and read a stream() to its end; for fewer rows use LIMIT, or a cursor on the server, cursor('name')"
)
_LATE: Final = 0.2  # seconds for the answers to a handler's pipelined statements, once its time is over
_CANCEL_EVERY: Final = 0.2  # seconds
_STOP_SECONDS: Final = 5.0  # for the server to end a statement; psycopg allows it as long


class _OwnWords(bytes):
    """A statement of the engine. Sent through `tx`, it also reaches the lent connection's cursor, which checks
    again."""


class Lending:
    """The access that a transaction's handlers have to its connection.

    It holds weak references to the objects given to a handler: one that is alive after the handler has returned is
    still held by other code. `changed`: the session may not be as it was. `passing`: the transaction's settings may not
    be as its other messages must have them. `lasting`: and cannot be restored. `write` gives a statement of the engine
    by name.
    """

    def __init__(self, connection: PoolSession, write: Callable[[str], bytes]) -> None:
        self.connection = connection
        connection.ahead.begin()
        connection.statements.begin()
        self.loop = asyncio.get_running_loop()
        self.changed = self.passing = self.lasting = self._eager = False
        self.runs = 0  # of handlers that had a tx
        self._unread: int | None = None  # `ahead.reads` at the start of the run, if earlier answers were still unread
        self._spoiled: str | None = None
        self._write = write
        self._run = begin_run()
        self._tx: ref[Any] | None = None
        self._lent: ref[LentConnection] | None = None
        self._shared: tuple[Any, ...] | None = None  # settings of the connection before a handler could change them

    def to(self, tx: Any, *, eager: bool) -> None:
        """The next handler gets `tx`. `eager`: all of its statements are waited for."""
        ahead = self.connection.ahead
        self._unread = ahead.reads if ahead.on else None
        self._tx = ref(tx)
        self._eager = eager
        self.runs += 1

    def lend(self) -> LentConnection:
        connection, pgconn = self.connection, self.connection.pgconn
        handlers = pgconn.notice_handler, pgconn.notify_handler
        self._shared = *handlers, connection.prepare_threshold, connection.prepared_max
        connection.statements.prepare(by_itself=False)
        lent = LentConnection(connection, self.rewritten, self.blamed)
        self._lent = ref(lent)
        return lent

    def rewritten(self, query: Any) -> Any:
        """The statement to send in place of `query`."""
        if isinstance(query, _OwnWords):
            return query
        lent = _alive(self._lent)
        known = special(text_of(query, self.connection if lent is None else lent))
        if known is not None and known.effect is Effect.NOT_ALONE:
            raise HandlerFault(known.reason)
        self.lasting |= known is not None and known.lasting
        if self.connection.again and known is not None and known.effect is Effect.RESET_ALL:
            self.changed = True  # R18: RESET ALL undoes what the pooler has set in its session for us
        name = None if known is None else _REWRITTEN.get(known.effect)
        return query if name is None else _OwnWords(self._write(name))

    def blamed(self, error: psycopg.Error) -> BaseException:
        """The exception to raise where a statement of the handler fails with `error`: that error, or one that ends its
        run, if the engine is to blame (J28)."""
        if self._eager or not is_outdated(error):
            return error
        return self.connection.ahead.end_run(RunEagerly(self.runs - 1, error))

    def spoil(self, reason: str) -> None:
        """Nothing of this transaction may be committed any more, however its handler reacts."""
        self._spoiled = reason

    def check(self, *, look: bool = False) -> None:
        """See `user_code.call.OpenTransaction`."""
        ahead = self.connection.ahead
        if ahead.signal is not None:
            raise ahead.signal  # the function swallowed it
        # If the loss of the session is first noticed in `restore`, which is the engine's, it counts as no message's.
        if look or self.changed or self.passing:
            self.connection.look()
        if self.connection.closed:
            raise StoreUnavailable("the connection broke while the handler ran")
        status = self.connection.info.transaction_status
        if ahead.on:  # pipelined statements have not ended the transaction; whether they failed shows later (J26)
            status = pq.TransactionStatus.INTRANS
        if status == pq.TransactionStatus.ACTIVE:
            self._check_given_back()  # its error names the task
        if status == pq.TransactionStatus.INERROR:
            raise HandlerFault(
                "the handler swallowed a database error, so its transaction can only roll back; "
                "let the error pass, or put the statement that may fail between SAVEPOINT and ROLLBACK TO"
            )
        if status != pq.TransactionStatus.INTRANS:
            raise GuardViolated("the handler ended the transaction it ran in, or left a statement running")
        self._check_given_back()

    async def settled(self, *, late: bool) -> None:
        """See `user_code.call.OpenTransaction`."""
        connection, ahead = self.connection, self.connection.ahead
        shared = self._unread is not None and ahead.reads > self._unread
        if ahead.on and connection.lock.locked():  # a task of the function waits for the answers, and may send more
            ahead.end_run(RunEagerly(self.runs - 1, HandlerFault("it failed before all was answered")))
        elif ahead.on:
            await self.answered(_LATE if late else ahead.seconds)
        ahead.check()  # a cancelled wait has read the answers and raised none of their errors
        if late and shared:
            ahead.end_run(RunEagerly(self.runs - 1, TimeoutError("it waited for other messages, too")))
        if ahead.signal is not None:
            raise ahead.signal

    async def answered(self, seconds: float | None) -> None:
        """Wait for the answers to pipelined statements."""
        with suppress(TimeoutError):  # the statement that took so long was cancelled at the server, and has failed
            async with asyncio.timeout(seconds):
                await self.connection.answered()

    def _check_given_back(self) -> None:
        """The handler has returned. Raises HandlerFault if its transaction was spoiled (J23), if a task that it left
        behind still has its tx (J19), or if something that it left open keeps the connection's lock (J18)."""
        if self._spoiled is not None:
            raise HandlerFault(self._spoiled)
        if (self._tx is None or self._tx() is None) and self._lent is None:
            return
        tx, lent = _alive(self._tx), _alive(self._lent)
        piping = self.connection.pgconn.pipeline_status != pq.PipelineStatus.OFF and not self.connection.ahead.on
        if tx is None and lent is None and not (self.connection.lock.locked() or piping):
            return
        sending = (tx is not None and tx.sending) or (lent is not None and lent.waiting)
        task = left_running(self._run, tx, lent)
        if task is not None or sending:
            raise HandlerFault(
                f"the handler returned while {'a task' if task is None else f'its task {name_of(task)}'} was still "
                "using tx, so nothing is committed; await every task that uses tx before the handler returns, as "
                "asyncio.TaskGroup does"
            )
        if self.connection.lock.locked() or piping:
            raise HandlerFault(_LEFT_OPEN)

    def end(self) -> None:
        """The objects that the handler was given are unusable from now on."""
        if self._tx is None:
            return
        tx, lent = self._tx(), _alive(self._lent)
        if tx is not None:
            tx.end()
        if lent is not None:
            lent.end()
        if self._shared is not None:
            connection, pgconn = self.connection, self.connection.pgconn
            pgconn.notice_handler, pgconn.notify_handler, *preparing = self._shared
            connection.prepare_threshold, connection.prepared_max = preparing
        self._tx = self._lent = self._shared = None

    async def abandon(self) -> None:
        """The transaction failed. If a handler may have changed its session, or still uses it, the connection is rolled
        back and closed. Statements that wait for its lock are not sent any more.

        psycopg's stream() and COPY hold the lock while no statement runs, and the code that left them open may never
        release it. Then the lock is not waited for: closing the connection ends the transaction too (J18).
        """
        tx, lent = _alive(self._tx), _alive(self._lent)
        self.end()
        connection = self.connection
        await self._forget_what_was_sent()

        def working() -> bool:
            return (tx is not None and tx.sending > 0) or (lent is not None and lent.waiting > 0)

        if connection.closed or not (self.changed or working()):
            return
        connection.barred = True
        try:
            await self._stop(working)
            connection.barred = False
            if not connection.lock.locked():
                with suppress(psycopg.Error):
                    await self._roll_back()
        finally:
            await connection.close()

    async def _forget_what_was_sent(self) -> None:
        """A pipelined statement may wait for a lock, and then delays the rollback: it is cancelled if it takes long."""
        connection = self.connection
        connection.ahead.abandoned = True
        if connection.ahead.on and not connection.closed and not connection.lock.locked():
            with suppress(psycopg.Error, TimeoutError):
                async with asyncio.timeout(_CANCEL_EVERY):  # at the timeout the server is told to cancel it
                    await connection.answered()

    async def _roll_back(self) -> None:
        self.connection.patience = min(self.connection.patience, PATIENCE)  # R20: the handler's long timeout is over
        if not self.connection.pooled:
            await self.connection.rollback()
            return
        # R18: the pooler gives the session to another client, and closes one whose transaction is still open.
        await self.connection.simple(b"rollback; " + self._write("reset_session") + self.connection.again)

    async def _stop(self, working: Callable[[], bool]) -> None:
        """Cancel the running statement, which would outlive its connection with its lock on the key. The server ignores
        a cancel request for a statement that it has not begun to read yet, so a second one may follow."""
        until, again = self.loop.time() + _STOP_SECONDS, 0.0
        while (now := self.loop.time()) < until:
            if now >= again and self.connection.info.transaction_status == pq.TransactionStatus.ACTIVE:
                with suppress(psycopg.Error):
                    await self.connection.cancel_safe(timeout=until - now)
                again = self.loop.time() + _CANCEL_EVERY
            if not working():
                break
            await asyncio.sleep(0.001)
        if working() or self.connection.lock.locked():
            self.connection.cut()
            await asyncio.sleep(0)


def _alive(given: ref[T] | None) -> T | None:
    return None if given is None else given()
