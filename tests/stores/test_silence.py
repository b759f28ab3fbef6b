"""A connection that stays open and says nothing: each wait for it ends, and nothing is lost or done twice (R20)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import Message, Tx, idempotent_handler
from idemconsumer.admin.dead_letters import Admin
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import StoreUnavailable
from idemconsumer.rules.values import State
from idemconsumer.sql.answering import AnsweringConnection, BlockingConnection
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.migrations import status
from tests.support.inside import patient_unless
from tests.support.ledger import SCHEMA, SOURCE, Ledger, OpenStore, kinds, works, write
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

SOON = 1.0  # second of patience


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> None:
    patient_unless(monkeypatch, lambda port: proxy.silences(port))
    tuned(
        monkeypatch,
        lookout_pause=0.05,
        cancel_patience=SOON,
        answer_patience=SOON,
        spare_answer_time=SOON - 30.0,  # the store's longest run is 30 s
    )


@pytest.fixture
async def proxy(ledger: Ledger) -> AsyncIterator[Proxy]:
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:
        yield proxy


@pytest.fixture
def dsn(ledger: Ledger, proxy: Proxy) -> str:
    return make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port)


@pytest.fixture
async def store(dsn: str, impatient: None, open_store: OpenStore) -> PostgresStore:
    return await open_store(dsn)


@pytest.fixture
async def engine(store: PostgresStore, ledger: Ledger) -> Engine:
    """With a connection in the pool, and the scope known."""
    engine = Engine(store)
    await engine.run(works(pay, "first"))
    ledger.clear()
    return engine


inside: asyncio.Queue[Callable[[], None]] = asyncio.Queue()  # what the next run does before its statement


@idempotent_handler(SOURCE, key="id", group_size=8, timeout="10s", backoff="1ms, 1ms")
async def pay(order: dict[str, Any], tx: Tx, message: Message) -> None:
    if not inside.empty():
        inside.get_nowait()()
    await write(tx, order["id"])


@idempotent_handler(SOURCE, key="id", name="pay", timeout="200ms")
async def hasty(order: dict[str, Any], tx: Tx, message: Message) -> None:
    await pay(order, tx, message)


async def test_a_claim_without_an_answer_is_an_outage(engine: Engine, proxy: Proxy, ledger: Ledger) -> None:
    proxy.freeze()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StoreUnavailable, match=r"no answer from the server within 1 s"):
            await engine.run(works(pay, 1))
    proxy.thaw()
    assert kinds(await engine.run(works(pay, 1))) == ["applied"]
    assert (ledger.effects, ledger.attempts) == (["1"], [])


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("lost", ["before", "after"])
async def test_a_commit_without_an_answer_is_unknown_and_claimed_anew(
    engine: Engine, proxy: Proxy, ledger: Ledger, lost: Literal["before", "after"], size: int
) -> None:
    ids = [f"{n}" for n in range(size)]
    trap = proxy.freeze_at(mode=lost)
    async with asyncio.timeout(PATIENCE):
        outcomes = await engine.run(works(pay, *ids))
    assert trap.sprung.is_set()
    assert kinds(outcomes) == ["applied" if lost == "before" else "duplicate"] * size
    assert (ledger.effects, ledger.states) == (ids, [State.COMPLETED] * size)


async def test_a_handlers_statement_without_an_answer_ends_with_its_timeout_and_costs_no_attempt(
    engine: Engine, proxy: Proxy, ledger: Ledger
) -> None:
    inside.put_nowait(lambda: proxy.freeze(answers_only=True))
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await engine.run(works(hasty, 1))
    assert kinds(await engine.run(works(pay, 1))) == ["applied"]
    assert (ledger.effects, ledger.attempts) == (["1"], [])


async def test_a_server_that_ends_the_session_since_its_answer_was_lost_costs_no_attempt(
    engine: Engine, proxy: Proxy, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the session for idle, and may end it before our own patience is over."""

    async def never_heard(connection: psycopg.AsyncConnection[Any], *, timeout: float = 0) -> None:
        ledger.run("select pg_terminate_backend(%s)", [connection.info.backend_pid])

    monkeypatch.setattr(psycopg.AsyncConnection, "_try_cancel", never_heard)
    tuned(monkeypatch, cancel_patience=2 * PATIENCE)
    inside.put_nowait(lambda: proxy.freeze(answers_only=True))
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await engine.run(works(hasty, 1))
    assert kinds(await engine.run(works(pay, 1))) == ["applied"]
    assert (ledger.effects, ledger.attempts) == (["1"], [])


