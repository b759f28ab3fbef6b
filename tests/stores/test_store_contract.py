"""PostgresStore passes the suite of joined stores, and what Postgres alone must be asked for."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.errors import ConfigurationError, GuardViolated, StoreUnavailable
from idemconsumer.handlers.arguments import Tx
from idemconsumer.message.message import Message, StoredResult, Subscription
from idemconsumer.message.origin import restored
from idemconsumer.ports.broker import Bounds
from idemconsumer.rules.values import Mark, Record, State
from idemconsumer.settings import Settings
from idemconsumer.stores import session
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.joined import PostgresStore
from tests.support.inside import own_pool
from tests.support.ledger import SCHEMA, Ledger, OpenStore
from tests.support.servers.made import PostgresServer, PrivatePostgres
from tests.support.servers.postgres import fresh_database
from tests.support.tuning import tuned

pytest.register_assert_rewrite("tests.stores.store_contract")

from tests.stores.store_contract import (  # noqa: E402
    PATIENCE,
    A,
    B,
    C,
    JoinedStoreContract,
    StoreHarness,
    complete,
    letter_of,
)


class PostgresHarness:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def store(self) -> PostgresStore:
        return await PostgresStore.open(self._ledger.dsn, SCHEMA, connections=8, longest_run=30.0)

    async def write(self, tx: Tx, effect: str) -> None:
        await tx.execute("insert into witness (id) values (%s)", (effect,))

    async def break_transaction(self, tx: Tx) -> None:
        with pytest.raises(psycopg.errors.UndefinedTable):
            await tx.execute("select from nowhere")

    async def effects(self) -> list[str]:
        return self._ledger.effects

    async def letters(self) -> list[tuple[str, int]]:
        return self._ledger.letters


class TestPostgres(JoinedStoreContract):
    @pytest.fixture
    def harness(self, shared_ledger: Ledger) -> StoreHarness:
        return PostgresHarness(shared_ledger)


def set_for_database(ledger: Ledger, setting: str, value: str) -> None:
    with psycopg.connect(ledger.dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("alter database {} set {} = {}").format(
                sql.Identifier(connection.info.dbname), sql.Identifier(setting), sql.Literal(value)
            )
        )


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
async def test_transactions_are_read_committed_whatever_the_database_prefers(
    ledger: Ledger, open_store: OpenStore, level: str
) -> None:
    set_for_database(ledger, "default_transaction_isolation", level)
    store = await open_store(ledger.dsn)

    async with store.transaction(group=1) as claims:
        await claims.claim([A])
        rows = await claims.tx().execute("show transaction_isolation")
        assert await rows.one() == ("read committed",)
        # What a rival commits now is seen, so a claim that it refuses can be read in a second statement.
        await complete(await open_store(ledger.dsn), [B])
        assert await claims.claim([B]) == [Record(State.COMPLETED, B.fingerprint)]


async def test_a_record_carries_the_time_of_its_claim_and_not_of_its_transaction(
    ledger: Ledger, store: PostgresStore
) -> None:
    async with store.transaction(group=1) as claims:
        await claims.claim([A])
        rows = await claims.tx().execute("select now()")
        (began,) = await rows.one()
        await claims.complete([], [])
    assert ledger.run("select changed_at > %s from idemconsumer.record", [began]) == [(True,)]


async def test_a_dead_letter_is_written_by_the_transaction_of_its_record(ledger: Ledger, store: PostgresStore) -> None:
    assert isinstance(await store.bury(letter_of("a"), A), int)
    rows = ledger.run(
        "select xmin::text from idemconsumer.record union all select xmin::text from idemconsumer.dead_letter"
    )
    assert (len(rows), len(set(rows))) == (2, 1)


async def test_a_result_is_stored_by_the_transaction_of_its_record(ledger: Ledger, store: PostgresStore) -> None:
    async with store.transaction(group=1) as claims:
        await claims.claim([A])
        await claims.tx().execute("insert into witness values ('a')")
        await claims.complete([(A.key, StoredResult(b"1", "json"))], [])
    rows = ledger.run(
        "select xmin::text from witness union all select xmin::text from idemconsumer.record"
        " union all select xmin::text from idemconsumer.result"
    )
    assert (len(rows), len(set(rows))) == (3, 1)


async def test_a_database_that_loses_commits_is_refused_at_the_start(ledger: Ledger) -> None:
    set_for_database(ledger, "synchronous_commit", "off")
    with pytest.raises(ConfigurationError, match=r"synchronous_commit is off.*set it to on"):
        await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)


async def test_a_handler_that_asks_for_a_commit_that_can_be_lost_is_refused_at_the_seal(
    ledger: Ledger, store: PostgresStore
) -> None:
    async with store.transaction(group=1) as claims:
        await claims.claim([A])
        tx = claims.tx()
        await tx.execute("set local synchronous_commit = off")
        await tx.execute("insert into witness values ('lost?')")
        with pytest.raises(GuardViolated, match="synchronous_commit is off"):
            await claims.complete([], [])
    assert (ledger.effects, ledger.states) == ([], [])


async def test_a_schema_that_is_not_there_is_named_with_what_to_do(database: str) -> None:
    with pytest.raises(ConfigurationError, match="'idemconsumer' does not exist; run `idemconsumer migrate up`"):
        await PostgresStore.open(database, SCHEMA, connections=1, longest_run=30.0)


async def test_a_database_that_is_not_there_is_unavailable_and_not_misconfigured() -> None:
    with pytest.raises(StoreUnavailable, match="no connection to the database"):
        await PostgresStore.open("postgresql://127.0.0.1:1/x", SCHEMA, connections=1, longest_run=30.0)


async def test_the_end_of_an_outage_is_noticed_while_it_is_waited_for(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool says nothing of an attempt that failed, and makes no other one."""
    tries, connect = 0, session.PoolSession.connect

    async def late(conninfo: str = "", **more: Any) -> session.PoolSession:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise psycopg.OperationalError("the database system is in recovery mode")
        return await connect(conninfo, **more)

    monkeypatch.setattr(session.PoolSession, "connect", late)
    async with store.transaction(group=1):  # on the connection that is open already
        assert await store.peek([A.key]) == [None]
    assert tries == 3


