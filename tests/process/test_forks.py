"""What a forked process has of its parent, and what an event loop that has ended leaves (O25 to O28)."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import psycopg
import pytest

from idemconsumer import App, Message, Tx
from idemconsumer.brokers.adapters import connect
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from idemconsumer.sql.answering import AnsweringConnection, BlockingConnection
from tests.support import ROOT, forked
from tests.support.brokers import Brokers
from tests.support.ledger import Ledger
from tests.support.pids import alive, children
from tests.support.servers.made import PostgresServer, Server
from tests.support.servers.postgres import fresh_database, lent
from tests.support.servers.proxy import Proxy
from tests.support.waiting import PATIENCE, until

SOON = 20.0  # seconds; a server that is not told of an end notices it after 45 at the earliest


@pytest.fixture(scope="module")
def _database(postgres18: PostgresServer) -> Iterator[Ledger]:
    with fresh_database(postgres18.dsn) as dsn, closing(Ledger(dsn)) as ledger:
        yield ledger


@pytest.fixture
def ledger(_database: Ledger) -> Iterator[Ledger]:
    with lent(_database) as ledger:
        yield ledger


@pytest.fixture
async def brokers(kafka: Server, rabbitmq: Server, sqs: Server) -> AsyncIterator[Brokers]:
    made = Brokers(kafka, rabbitmq, sqs)
    await made.create()
    yield made
    await made.delete()


class Forking:
    """A launcher with one worker that runs `forking_app`."""

    def __init__(self, ledger: Ledger, folder: Path, scheme: str = "postgres", rabbitmq: str | None = None) -> None:
        self._ledger, self._scheme = ledger, scheme
        self._queue = f"forks-{uuid4().hex}"
        self._settings = Settings(dsn=ledger.dsn, rabbitmq=rabbitmq)
        self.notes = folder / "notes"
        self._log = folder / "log"
        ours = {"FORK_NOTES": str(self.notes), "FORK_SOURCE": f"{scheme}:{self._queue}"}
        servers = {"IDEMCONSUMER_DSN": ledger.dsn, "IDEMCONSUMER_RABBITMQ": rabbitmq or ""}
        command = [sys.executable, "-m", "idemconsumer", "run", "tests.process.forking_app:app", "--workers", "1"]
        more = ["--handlers", "work"] if rabbitmq else []
        with self._log.open("wb") as log:
            self._launcher = forked.Popen(
                [*command, *more], cwd=ROOT, env={**os.environ, **ours, **servers}, stdout=log, stderr=log
            )

    async def create(self) -> None:
        async with await aio_pika.connect(self._settings.rabbitmq) as connection, connection.channel() as channel:
            await channel.declare_queue(self._queue, durable=True, arguments={"x-queue-type": "quorum"})

    async def has(self, condition: Any, what: str, within: float = PATIENCE) -> None:
        try:
            await until(lambda: condition() or self._launcher.poll() is not None, what, within)
            assert condition(), f"the launcher has ended: {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._log.read_text()}") from None

    async def give(self, id: str, how: str = "", name: str = "") -> None:
        broker = connect(self._scheme, self._settings)
        await broker.publish(f"{self._queue}{name}", [Outgoing(json.dumps({"id": id, "how": how}).encode())])
        await broker.close()

    async def ended(self, id: str, how: str = "", name: str = "") -> str:
        """What the handler has returned."""
        await self.give(id, how, name)
        found = "select convert_from(body, 'UTF8') from idemconsumer.result"
        await self.has(lambda: self._ledger.run(found), f"{how} has ended")
        ((result,),) = self._ledger.run(found)
        return str(json.loads(result))

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def workers(self) -> list[int]:
        return children(self._launcher.pid)

    def close(self) -> None:
        self._launcher.terminate()
        try:
            self._launcher.wait(PATIENCE)
        finally:
            self._launcher.kill()


async def test_children_of_a_killed_worker_hold_none_of_its_messages(
    ledger: Ledger, rabbitmq: Server, tmp_path: Path
) -> None:
    """RabbitMQ gave it to nobody for 50 s, and Postgres held its key for as long."""
    with closing(Forking(ledger, tmp_path, "rabbitmq", rabbitmq.address)) as forking:
        await forking.create()
        await forking.give("a", "pool")
        await forking.has(forking.notes.exists, "it has children")
        its = json.loads(forking.notes.read_text())
        try:
            os.kill(its["worker"], signal.SIGKILL)
            await forking.has(lambda: ledger.effects == ["a"], "another worker has it", SOON)
            assert all(map(alive, its["children"]))
        finally:
            for child in its["children"]:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "name", "end"),
    [
        ("exit", "", "7"), ("return", "", "1"), ("await", "", "1"), ("task", "", "7"), ("calls", "", "0"),
        ("signal", "", "-15"), ("exit", "-sync", "7"), ("return", "-sync", "1"),
    ],
)  # fmt: skip
async def test_a_child_that_comes_back_from_a_handler_ends(
    ledger: Ledger, tmp_path: Path, how: str, name: str, end: str
) -> None:
    """It went on as the worker that it had been forked from, with its sockets."""
    with closing(Forking(ledger, tmp_path)) as forking:
        if how == "await":
            await forking.give("beside", "slow")
        assert await forking.ended("a", how, name) == end
        (worker,) = forking.workers
        await forking.give("b")
        await forking.has(lambda: "b" in ledger.effects, "the worker goes on")
        assert forking.workers == [worker]
        assert "drain requested" not in forking.log
        if how == "await":
            await forking.has(forking.notes.exists, "what ran beside it goes on")
            await forking.has(lambda: "beside" in ledger.effects, "and ends")
            assert forking.notes.read_text() == "beside\n"


async def test_a_child_that_comes_back_from_a_function_of_a_thread_ends(ledger: Ledger, tmp_path: Path) -> None:
    """It waited in its parent's pool for ever, or did there what its parent does."""
    with closing(Forking(ledger, tmp_path)) as forking:
        assert await forking.ended("a", "threads") == "7 1 7 1 7"
        assert forking.notes.read_text() == "what waits there\n"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_parent_and_children_each_have_connections_of_their_own(
    ledger: Ledger, brokers: Brokers, loop: str
) -> None:
    """They shared them, and none of the three got on again."""
    addresses = {f"IDEMCONSUMER_{name.upper()}": address for name, address in brokers.addresses.items()}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.process.forking_calls", loop, brokers.name],
        cwd=ROOT, env={**os.environ, **addresses, "IDEMCONSUMER_DSN": ledger.dsn},
        capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert ledger.effects == ["after", "before", "child 0", "child 1"]