@idempotent_handler(SOURCE, key="id", name="pay", timeout="100ms", max_attempts=1, group_size=8)
async def lends(order: dict[str, Any], tx: Tx) -> None:
    await tx.connection.execute("insert into witness (id) values (%s)", [order["id"]])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ended_by", ["the server", "us"])
async def test_an_engines_reset_without_an_answer_is_not_the_handlers(
    engine: Engine, store: PostgresStore, proxy: Proxy, ledger: Ledger, size: int, ended_by: str
) -> None:
    """B5: its handler returned long before its timeout, which is over when the reset ends."""
    store.pool.longest_answer = 600.0
    group = works(lends, *range(size))
    trap = proxy.freeze_at(b"reset session authorization", mode="after")
    run = asyncio.create_task(engine.run(group))
    async with asyncio.timeout(PATIENCE):
        await trap.sprung.wait()
        await asyncio.sleep(0.2)
        if ended_by == "the server":
            ledger.run("select pg_terminate_backend(pid) from pg_stat_activity where state = 'idle in transaction'")
        with pytest.raises(StoreUnavailable):
            await run
    assert ledger.attempts == []
    assert kinds(await engine.run(group)) == ["applied"] * size


async def test_a_handlers_slow_statement_and_a_slow_commit_are_waited_for(
    engine: Engine, store: PostgresStore, ledger: Ledger, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "silences", lambda _: True)  # it is not known that the server is well
    store.pool.longest_answer = 30.0
    ledger.run(
        "create function slowly() returns trigger language plpgsql as 'begin perform pg_sleep(2); return null; end'"
    )
    ledger.run(
        "create constraint trigger slow after insert on witness deferrable initially deferred"
        " for each row execute function slowly()"
    )
    assert kinds(await engine.run(works(sleeps, 1))) == ["applied"]
    assert ledger.effects == ["1"]


@idempotent_handler(SOURCE, key="id", name="pay")
async def sleeps(order: dict[str, Any], tx: Tx) -> None:
    await tx.execute("select pg_sleep(2)")
    await write(tx, order["id"])


async def test_waiting_at_the_gate_is_no_silence(
    store: PostgresStore, engine: Engine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "silences", lambda _: True)  # it is not known that the server is well
    store.pool.longest_answer = 30.0
    async with store.transaction(group=2, gate="shop") as ahead:
        await ahead.begin()
        behind = asyncio.create_task(_through_the_gate(store))
        done, _ = await asyncio.wait([behind], timeout=3 * SOON)
        assert not done
    await behind


async def _through_the_gate(store: PostgresStore) -> None:
    async with store.transaction(group=2, gate="shop") as claims:
        await claims.begin()


@pytest.mark.parametrize("through", ["tx", "tx.connection"])
async def test_a_rollback_without_an_answer_costs_the_connection(
    engine: Engine, store: PostgresStore, proxy: Proxy, ledger: Ledger, through: str
) -> None:
    """However long the handlers of this worker may wait for theirs."""
    store.pool.longest_answer = 600.0

    @idempotent_handler(SOURCE, key="id", name="pay", backoff="1ms, 1ms")
    async def fails(order: dict[str, Any], tx: Tx) -> None:
        if through == "tx.connection":
            await tx.connection.execute("select 1")
        proxy.freeze(answers_only=True)
        raise RuntimeError

    async with asyncio.timeout(PATIENCE):
        assert kinds(await engine.run(works(fails, 1))) == ["retrying"]
        assert kinds(await engine.run(works(pay, 1))) == ["applied"]
    assert ledger.effects == ["1"]


@pytest.mark.parametrize("answers_only", [True, False])
async def test_a_small_commit_without_an_answer_is_an_outage(
    store: PostgresStore, proxy: Proxy, answers_only: bool
) -> None:
    await store.count_dead(b"")
    proxy.freeze(answers_only=answers_only)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StoreUnavailable, match="no answer from the server"):
            await store.count_dead(b"")
    proxy.thaw()
    await store.count_dead(b"")


async def test_after_one_connection_fell_silent_no_older_one_is_tried(store: PostgresStore, proxy: Proxy) -> None:
    met = asyncio.Barrier(3)

    async def connect() -> None:
        async with store.pool.connection():
            await met.wait()

    await asyncio.gather(*(connect() for _ in range(3)))
    proxy.freeze(answers_only=True)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StoreUnavailable, match="no answer"):
            await store.count_dead(b"")
        await store.count_dead(b"")


