"""A psycopg connection that waits for the server at less cost.

For each wait psycopg registers the socket with the event loop, together with a timer, and removes both afterwards. A
group waits once for each statement of its handlers, and that was a fifth of all client CPU. Here the socket stays
registered from the first wait until it is closed, also while the connection is in the pool. Arriving data is read in
the loop's callback, and the caller wakes up once the answer is complete. Any other wait is done as psycopg does it.

The deadline of an answer (R20) costs nothing per message: one timer for each connection checks once a second for how
long the same answer has been waited for. The timer ends when it fires while no answer is waited for.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg import generators
from psycopg.errors import CrashShutdown, QueryCanceled, error_from_result
from psycopg.pq import ConnStatus, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from idemconsumer.errors import RunEagerly
from idemconsumer.sql.answering import INTERVAL, AnsweringConnection, Exchange, cut, silence
from idemconsumer.stores.ahead import Ahead, Sent
from idemconsumer.stores.prepared import Names, PreparedStatements
from idemconsumer.user_code.cancellation import from_cancellation

RV = TypeVar("RV")

_LOOK_OUT = 1.0  # seconds between two checks for a late answer, and for an error that the loop does not report
_CANCEL_SECONDS = 5.0  # for the server to end a cancelled statement; psycopg's own limit for the cancel request
_SLOW_COMMIT = 5.0  # seconds after which a query is made for what a COMMIT waits for (R23)
_READING = int(Wait.R)  # psycopg's compiled generators yield plain numbers


class Connection(AnsweringConnection[Any]):
    """Call `unwatch` as soon as the socket is closed, which libpq may do too. A closed socket that is still
    registered would shadow the next one with its number."""

    made = 0.0  # time.monotonic()
    schema = ""  # ours
    barred = False  # no statement may be sent any more
    crashed_beside = False  # the server reported that it ends this session because another one has crashed
    _at_once = False  # the last exchange ended without a wait
    changed = False  # a handler may have changed the session: it is reset before its next use (J21)
    _arrivals: select.poll | None = None
    _watched: int | None = None
    _lookout: asyncio.TimerHandle | None = None
    _answer: Exchange[Any] | None = None
    _waiter: asyncio.Future[Any] | None = None
    _seen: asyncio.Future[Any] | None = None  # the wait at the last check; its time begins with the first check
    slow_commit: Callable[[Connection], None] | None = None  # set during COMMIT, and called when it takes long

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._prepared = Names(self.pgconn)
        self.ahead = Ahead(self.pgconn, self.heard)
        self.statements = PreparedStatements(self)
        self.add_notice_handler(self._noticed)

    @property
    def idle(self) -> bool:
        """Whether the server has answered everything, and no transaction is open. In pipeline mode libpq cannot tell:
        the server counts statements without a Sync as a transaction, libpq does not. So it is never idle then."""
        idle = self.pgconn.transaction_status == TransactionStatus.IDLE
        return idle and self.pgconn.pipeline_status == PipelineStatus.OFF

    def _noticed(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.sqlstate == CrashShutdown.sqlstate:
            self.crashed_beside = True

    async def simple(self, statements: bytes) -> list[PGresult]:
        """Send several statements as one simple query; returns their results. psycopg's cursors take twice as long."""
        await self._turn()
        try:
            return await self.wait(self._simple(statements))
        finally:
            self.lock.release()

    async def last(self, statements: Sequence[bytes]) -> list[PGresult]:
        """As `simple`, one statement each; pipelined behind those that are in flight, in the same round trip."""
        ours = [(Sent(), statement) for statement in statements]
        await self._turn()
        try:
            if not self.ahead.on:
                return await self.wait(self._simple(b"; ".join(statements)))
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as timer:
                    await self._exchange(self.ahead.answers(ours, timer))
        finally:
            self.lock.release()
        try:
            self.ahead.check()
        except psycopg.Error:
            if not timer.expired():
                raise
        if timer.expired():  # the cancel request has hit COMMIT, which then does not wait for a standby (R22)
            await self.close()
            raise psycopg.OperationalError("cancelled while it was committed, connection closed")
        results = [sent.result for sent, _ in ours if sent.result is not None]
        assert len(results) == len(ours)
        return results

    async def answered(self, own: Sent | None = None) -> None:
        """Wait for the answers to all pipelined statements. Raises RunEagerly, or the error of `own` as it is."""
        await self._turn()
        try:
            await self._answered(own)
        finally:
            self.lock.release()

    async def _answered(self, own: Sent | None = None) -> None:
        if self.ahead.on:
            try:
                await self._exchange(self.ahead.answers())
            except psycopg.Error as error:
                if self.ahead.abandoned:
                    raise
                raise self.ahead.end_run(RunEagerly(None, error)) from error
            self.ahead.check(own)

    async def rollback(self) -> None:
        """See `psycopg.AsyncConnection.rollback`."""
        await self._turn()
        try:
            await self.wait(self._rolled_back())
        finally:
            self.lock.release()

    def _rolled_back(self) -> Exchange[None]:
        """Roll back. psycopg's own rollback sends DEALLOCATE ALL in a second round trip (J12)."""
        own = self._pipeline is None and not self._num_transactions and self._tpc is None
        if not own or self.pgconn.transaction_status == TransactionStatus.IDLE or not self.statements.forget():
            yield from self._rollback_gen()
        else:
            yield from self._simple(b"ROLLBACK; DEALLOCATE ALL")

    def _turn(self) -> Awaitable[object]:
        """Take the lock."""
        return self._awaited_turn() if self.lock.locked() else self.lock.acquire()

    async def _awaited_turn(self) -> None:
        """Wait for the lock, but not for ever: its owner may be idle, as a `stream()` that was left open is (R20)."""
        now = asyncio.get_running_loop().time
        begun = now()
        while (until := max(begun, self._since) + self.patience) > now():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self.lock.acquire()
                    return
        self.cut()
        await self.close()
        raise psycopg.OperationalError(f"in use for {self.patience:g} s by something else, closed")

    def _simple(self, statements: bytes) -> Exchange[list[PGresult]]:
        self.pgconn.send_query(statements)
        results: list[PGresult] = yield from generators.execute(self.pgconn)
        for result in results:
            if result.status == ExecStatus.FATAL_ERROR:
                raise error_from_result(result, encoding=self.info.encoding)
        return results

    async def wait(self, gen: Exchange[RV], interval: float = INTERVAL, timeout: float | None = None) -> RV:
        """See `psycopg.AsyncConnection.wait`. First waits for the answers to pipelined statements."""
        if self.barred:
            raise psycopg.OperationalError("the connection is about to be closed")
        if self.ahead.on:
            await self._answered()
        return await self._exchange(gen, interval, timeout)

    async def _exchange(self, gen: Exchange[RV], interval: float = INTERVAL, timeout: float | None = None) -> RV:
        if timeout is not None:
            self.unwatch()
            return await super().wait(gen, interval, timeout)
        if self._at_once:
            # Before the next exchange, not after it: there a cancellation would cut off an exchange that is done, and
            # could leave the connection in pipeline mode for ever.
            self._at_once = False
            await psycopg.AsyncConnection.wait(self, nothing(), interval)
        try:
            state = next(gen)
        except StopIteration as end:
            self._at_once = True
            return end.value  # type: ignore[no-any-return]
        except BaseException:
            self.unwatch()
            raise
        while True:
            if state == _READING:
                ended, value = await self._answer_of(gen, interval)
            else:
                self.unwatch()
                ended, value = await self._cancelled(super().wait(_taken(gen, state, self.heard), interval))
            if ended:
                return value  # type: ignore[no-any-return]
            state = value

    async def _answer_of(self, gen: Exchange[Any], interval: float) -> Any:
        """As `_read`, and handles its cancellation and its errors."""
        try:
            return await self._read(gen)
        except asyncio.CancelledError:
            # psycopg cancels the statement on the server, waits for its end and raises the cancellation again.
            self.unwatch()
            ending = psycopg.AsyncConnection.wait(self, _Cancelled(gen), interval)
            return await self._cancelled(self.ended_within(_CANCEL_SECONDS, ending))
        except psycopg.OperationalError as error:
            if self.crashed_beside:  # B13: a warning reported it; psycopg raises only the error that followed
                raise CrashShutdown("another session of the server crashed, and ended this one") from error
            if not self.silent:
                raise
            self.pgconn.finish()
            raise silence(self.patience) from error

    async def _cancelled(self, exchange: Awaitable[RV]) -> RV:
        """Await an exchange that may be cancelled. If the connection ends meanwhile, the server answered neither the
        statement nor the cancel request: it counts as silent, whichever side closed the connection (R20). So does a
        server whose own answer was lost."""
        try:
            return await exchange
        except (asyncio.CancelledError, psycopg.OperationalError) as error:
            if self.closed and from_cancellation(error):
                self.silent = True
            raise

    def hurry(self) -> None:
        """The caller wants to stop: the answer in progress gets only a few more seconds (J24)."""
        self.patience = min(self.patience, _CANCEL_SECONDS)

    def heard(self) -> None:
        """The server has made progress, or reported why not: its time begins anew, unless `hurry` was called."""
        if self.patience > _CANCEL_SECONDS:
            self._since = asyncio.get_running_loop().time()

    def _read(self, answer: Exchange[Any]) -> asyncio.Future[Any]:
        """Done when the answer is complete, as (True, its value), or when it needs another wait, as (False, which)."""
        self._watch()
        self._answer, self._waiter = answer, asyncio.get_running_loop().create_future()
        return self._waiter

    def _watch(self) -> None:
        if self._watched is None:
            self._watched = self.pgconn.socket
            asyncio.get_running_loop().add_reader(self._watched, self._readable)
        if self._lookout is None:
            self._lookout = asyncio.get_running_loop().call_later(_LOOK_OUT, self._look_out)

    def _look_out(self) -> None:
        """Check for how long the same answer has been waited for. An event loop reads sockets before it runs timers, so
        a loop that was blocked does not mistake that for a silent server.

        Also for uvloop: after an error on a socket libuv stops polling it for good, and calls no reader (uv__poll_io).
        """
        self._lookout = None
        if self._watched is None or self._waiter is None:
            return
        loop = asyncio.get_running_loop()
        self._lookout = loop.call_later(_LOOK_OUT, self._look_out)
        poll = select.poll()
        poll.register(self._watched, 0)  # errors and hang-ups are reported without being requested
        if poll.poll(0):
            self._readable()
        elif self._waiter is not self._seen:
            self._seen, self._since = self._waiter, loop.time()
        elif loop.time() - self._since >= self.patience:
            self.silent = True
            cut(self._watched)
            self._readable()
        elif self.slow_commit is not None and loop.time() - self._since >= _SLOW_COMMIT:
            self.slow_commit(self)

    def _readable(self) -> None:
        waiter, answer = self._waiter, self._answer
        if waiter is None or answer is None or waiter.done():  # no statement waits: a notice, or the session's end
            self.unwatch()
            return
        try:
            state = answer.send(Ready.R)
            if state != _READING:
                waiter.set_result((False, state))
        except StopIteration as end:
            waiter.set_result((True, end.value))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            waiter.set_exception(error)
        if waiter.done():
            self._answer = self._waiter = None
            if self.pgconn.status != ConnStatus.OK:  # libpq may have closed the socket already
                self.unwatch()

    def look(self) -> None:
        """Read the data that has arrived although no statement waits: it may report the end of the session."""
        try:
            if self._arrivals is None:
                self._arrivals = select.poll()
                self._arrivals.register(self.pgconn.socket, select.POLLIN)
            if self._arrivals.poll(0):  # usually there is none: then this is one system call instead of two
                for _ in range(2):  # the server's last message, and the end
                    self.pgconn.consume_input()
        except psycopg.OperationalError:
            self.unwatch()

    def unwatch(self) -> None:
        """Remove the socket from the event loop; the next wait adds it again."""
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = None
        if self._lookout is not None:
            self._lookout.cancel()
            self._lookout = None

    def cut(self) -> None:
        """Shut the socket down: nothing more reaches the server, and each reader of the socket reads its end."""
        if not self.closed:
            cut(self.pgconn.socket)

    async def close(self) -> None:
        """See `psycopg.AsyncConnection.close`. A task that waits for an answer gets an error."""
        self.unwatch()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(psycopg.OperationalError("the connection is closed"))
        await super().close()