async def test_a_server_that_is_too_old_is_named(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psycopg.ConnectionInfo, "server_version", 130_011)
    with pytest.raises(ConfigurationError, match="Postgres 13 is too old; 14 or newer"):
        await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)


async def test_a_standby_is_refused_and_a_primary_that_became_one_is_waited_for(
    private_postgres: PrivatePostgres, open_store: OpenStore
) -> None:
    server = private_postgres()
    with closing(Ledger(server.dsn)) as ledger:
        store = await open_store(ledger.dsn)
    await complete(store, [A])

    assert server.directory is not None
    server.kill()
    (server.directory / "data" / "standby.signal").touch()
    server.start()

    with pytest.raises(ConfigurationError, match="a standby, which takes no writes"):
        await open_store(ledger.dsn)
    with pytest.raises(StoreUnavailable):
        await complete(store, [B])
    with pytest.raises(StoreUnavailable):
        await store.count_attempt(B, None)


async def test_a_role_that_may_not_write_to_one_of_the_tables_is_refused(ledger: Ledger) -> None:
    role = sql.Identifier(f"app_{secrets.token_hex(4)}")
    with psycopg.connect(ledger.dsn, autocommit=True) as owner:
        for statement in (
            "create role {} login password " + sql.Literal(owner.info.password).as_string(),
            "grant usage on schema idemconsumer to {}",
            "grant all on all tables in schema idemconsumer to {}",
            "grant all on all sequences in schema idemconsumer to {}",
            "grant execute on all functions in schema idemconsumer to {}",
        ):
            owner.execute(sql.SQL(statement).format(role))
        theirs = make_conninfo(ledger.dsn, user=role.as_string().strip('"'))
        try:
            tables = owner.execute("select tablename from pg_tables where schemaname = %s", [SCHEMA]).fetchall()
            owner.execute("create table idemconsumer.somebody_elses ()")  # the schema may be a shared one
            await (await PostgresStore.open(theirs, SCHEMA, connections=1, longest_run=30.0)).close()
            for (table,) in set(tables) - {("migration",)}:
                name = sql.Identifier(SCHEMA, table)
                owner.execute(sql.SQL("revoke insert on {} from {}").format(name, role))
                with pytest.raises(
                    ConfigurationError, match=f"schema 'idemconsumer': INSERT on {table}; run as the schema's owner"
                ):
                    await PostgresStore.open(theirs, SCHEMA, connections=1, longest_run=30.0)
                owner.execute(sql.SQL("grant insert on {} to {}").format(name, role))
        finally:
            owner.execute(sql.SQL("drop owned by {}").format(role))
            owner.execute(sql.SQL("drop role {}").format(role))


async def test_a_database_that_cannot_hold_every_text_is_refused(postgres18: PostgresServer) -> None:
    latin1 = fresh_database(postgres18.dsn, "template template0 encoding 'LATIN1' locale 'C'")
    with latin1 as dsn, pytest.raises(ConfigurationError, match=r"encoding is LATIN1.* ENCODING 'UTF8'"):
        await PostgresStore.open(dsn, SCHEMA, connections=1, longest_run=30.0)