async def test_a_connection_that_nobody_answers_is_an_outage(store: PostgresStore, proxy: Proxy) -> None:
    async with store.pool.connection():  # so that another one is needed
        proxy.freeze()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreUnavailable, match="no connection"):
                await store.count_dead(b"")


async def test_a_cancelled_statement_of_a_silent_server_ends(
    engine: Engine, proxy: Proxy, ledger: Ledger, store: PostgresStore
) -> None:
    """Nor is the request to cancel it answered."""
    store.pool.longest_answer = 600.0
    frozen = asyncio.Event()

    def freeze() -> None:
        proxy.freeze()
        frozen.set()

    inside.put_nowait(freeze)
    run = asyncio.create_task(engine.run(works(pay, 1)))
    await frozen.wait()
    await asyncio.sleep(0)
    run.cancel()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_a_statement_whose_connection_another_task_closes_ends(ledger: Ledger) -> None:
    """And does not wait on the descriptor of the next connection, which would hang both."""
    first = await AnsweringConnection.connect(ledger.dsn, autocommit=True)
    descriptor = first.pgconn.socket
    statement = asyncio.create_task(first.execute("select pg_sleep(60)"))
    await until(first.lock.locked)
    await asyncio.sleep(0)  # now it waits for the socket
    await first.close()
    async with await AnsweringConnection.connect(ledger.dsn, autocommit=True) as second, asyncio.timeout(PATIENCE):
        assert second.pgconn.socket == descriptor
        with pytest.raises(psycopg.OperationalError):
            await statement
        assert await (await second.execute("select 1")).fetchone() == (1,)


async def test_a_cancellation_hurries_the_commit_that_it_waits_for(
    engine: Engine, proxy: Proxy, ledger: Ledger, store: PostgresStore
) -> None:
    store.pool.longest_answer = 600.0
    trap = proxy.freeze_at(mode="after")
    run = asyncio.create_task(engine.run(works(pay, 1)))
    async with asyncio.timeout(PATIENCE):
        await trap.sprung.wait()
    run.cancel()
    await asyncio.wait([run], timeout=PATIENCE)  # a time-out would only cancel it once more
    assert run.cancelled()
    assert kinds(await engine.run(works(pay, 1))) == ["duplicate"]
    assert ledger.effects == ["1"]


class TestConnectionsOfOurOwn:
    """What commands, the queue, retention and the heartbeat use."""

    async def test_an_exchange_without_an_answer_ends(self, dsn: str, proxy: Proxy) -> None:
        connection = await AnsweringConnection.connect(dsn, autocommit=True)
        connection.patience = SOON
        await connection.execute("select 1")
        proxy.freeze()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(psycopg.OperationalError, match=r"no answer from the server within 1 s"):
                await connection.execute("select 1")
        assert connection.closed

    async def test_an_exchange_of_a_thread_ends(self, dsn: str, proxy: Proxy) -> None:
        connection: BlockingConnection[Any] = await asyncio.to_thread(BlockingConnection.connect, dsn)
        connection.patience = SOON
        proxy.freeze()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(psycopg.OperationalError, match=r"no answer from the server within 1 s"):
                await asyncio.to_thread(connection.execute, "select 1")
        assert connection.closed

    async def test_a_statement_larger_than_what_a_socket_takes_ends(self, dsn: str, proxy: Proxy) -> None:
        connection = await AnsweringConnection.connect(dsn, autocommit=True)
        connection.patience = SOON
        proxy.freeze()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(psycopg.OperationalError):
                await connection.execute("select length(%s)", ["x" * 20_000_000])
        await until(lambda: connection.closed)

    @pytest.mark.parametrize("ask", ["check", "status", "dead"])
    async def test_a_command_on_a_silent_server_ends_with_an_error(
        self, dsn: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, ask: str
    ) -> None:
        """Silent as soon as it is connected: its first statement gets no answer."""
        monkeypatch.setattr(AnsweringConnection, "patience", SOON)
        monkeypatch.setattr(BlockingConnection, "patience", SOON)
        proxy.freeze_at(b"select", mode="before")
        asked: dict[str, Callable[[], Awaitable[Any]]] = {
            "check": lambda: check_database(dsn, SCHEMA),
            "status": lambda: asyncio.to_thread(status, dsn, SCHEMA),
            "dead": lambda: Admin(dsn, SCHEMA).dead_letters(),
        }
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreUnavailable, match=r"no answer from the server within 1 s"):
                await asked[ask]()
