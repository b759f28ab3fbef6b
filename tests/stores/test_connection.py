"""The store's connection leaves its socket in the event loop: nothing may be lost, late, or left there."""

from __future__ import annotations

import asyncio
import importlib
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.stores.connection import Connection
from tests.support.inside import watched
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until


@pytest.fixture(params=["asyncio", "uvloop"])
def loops(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    if request.param == "asyncio":
        return asyncio.new_event_loop
    if not os.environ.get("CI"):
        pytest.importorskip("uvloop")
    uvloop: Any = importlib.import_module("uvloop")
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, lookout_pause=0.02)


def run(loops: Callable[[], asyncio.AbstractEventLoop], main: Any) -> Any:
    with asyncio.Runner(loop_factory=loops) as runner:
        return runner.run(main)


async def connected(dsn: str) -> Connection:
    return await Connection.connect(dsn, autocommit=True)


async def one(connection: Connection, query: str) -> Any:
    row = await (await connection.execute(query.encode())).fetchone()
    assert row is not None
    return row[0]


async def kill(dsn: str, pid: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
        await other.execute("select pg_terminate_backend(%s)", [pid])


def test_a_cancelled_statement_ends_on_the_server_and_the_connection_goes_on(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        connection = await connected(database)
        pid = await one(connection, "select pg_backend_pid()")
        sleeping = asyncio.create_task(connection.execute("select pg_sleep(60)"))
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as other:
            active = "select count(*) from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"

            async def asleep() -> bool:
                return await (await other.execute(active, [pid])).fetchone() == (1,)

            await until(asleep)
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        async with asyncio.timeout(30):
            assert await one(connection, "select 1") == 1
        await connection.close()

    run(loops, main())


def test_a_statement_is_cut_off_while_it_is_written(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        connection = await connected(database)
        pid = await one(connection, "select pg_backend_pid()")
        os.kill(pid, signal.SIGSTOP)
        try:
            writing = asyncio.create_task(connection.execute("select length(%s)", ["x" * 25_000_000]))
            for _ in range(5):
                await asyncio.sleep(0)
            writing.cancel()
        finally:
            asyncio.get_running_loop().call_later(0.2, os.kill, pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not connection.silent
        async with asyncio.timeout(30):
            assert await one(connection, "select 1") == 1
        await connection.close()

    run(loops, main())


def test_a_lost_server_ends_the_statement_and_leaves_no_socket_behind(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        for _ in range(20):  # the next connection gets the number of the last one's socket
            connection = await connected(database)
            pid = await one(connection, "select pg_backend_pid()")
            sleeping = asyncio.create_task(connection.execute("select pg_sleep(60)"))
            await asyncio.sleep(0)
            await kill(database, pid)
            async with asyncio.timeout(30):
                with pytest.raises(psycopg.OperationalError):
                    await sleeping
            assert not watched(connection)
            again = await connected(database)
            async with asyncio.timeout(30):
                assert await one(again, "select 1") == 1
            await again.close()
            await connection.close()

    run(loops, main())


def test_a_reset_connection_ends_the_statement_and_the_next_one(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        async with Proxy(int(str(conninfo_to_dict(database)["port"]))) as proxy:
            dsn = make_conninfo(database, host="127.0.0.1", port=proxy.port)
            waiting, resting = await connected(dsn), await connected(dsn)
            await one(waiting, "select 1")
            await one(resting, "select 1")
            sleeping = asyncio.create_task(waiting.execute("select pg_sleep(60)"))
            await asyncio.sleep(0)
            assert waiting._waiter is not None
            assert watched(resting)
            proxy.cut()
            async with asyncio.timeout(30):
                with pytest.raises(psycopg.OperationalError):
                    await sleeping
                with pytest.raises(psycopg.OperationalError):
                    await resting.execute("select 1")
                await until(lambda: not watched(resting))
            await waiting.close()
            await resting.close()

    run(loops, main())


def test_a_silent_server_ends_the_statement_and_the_connection(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop], impatient: None
) -> None:
    async def main() -> None:
        async with Proxy(int(str(conninfo_to_dict(database)["port"]))) as proxy:
            connection = await connected(make_conninfo(database, host="127.0.0.1", port=proxy.port))
            connection.patience = 0.3
            assert await one(connection, "select 1") == 1
            proxy.freeze()
            async with asyncio.timeout(30):
                with pytest.raises(psycopg.OperationalError, match=r"no answer from the server within 0\.3 s"):
                    await connection.execute("select 1")
            assert connection.closed
            assert not watched(connection)
            assert await one(await connected(database), "select 1") == 1

    run(loops, main())


def test_an_answer_that_came_while_the_loop_stood_still_is_no_silence(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop], impatient: None
) -> None:
    async def main() -> None:
        connection = await connected(database)
        connection.patience = 0.3
        statement = asyncio.create_task(one(connection, "select 7 from pg_sleep(0.2)"))
        await until(lambda: connection._seen is not None and connection._seen is connection._waiter)
        asyncio.get_running_loop().call_soon(time.sleep, 0.6)
        assert await statement == 7
        assert await one(connection, "select 8") == 8
        await connection.close()

    run(loops, main())


class LastAnswer:
    """Passes on what the server says until an answer has `mark` in it, which a reset follows at once."""

    def __init__(self, dsn: str, mark: bytes) -> None:
        parts = conninfo_to_dict(dsn)
        self._server = (str(parts["host"]), int(parts["port"] or 5432))
        self._mark = mark
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")
        self.over = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with self._listener, client, socket.create_connection(self._server) as server:
            while True:
                for readable in select.select([client, server], [], [])[0]:
                    data = readable.recv(65_536)
                    (server if readable is client else client).sendall(data)
                    if readable is server and self._mark in data:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        client.close()
                        self.over.set()
                    if not data or self.over.is_set():
                        return


def test_a_connection_that_was_reset_right_after_an_answer_does_not_keep_the_next_statement_waiting(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """libuv has forgotten the socket by then: answer and reset were one event."""

    async def main() -> None:
        server = LastAnswer(database, b"the last one")
        connection = await connected(server.dsn)
        assert await one(connection, "select 1") == 1
        last = asyncio.create_task(one(connection, "select 'the last' || ' one'"))
        await asyncio.sleep(0)
        assert server.over.wait(PATIENCE)  # the loop stands still, so that it sees both at once
        assert await last == "the last one"
        following = asyncio.create_task(connection.execute("select 1"))
        ended, _ = await asyncio.wait([following], timeout=PATIENCE)
        if not ended:  # a cancellation would wait for the same answer
            connection.unwatch()
            connection._watch()
        with pytest.raises(psycopg.OperationalError):
            await following
        assert ended
        await connection.close()

    run(loops, main())


def test_what_arrives_while_nobody_waits_does_not_keep_the_loop_busy(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        connection = await connected(database)
        pid = await one(connection, "select pg_backend_pid()")
        assert watched(connection)
        await kill(database, pid)
        await until(lambda: not watched(connection))
        with pytest.raises(psycopg.OperationalError):
            await connection.execute("select 1")
        await connection.close()

    run(loops, main())


def test_large_answers_copies_and_pipelines_pass_through(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        connection = await connected(database)
        assert len(await one(connection, "select repeat('x', 20000000)")) == 20_000_000
        assert await one(connection, f"select length('{'x' * 20_000_000}')") == 20_000_000  # more than a socket takes
        await connection.execute("create temp table many (n int)")
        async with connection.cursor().copy("copy many from stdin") as copy:
            for n in range(100_000):
                await copy.write_row((n,))
        assert await one(connection, "select sum(n)::bigint from many") == sum(range(100_000))
        async with connection.cursor().copy("copy many to stdout") as copy:
            assert len([row async for row in copy.rows()]) == 100_000
        async with connection.pipeline():
            cursors = [await connection.execute("select %s", [n]) for n in range(50)]
        assert [(await cursor.fetchall())[0][0] for cursor in cursors] == list(range(50))
        for _ in range(8):  # prepared from the sixth on
            assert await one(connection, "select 7") == 7
        await connection.close()
        assert not watched(connection)

    run(loops, main())


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    connection = await connected(database)
    yield connection
    await connection.close()


async def test_a_bad_statement_raises_where_it_was_awaited(connection: Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        await connection.execute("select 1/0")
    assert await one(connection, "select 1") == 1


async def test_two_tasks_may_share_it(connection: Connection) -> None:
    answers = await asyncio.gather(*(one(connection, f"select {n} from pg_sleep(0.01)") for n in range(10)))
    assert answers == list(range(10))


def test_a_connection_at_rest_wakes_the_loop_for_nothing(
    database: str, loops: Callable[[], asyncio.AbstractEventLoop], impatient: None
) -> None:
    async def main() -> None:
        connection = await connected(database)
        for _ in range(2):
            assert await one(connection, "select 1") == 1
            await until(lambda: connection._lookout is None)
            assert watched(connection)
        await connection.close()
        assert not watched(connection)

    run(loops, main())