def nothing() -> Exchange[None]:
    """An exchange that ends without a wait. psycopg then yields to the loop, so that it is not starved, as by a long
    COPY."""
    return
    yield


def _taken(answer: Exchange[Any], state: Wait, heard: Callable[[], None]) -> Exchange[tuple[bool, Any]]:
    """Ends once only reading is left: (False, the state), or (True, the value) if the answer ends itself.

    After a cancellation psycopg continues a generator to read the answer to that, so this one then runs to its end.
    """
    cut_off = False
    while state != _READING or cut_off:
        if (ready := (yield state)) is None:
            cut_off = True
        elif ready:
            heard()
        try:
            state = answer.send(ready or 0)  # psycopg's compiled generator accepts no None
        except StopIteration as end:
            return True, end.value
    return False, state


class _Cancelled(Generator[Wait, Ready | int, Any]):
    """Raises the cancellation at its first step, as if it had happened there, and then continues the answer."""

    def __init__(self, answer: Exchange[Any]) -> None:
        self._answer = answer
        self._raised = False

    def send(self, value: Ready | int) -> Wait:
        if not self._raised:
            self._raised = True
            raise asyncio.CancelledError
        try:
            return self._answer.send(value)
        except psycopg.Error as error:
            if error.sqlstate is None:
                raise
            raise QueryCanceled(str(error)) from error  # psycopg closes a connection whose answer is any other error

    def throw(self, *error: Any) -> Wait:
        return self._answer.throw(*error)
