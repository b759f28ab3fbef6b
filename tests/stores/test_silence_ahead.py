"""What was sent ahead may take long altogether: silence is that of each answer (R20, J26)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Self

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SOURCE, Ledger, OpenStore, kinds, works
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE

SOON = 3.0  # longer than a machine stands still
INSERT = "insert into witness (id) values (%s) returning id"


class Narrow:
    """The way to a server that takes a megabyte in a tenth of a second. Use it with `async with`."""

    def __init__(self, dsn: str) -> None:
        self._target = int(str(conninfo_to_dict(dsn)["port"]))

    async def __aenter__(self) -> Self:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        listening.bind(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self._server = await asyncio.start_server(self._accept, sock=listening)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(_forward(reader, to_server, pause=0.1), _forward(from_server, writer))


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause: float = 0.0) -> None:
    taken = 0
    with suppress(OSError):
        while some := await reader.read(65_536):
            writer.write(some)
            await writer.drain()
            if (taken := taken + len(some)) > 1_000_000:
                await asyncio.sleep(pause)
                taken = 0
    writer.close()


@pytest.fixture
async def store(ledger: Ledger, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PostgresStore]:
    """In which an answer has three seconds."""
    tuned(monkeypatch, runs_before_ahead=0, lookout_pause=0.05, cancel_patience=SOON / 2, claim_patience=SOON)
    async with Narrow(ledger.dsn) as narrow:
        store = await open_store(make_conninfo(ledger.dsn, host="127.0.0.1", port=narrow.port))
        store.pool.longest_answer = SOON
        yield store


async def run(engine: Engine, handler: Any, *ids: object) -> list[str]:
    async with asyncio.timeout(PATIENCE):
        return kinds(await engine.run(works(handler, *ids)))


async def test_statements_that_take_long_together_are_waited_for(engine: Engine, ledger: Ledger) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def sleeps(order: dict[str, Any], tx: Tx) -> None:
        await tx.send("select pg_sleep(0.9)")
        await asyncio.sleep(0)  # it is on its way

    assert await run(engine, sleeps, *range(4)) == ["applied"] * 4


async def test_a_task_that_waits_until_another_has_read_them_waits_too(engine: Engine) -> None:
    runs: list[int] = []

    @idempotent_handler(SOURCE, key="id")
    async def sleeps(order: dict[str, Any], tx: Tx) -> None:
        runs.append(order["id"])
        rows = [await tx.execute(INSERT, (name,)) for name in ("a", "b")]
        for _ in range(4):
            await tx.send("select pg_sleep(0.9)")
            await asyncio.sleep(0)
        assert await asyncio.gather(*(each.one() for each in rows)) == [("a",), ("b",)]

    assert await run(engine, sleeps, 1) == ["applied"]
    assert runs == [1], "nothing was cut off, and made up for"


async def test_a_statement_that_the_server_takes_in_parts_is_waited_for(engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def sends(order: dict[str, Any], tx: Tx) -> None:
        await tx.send("select length(%s)", ("x" * 65_000_000,))

    began = asyncio.get_running_loop().time()
    assert await run(engine, sends, 1) == ["applied"]
    assert asyncio.get_running_loop().time() - began > 2 * SOON


async def test_a_slow_statement_is_waited_for_before_the_session_is_made_what_it_was(
    engine: Engine, store: PostgresStore, ledger: Ledger
) -> None:
    store.pool.longest_answer = 30.0

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def sleeps(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("set local work_mem = '4MB'")
        await tx.send("select pg_sleep(2)")

    assert await run(engine, sleeps, 1, 2) == ["applied"] * 2


async def test_a_cancellation_hurries_a_commit_that_is_not_even_written(
    store: PostgresStore, engine: Engine, ledger: Ledger
) -> None:
    """What is stored before it is more than the server, which is at work, takes."""
    store.pool.longest_answer = 600.0
    returned = asyncio.Event()

    @idempotent_handler(SOURCE, key="id")
    async def sends(order: dict[str, Any], tx: Tx) -> str:
        await tx.send("select pg_sleep(60)")
        returned.set()
        return "x" * 25_000_000

    running = asyncio.create_task(engine.run(works(sends, 1)))
    await returned.wait()
    for _ in range(5):
        await asyncio.sleep(0)  # COMMIT is waited for
    running.cancel()
    await asyncio.wait([running], timeout=20)  # and not the statement_timeout of 35 s
    assert running.done()
    assert running.cancelled()
    assert ledger.states == []