@asynccontextmanager
async def proxied(ledger: Ledger) -> AsyncIterator[tuple[Proxy, str]]:
    info = psycopg.conninfo.conninfo_to_dict(ledger.dsn)
    async with Proxy(int(str(info["port"]))) as proxy:
        yield proxy, psycopg.conninfo.make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port)


def ends(one: Coroutine[Any, Any, None]) -> None:
    asyncio.run(one)


def is_only_closed(one: Coroutine[Any, Any, None]) -> None:
    """As by whoever makes loops by hand: it has not finished its asynchronous generators."""
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(one)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("each_loop", [ends, is_only_closed])
async def test_each_event_loop_has_connections_of_its_own(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, each_loop: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """One `asyncio.run` for each message worked until the first connection was lost, and then never again."""
    app = App("loops")

    @app.idempotent_handler("memory:orders", key="id")
    async def order(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("insert into witness (id) values (%s)", (order["id"],))

    async def one(id: str) -> None:
        async with asyncio.timeout(PATIENCE / 3):
            outcome = await app.process(Message("memory:orders", json.dumps({"id": id}).encode()))
            assert outcome.kind == "applied"
            await app.publish("postgres:elsewhere", {"id": id})

    def each_in_a_loop_of_its_own(*ids: str) -> None:
        for id in ids:
            each_loop(one(id))
        asyncio.run(one(f"behind {ids[-1]}"))

    async with proxied(ledger) as (proxy, dsn):
        monkeypatch.setenv("IDEMCONSUMER_DSN", dsn)
        await asyncio.to_thread(each_in_a_loop_of_its_own, "a", "b")
        proxy.cut()
        await proxy.restore()
        await asyncio.to_thread(each_in_a_loop_of_its_own, "c", "d", "e", "f", "g", "h")
        assert ledger.effects == [*"ab", "behind b", "behind h", *"cdefgh"]
        await until(lambda: proxy.connections == 0, "what has ended leaves its connections open")
    gc.collect()  # what asyncio says of tasks whose loop was only closed is said here, and not in another test


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_an_event_loop_for_each_message_leaves_nothing_and_says_nothing(brokers: Brokers, loop: str) -> None:
    """Each message to Kafka wrote "Unclosed AIOKafkaProducer", each to RabbitMQ "Task was destroyed …"."""
    addresses = {f"IDEMCONSUMER_{name.upper()}": address for name, address in brokers.addresses.items()}
    destinations = [f"{scheme}:{brokers.name}" for scheme in ("kafka", "rabbitmq", "sqs")]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "always::ResourceWarning", "-m", "tests.process.publishing_once", loop, *destinations],
        cwd=ROOT, env={**os.environ, **addresses}, capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_a_connection_that_a_child_has_too_is_made_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is being made is known to nobody yet, so a child that is forked meanwhile would keep it."""
    attempts = list[object]()

    def fork(connection: object) -> None:
        attempts.append(connection)
        if len(attempts) == 1:
            if (pid := os.fork()) == 0:
                os._exit(0)
            os.waitpid(pid, 0)

    connect_async, connect = psycopg.AsyncConnection.connect.__func__, psycopg.Connection.connect.__func__  # type: ignore[attr-defined]

    async def async_one(cls: Any, *given: Any, **more: Any) -> Any:
        connection = await connect_async(cls, *given, **more)
        fork(connection)
        return connection

    def one(cls: Any, *given: Any, **more: Any) -> Any:
        connection = connect(cls, *given, **more)
        fork(connection)
        return connection

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", classmethod(async_one))
    monkeypatch.setattr(psycopg.Connection, "connect", classmethod(one))
    async with await AnsweringConnection.connect(ledger.dsn) as connection:
        assert attempts[1:] == [connection]
    attempts.clear()
    with BlockingConnection.connect(ledger.dsn) as blocking:
        assert attempts[1:] == [blocking]