async def test_text_is_sent_as_utf8_whatever_the_environment_says(
    ledger: Ledger, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    store = await open_store(ledger.dsn)
    async with store.transaction(group=1) as claims:
        await claims.claim([A])
        await claims.tx().execute("insert into witness values (%s)", ("日本",))
        await claims.complete([], [])
    assert ledger.effects == ["日本"]


async def test_the_locks_of_all_lanes_stay_a_tenth_of_the_shared_table(store: PostgresStore, ledger: Ledger) -> None:
    settings = ledger.run(
        "select current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int"
    )
    assert store.most_locks == settings[0][0] // 10


async def test_a_message_that_is_taken_over_arrives_with_whatever_headers_it_had(
    ledger: Ledger, store: PostgresStore
) -> None:
    headers: dict[str, str | bytes] = {
        "text": "日本",
        "bytes": b"\xff",
        "nul": "a\0b",
        "surrogate": "\ud800",
        "n\0": "x",
    }
    given = Message("rabbitmq:orders", b"\x00\xff", headers, message_id="m-1", position="7")

    await store.take_over("~shop/pay", given)

    broker = PostgresBroker(Settings(dsn=ledger.dsn))
    session = await broker.open([Subscription("postgres:~shop/pay", "pay", "shop")], Bounds(lanes=1, group=1))
    while not (deliveries := await session.fetch()):
        pass
    arrived = restored(deliveries[0].message)
    await session.close()
    await broker.close()
    assert arrived is not None
    assert (arrived.source, arrived.position, arrived.message_id) == ("rabbitmq:orders", "7", "m-1")
    assert arrived.body == given.body
    odd = {"nul": b"a\0b", "surrogate": b"\xed\xa0\x80", "'n\\x00'": "x"}  # no text column takes these as text
    assert arrived.headers == {"text": "日本", "bytes": b"\xff", **odd}


async def test_a_rollback_that_is_cancelled_does_not_cost_the_pool_a_place(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)
    rolling_back = asyncio.Event()

    async def endless(self: psycopg.AsyncConnection[object]) -> None:
        rolling_back.set()
        await asyncio.Event().wait()

    async def abandoned() -> None:
        async with store.transaction(group=1) as claims:
            await claims.claim([A])

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "rollback", endless)
        task = asyncio.create_task(abandoned())
        await rolling_back.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await complete(store, [A])
    assert await store.peek([A.key]) == [Record(State.COMPLETED, A.fingerprint)]
    await store.close()


async def test_waiting_for_a_connection_that_others_use_is_no_outage(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)
    async with store.transaction(group=1) as claims:
        await claims.claim([A])
        with monkeypatch.context() as patch:
            patch.setattr(own_pool(store), "timeout", 0.05)  # only now: it may take longer to make one
            waiting = asyncio.create_task(complete(store, [B]))
            done, _ = await asyncio.wait({waiting}, timeout=0.5)  # ten times as long as an outage takes to be noticed
            assert not done
    await waiting
    await store.close()


# ---------------------------------------------------------------------------------------------------------- the gate
def waits_at_a_gate(ledger: Ledger, seconds: float = 0.0) -> bool:
    """Whether a store's connection has waited for an advisory lock for so long. A claim only tries to get its own."""
    rows = ledger.run(
        "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        " and wait_event = 'advisory' and clock_timestamp() - query_start > make_interval(secs => %s)",
        [seconds],
    )
    return bool(rows)


async def test_groups_with_one_gate_take_turns_and_waiting_for_it_is_no_collision(
    ledger: Ledger, open_store: OpenStore
) -> None:
    one, two = await open_store(ledger.dsn), await open_store(ledger.dsn)

    async def second() -> None:
        async with two.transaction(group=2, gate="shop") as claims:
            assert await claims.claim([B]) == [Mark.CLAIMED]
            rows = await claims.tx().execute("show lock_timeout")
            assert await rows.one() == ("50ms",)
            assert ledger.states == [State.COMPLETED], "the first one has not committed yet"
            await claims.complete([], [])

    async with asyncio.timeout(PATIENCE), one.transaction(group=2, gate="shop") as claims:
        assert await claims.claim([A]) == [Mark.CLAIMED]
        waiting = asyncio.create_task(second())
        # Far beyond the lock time-out of a group: the wait comes before that is set.
        while not waits_at_a_gate(ledger, 0.3):
            assert not waiting.done()
            await asyncio.sleep(0.01)
        for gate in ("another", None):
            async with two.transaction(group=2, gate=gate) as not_waiting:
                await not_waiting.claim([C])
        await claims.complete([], [])
        await waiting
    assert ledger.states == [State.COMPLETED] * 2


async def test_the_wait_at_the_gate_is_bounded_by_neither_the_handlers_time_nor_the_locks(
    ledger: Ledger, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = await open_store(ledger.dsn)
    tuned(monkeypatch, session_lock_patience=0.1, claim_lock_patience=0.1)
    hasty = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=-2.0)  # 3 s for a statement

    async def second() -> None:
        async with hasty.transaction(group=1, gate="shop") as claims:
            assert await claims.claim([B]) == [Mark.CLAIMED]
            bounds = "select current_setting('statement_timeout'), current_setting('lock_timeout')"
            assert await (await claims.tx().execute(bounds)).one() == ("3s", "100ms")
            await claims.complete([], [])

    async with asyncio.timeout(PATIENCE), ahead.transaction(group=1, gate="shop") as claims:
        await claims.claim([A])
        waiting = asyncio.create_task(second())
        while not waits_at_a_gate(ledger, 3.1):
            assert not waiting.done(), waiting.exception()
            await asyncio.sleep(0.01)
        await claims.complete([], [])
        await waiting
    await hasty.close()
