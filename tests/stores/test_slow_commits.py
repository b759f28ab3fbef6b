"""R23: lanes that hang in COMMIT, since no synchronous standby is there, say so, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import sql

from idemconsumer import Tx, idempotent_handler
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.engine.engine import Engine
from idemconsumer.rules.values import State
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.slow_commits import SlowCommits
from tests.support.inside import commits_go_on
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, works, write
from tests.support.logs import LogCapture, times
from tests.support.servers.made import PrivatePgBouncer, PrivatePostgres
from tests.support.servers.pgbouncer import carry
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

ANSWER = 10.0  # seconds until a commit without an answer is given up
HANGS, OVER = "commits wait for a synchronous standby", "commits no longer wait for a synchronous standby"


@pytest.fixture(scope="module")
def server(private_postgres: PrivatePostgres) -> EmbeddedPostgres:
    return private_postgres()


@pytest.fixture
def ledger(server: EmbeddedPostgres) -> Iterator[Ledger]:
    with closing(Ledger(server.dsn)) as ledger:
        yield ledger
        release(ledger)
        ledger.run("drop table witness")
        ledger.run("drop schema idemconsumer cascade")


@pytest.fixture(params=["direct", "session", "transaction"])
def address(request: pytest.FixtureRequest, ledger: Ledger, private_pgbouncer: PrivatePgBouncer) -> Iterator[str]:
    if request.param == "direct":
        yield ledger.dsn
        return
    carry(ledger.dsn)
    yield private_pgbouncer(ledger.dsn, request.param).dsn
    with psycopg.connect(ledger.dsn, autocommit=True) as connection:
        connection.execute("set default_transaction_read_only = off")
        names = sql.Identifier(connection.info.user), sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("alter role {} in database {} reset all").format(*names))


@pytest.fixture
async def engine(ledger: Ledger, address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """Its commits hang from now on."""
    tuned(monkeypatch, lookout_pause=0.02, commit_is_slow_after=0.1, cancel_patience=0.5, slow_commit_pause=0.1)
    store = await PostgresStore.open(address, SCHEMA, connections=4, longest_run=30.0)
    store.pool.longest_answer = ANSWER
    engine = Engine(store)
    await engine.run(works(pay, "first"))
    ledger.clear()
    ledger.run("alter system set synchronous_standby_names = 'nobody'")
    ledger.run("select pg_reload_conf()")
    async with store.pool.connection() as connection:
        show = "select current_setting('synchronous_standby_names')"

        async def told() -> bool:
            return await (await connection.execute(show)).fetchone() == ("nobody",)

        await until(told)
    await until(lambda: commits_hang(ledger))
    yield engine
    release(ledger)
    await store.close()


async def commits_hang(ledger: Ledger) -> bool:
    """Those of all sessions do once the checkpointer has read the setting too: it tells the others what to wait for."""
    async with await psycopg.AsyncConnection.connect(ledger.dsn, autocommit=True) as connection:
        commit = asyncio.create_task(connection.execute("select pg_logical_emit_message(true, 'test', '')"))
        while not commit.done():
            if hanging(ledger):
                ledger.run("select pg_cancel_backend(%s)", [connection.info.backend_pid])
                await commit
                return True
            await asyncio.sleep(0.01)
    return False


def release(ledger: Ledger) -> None:
    ledger.run("alter system reset synchronous_standby_names")
    ledger.run("select pg_reload_conf()")


def hanging(ledger: Ledger) -> int:
    return len(ledger.run("select 1 from pg_stat_activity where wait_event = 'SyncRep'"))


@idempotent_handler(SOURCE, key="id")
async def pay(order: dict[str, Any], tx: Tx) -> None:
    await write(tx, order["id"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many commits were found waiting, each time."""
    counts: list[int] = []
    tell = SlowCommits._tell

    def count(self: SlowCommits, lanes: int) -> None:
        counts.append(lanes)
        tell(self, lanes)

    monkeypatch.setattr(SlowCommits, "_tell", count)
    return counts


async def more_than_an_answer_may_take(pool: Pool, asked: list[int]) -> None:
    """And each time before that the server was asked what two commits wait for."""
    for _ in range(3):
        asked.clear()
        await until(lambda: 2 in asked, "the server is asked")
        commits_go_on(pool, 0.6 * ANSWER)
    asked.clear()
    await until(lambda: 2 in asked, "they still wait")


async def test_commits_that_wait_for_a_standby_say_so_once_and_are_not_given_up(
    ledger: Ledger, engine: Engine, store: PostgresStore, logged: LogCapture, asked: list[int]
) -> None:
    runs = [asyncio.create_task(engine.run(works(pay, id))) for id in "ab"]
    await until(lambda: hanging(ledger) == 2)
    await more_than_an_answer_may_take(store.pool, asked)
    assert not any(run.done() for run in runs)
    assert times(logged, HANGS) == 1
    release(ledger)
    async with asyncio.timeout(PATIENCE):
        assert [kinds(await run) for run in runs] == [["applied"]] * 2
    await until(lambda: times(logged, OVER) == 1)
    assert (ledger.effects, times(logged, HANGS)) == (["a", "b"], 1)


async def small(store: PostgresStore, key: bytes) -> None:
    """A commit that is one message with its transaction."""
    async with store.transaction(group=1) as claims:
        claims._connection.patience = ANSWER
        await claims.commit([("count_attempt", {"key": key, "scope": "shop/-/pay", "error": "why"})])


@pytest.fixture
def store(engine: Engine) -> PostgresStore:
    assert isinstance(engine._store, PostgresStore)
    return engine._store


async def test_one_that_is_a_message_with_its_transaction_is_not_given_up_either(
    ledger: Ledger, store: PostgresStore, asked: list[int]
) -> None:
    commits = [asyncio.create_task(small(store, key)) for key in (b"a", b"b")]  # one of a new connection
    await until(lambda: hanging(ledger) == 2)
    await more_than_an_answer_may_take(store.pool, asked)
    assert not any(commit.done() for commit in commits)
    release(ledger)
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*commits)


async def test_one_that_is_a_message_with_its_transaction_is_not_cut_off_by_a_cancellation(
    ledger: Ledger, store: PostgresStore
) -> None:
    commit = asyncio.create_task(small(store, b"a"))
    await until(lambda: hanging(ledger) == 1)
    commit.cancel()
    await asyncio.wait([commit], timeout=PATIENCE)
    assert commit.cancelled()
    assert hanging(ledger) == 1


async def test_one_that_is_left_for_a_drain_is_busy_and_then_a_duplicate(ledger: Ledger, engine: Engine) -> None:
    run = asyncio.create_task(engine.run(works(pay, "a")))
    await until(lambda: hanging(ledger) == 1)
    run.cancel()
    await asyncio.wait([run], timeout=PATIENCE)  # a time-out would only cancel it once more
    assert run.cancelled()
    assert hanging(ledger) == 1, "the server goes on waiting"
    assert ledger.effects == []
    assert kinds(await engine.run(works(pay, "a"), defer=True)) == ["busy"]
    release(ledger)
    await until(lambda: hanging(ledger) == 0)
    assert kinds(await engine.run(works(pay, "a"))) == ["duplicate"]
    assert (ledger.effects, ledger.states) == (["a"], [State.COMPLETED])
