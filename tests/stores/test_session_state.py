"""J21: between messages the session is as it was. J22: the server counts idle time, and the gate has an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, LiteralString

import psycopg
import pytest

from idemconsumer import Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import Contention, Interrupted, StoreUnavailable
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import State
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.statements import Effect, special
from tests.support.ledger import SCHEMA, SOURCE, Ledger, OpenStore, kinds, to_the_end, works, write
from tests.support.tuning import tuned
from tests.support.waiting import until

Act = Callable[[Tx], Awaitable[object]]


@pytest.fixture
def store(one_connection: PostgresStore) -> PostgresStore:
    return one_connection


async def look(tx: Tx, query: Any) -> object:
    row = await (await tx.execute(query)).first()
    return None if row is None else row[0]


STATE = [
    ("set search_path = other, public", "select current_setting('search_path')"),
    ("set role pg_read_all_data", "select current_user::text"),
    ("set session authorization pg_read_all_data", "select session_user::text"),
    ("set default_transaction_read_only = off", "select current_setting('default_transaction_read_only')"),
    ("set session_replication_role = replica", "select current_setting('session_replication_role')"),
    ("set statement_timeout = 12345", "select current_setting('statement_timeout')"),
    ("set idle_in_transaction_session_timeout = 0", "select current_setting('idle_in_transaction_session_timeout')"),
    ("set my.own = 'x'", "select coalesce(current_setting('my.own', true), '')"),
    ("set session characteristics as transaction isolation level serializable",
     "select current_setting('default_transaction_isolation')"),
    ("select set_config('work_mem', '12345', false)", "select current_setting('work_mem')"),
    ("select pg_advisory_lock(7)", "select count(*) from pg_locks where locktype = 'advisory' and objid = 7"
     " and pid = pg_backend_pid()"),
    ("create temp table passing (n int)", "select to_regclass('passing')::text"),
    ("create temporary sequence passing", "select to_regclass('passing')::text"),
    ("declare held cursor with hold for select 1", "select count(*) from pg_cursors"),
    ("prepare planned as select 1", "select count(*) from pg_prepared_statements where name = 'planned'"),
    ("listen something", "select count(*) from pg_listening_channels()"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "state"), STATE, ids=[statement for statement, _ in STATE])
@pytest.mark.parametrize("together", [False, True], ids=["one after another", "in one group"])
async def test_what_a_handler_does_to_the_session_is_not_seen_by_the_next(
    book: Ledger, engine: Engine, statement: Any, state: str, together: bool
) -> None:
    seen: list[object] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] == "changes":
            await tx.connection.execute(statement)
            changed.append(await look(tx, state))
        else:
            seen.append(await look(tx, state))

    changed: list[object] = []
    before, changes, after = works(handler, "before", "changes", "after")
    assert kinds(await to_the_end(engine, [before])) == ["applied"]
    if together:
        assert kinds(await to_the_end(engine, [changes, after])) == ["applied"] * 2
    else:
        assert kinds(await engine.run([changes]) + await engine.run([after])) == ["applied"] * 2
    assert seen[0] == seen[1]
    assert statement.startswith(("listen", "declare")) or changed[0] != seen[0]


@pytest.mark.parametrize("statement", [statement for statement, _ in STATE])
async def test_through_tx_it_is_refused_with_what_to_write_instead(
    book: Ledger, engine: Engine, statement: Any
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute(statement)

    assert kinds(await engine.run(works(handler, 1))) == ["dead"]
    ((error,),) = book.run("select error from idemconsumer.dead_letter")
    known = special(statement)
    assert known is not None
    assert known.effect is Effect.REFUSED
    assert known.reason in error


@pytest.mark.parametrize(
    ("statement", "effect"),
    [
        ("set local search_path = a", Effect.PASSING),
        ("/* set x = 1 */ set local x = 1", Effect.PASSING),
        ("set transaction read only", Effect.PASSING),
        ("set constraints a deferred", Effect.PASSING),
        ("reset search_path", None),
        ("create temp table t (n int) on commit drop", Effect.PASSING),
        ("declare c cursor for select 'with hold'", Effect.PASSING),
        ("select pg_advisory_xact_lock(1)", None),
        ("select set_config('a.b', 'false', true)", Effect.PASSING),
        ("insert into note values ('set_config(''a'', ''b'', false); pg_advisory_lock(1)')", None),
        ("update settings set note = 'x'", None),
        ("select 1;", None),
        ("-- look\n ; set role x", Effect.REFUSED),
        ("Set Session x = 1", Effect.REFUSED),
        ("discard all", Effect.REFUSED),
        ("load 'x'", Effect.REFUSED),
        ("unlisten *", Effect.REFUSED),
        ("select pg_try_advisory_lock(1)", Effect.REFUSED),
        ("create or replace temp view v as select 1", Effect.REFUSED),
        ("select set_config(%s, %s, %s)", Effect.UNSEEN),
        ("do $$ begin perform 1; end $$", Effect.UNSEEN),
        ("call run()", Effect.UNSEEN),
        ("select 1; set x = 1", Effect.UNSEEN),
        (" RESET all ;", Effect.RESET_ALL),
        ("set constraints ALL immediate", Effect.ALL_IMMEDIATE),
        ("set constraints all deferred", Effect.PASSING),
    ],
)
def test_what_a_text_tells(statement: str, effect: Effect | None) -> None:
    known = special(statement)
    assert (None if known is None else known.effect) is effect


async def test_what_no_text_shows_is_reset_too(book: Ledger, engine: Engine) -> None:
    seen: list[object] = []

    @idempotent_handler(SOURCE, key="id")
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        seen.append(await look(tx, "select coalesce(current_setting('my.own', true), '')"))
        await tx.execute("do $$ begin perform set_config('my.own', 'x', false); end $$")

    assert kinds(await to_the_end(engine, works(handler, 1, 2, 3))) == ["applied"] * 3
    assert seen == [""] * 3


HIDDEN = [
    ("set_config('search_path', 'other, public', false)", "select current_setting('search_path')"),
    ("set_config('role', 'pg_read_all_data', false)", "select current_user::text"),
    ("set_config('session_authorization', 'pg_read_all_data', false)", "select session_user::text"),
    ("set_config('session_replication_role', 'replica', false)", "select current_setting('session_replication_role')"),
    ("set_config('statement_timeout', '1', false)", "select current_setting('statement_timeout')"),
    ("set_config('default_transaction_read_only', 'off', false)",
     "select current_setting('default_transaction_read_only')"),
    ("set_config('TimeZone', 'Asia/Tokyo', false)", "select current_setting('TimeZone')"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "state"), HIDDEN, ids=[call for call, _ in HIDDEN])
async def test_what_a_function_of_the_database_does_to_the_session_is_not_seen_by_the_next_transaction(
    book: Ledger, engine: Engine, call: str, state: str
) -> None:
    await after_a_function_that_changes_the_session(book, engine, call, state, together=False)


@pytest.mark.parametrize(("call", "state"), HIDDEN[:5], ids=[call for call, _ in HIDDEN[:5]])
async def test_what_a_function_of_the_database_does_to_the_session_is_found_in_a_group(
    book: Ledger, engine: Engine, call: str, state: str
) -> None:
    await after_a_function_that_changes_the_session(book, engine, call, state, together=True)


async def after_a_function_that_changes_the_session(
    book: Ledger, engine: Engine, call: str, state: str, *, together: bool
) -> None:
    """The text of a statement does not show it, so it is the session that is looked at."""
    seen: list[object] = []
    book.run("create schema if not exists other")
    define: Any = f"create or replace function hidden() returns text language sql as $$ select {call} $$"
    book.run(define)

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] == "changes":
            await tx.execute("select hidden()")
        else:
            seen.append(await look(tx, state))

    before, changes, after = works(handler, "before", "changes", "after")
    assert kinds(await to_the_end(engine, [before])) == ["applied"]
    if together:
        ended = kinds(await to_the_end(engine, [changes, after]))
    else:
        ended = kinds(await engine.run([changes]) + await engine.run([after]))
    assert ended[1] == "applied"
    assert seen[0] == seen[-1], "of the run that was committed"


async def test_a_small_commit_of_the_engine_is_not_another_roles(
    book: Ledger, store: PostgresStore, engine: Engine
) -> None:
    book.run(
        "create or replace function hidden() returns text language sql as"
        " $$ select set_config('role', 'pg_read_all_data', false) $$"
    )

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("select hidden()")

    changes, other = works(handler, 1, 2)
    assert kinds(await engine.run([changes])) == ["applied"]
    assert await store.count_attempt(other.claim, "why") == 1


async def test_a_function_that_changes_the_session_for_its_transaction_alone_is_found_in_a_group(
    book: Ledger, engine: Engine
) -> None:
    book.run("create schema if not exists other")
    book.run("create table if not exists other.witness (like public.witness)")
    book.run(
        "create or replace function hidden() returns text language sql as"
        " $$ select set_config('search_path', 'other, public', true) $$"
    )

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("insert into witness (id) values (%s)", (order["id"],))
        await tx.execute("select hidden()")

    assert kinds(await to_the_end(engine, works(handler, *"abc"))) == ["applied"] * 3
    assert book.effects == [*"abc"]


@pytest.mark.parametrize("through", ["tx", "connection"])
@pytest.mark.parametrize("statement", ["reset all", "set constraints all immediate"])
async def test_what_is_legitimate_works(book: Ledger, engine: Engine, through: str, statement: Any) -> None:
    book.run("create table if not exists parent (id int primary key)")
    book.run("create table if not exists child (parent int references parent deferrable initially deferred)")

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == "orphan":
            await tx.execute("insert into child values (1)")
        await (tx if through == "tx" else tx.connection).execute(statement)
        if order["id"] == "commits":
            await tx.connection.execute("select 1; commit")

    group = works(handler, 1, 2, "orphan", "commits", 3)
    assert kinds(await to_the_end(engine, group)) == ["applied", "applied", "dead", "dead", "applied"]
    assert book.effects == ["1", "2", "3"]
    assert book.states == [State.COMPLETED] * 3 + [State.DEAD] * 2
    (orphan,), (commits,) = book.run("select error from idemconsumer.dead_letter order by id")
    assert "violates foreign key" in orphan
    assert "somebody other than the engine" in commits


async def test_reset_all_through_tx_works_though_its_connection_was_taken(book: Ledger, engine: Engine) -> None:
    async def use(tx: Tx) -> None:
        await tx.connection.execute("select 1")
        await tx.execute("reset all")
        await write(tx, "mine")

    assert await alone(engine, use) == ["applied"]
    assert book.effects == ["mine"]


async def test_a_reset_does_not_vouch_for_another_transaction(book: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, "before")
        await tx.connection.execute("select 1; rollback; begin read write")
        if order["id"] != "silent":
            await tx.execute("reset all")
        await write(tx, "after")

    assert kinds(await to_the_end(engine, works(handler, "silent", "resets"))) == ["dead"] * 2
    assert book.effects == []


async def test_a_reset_between_handlers_does_not_vouch_for_another_transaction_either(
    book: Ledger, engine: Engine
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=2)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] == "bad":
            await tx.connection.execute("select 1; rollback; begin read write")
        await write(tx, order["id"])

    assert kinds(await to_the_end(engine, works(handler, "bad", "good"))) == ["dead", "applied"]
    assert book.effects == ["good"]


# ------------------------------------------------------------------------------------------------ idle time, the gate
async def in_pipeline(connection: psycopg.AsyncConnection[Any]) -> None:
    async with connection.pipeline():
        await connection.execute("select 1")


async def many(connection: psycopg.AsyncConnection[Any]) -> None:
    await connection.cursor().executemany("select %s", [(1,), (2,)])


async def failing_pipeline(connection: psycopg.AsyncConnection[Any]) -> None:
    with suppress(KeyError):
        async with connection.pipeline():
            await connection.execute("select 1")
            raise KeyError


@pytest.mark.parametrize("use", [in_pipeline, many, failing_pipeline])
@pytest.mark.parametrize("frozen", ["in its handler", "after its handler"])
async def test_a_worker_that_freezes_after_a_pipeline_is_cut_off(
    book: Ledger, use: Callable[[psycopg.AsyncConnection[Any]], Awaitable[None]], frozen: str
) -> None:
    store = await PostgresStore.open(book.dsn, SCHEMA, connections=1, longest_run=-4.5)  # 0.5 s, by the server
    alive = "select 1 from pg_stat_activity where pid = %s"

    async def freeze() -> None:
        async with store.transaction(group=1) as claims:
            await claims.claim([Claim(b"k" * 32, "shop//pay", None)])
            connection = claims.tx().connection
            pid = connection.info.backend_pid
            await use(connection)
            if frozen == "after its handler":
                claims.check()
                await claims.restore()
            await until(lambda: not book.run(alive, [pid]), "the session lives on", within=10)
            await claims.complete([], [])

    try:
        with pytest.raises((Interrupted, StoreUnavailable)):
            await freeze()
    finally:
        await store.close()


async def test_whoever_waits_at_the_gate_comes_again_after_a_while(
    book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, gate_patience=0.1)
    store = await PostgresStore.open(book.dsn, SCHEMA, connections=2, longest_run=30.0)
    ahead, behind = Claim(b"a" * 32, "shop//pay", None), Claim(b"b" * 32, "shop//pay", None)
    async with store.transaction(group=2, gate="shop") as frozen:
        await frozen.claim([ahead])
        async with asyncio.timeout(20):
            with pytest.raises(Contention, match="55P03"):
                async with store.transaction(group=2, gate="shop") as waits:
                    await waits.claim([behind])
    await store.close()


AUDIT: list[LiteralString] = [
    "create table audit (tenant text, id text)",
    "create function note() returns trigger language plpgsql as $$ begin "
    "insert into audit values (current_setting('app.tenant', true), new.id); return null; end $$",
    "create constraint trigger noted after insert on witness deferrable initially deferred for each row "
    "execute function note()",
]


@pytest.mark.parametrize("through", ["tx", "connection"])
async def test_what_a_message_that_is_alone_sets_lasts_until_its_deferred_triggers_have_run(
    ledger: Ledger, open_store: OpenStore, through: str
) -> None:
    for statement in AUDIT:
        ledger.run(statement)

    async def set_local(tx: Tx) -> None:
        execute: Any = tx.execute if through == "tx" else tx.connection.execute
        await execute("select set_config('app.tenant', 'acme', true)")
        await write(tx, "mine")

    assert await alone(Engine(await open_store(ledger.dsn)), set_local) == ["applied"]
    assert ledger.run("select * from audit") == [("acme", "mine")]


async def test_temporary_tables_with_deferred_constraints_work(book: Ledger, engine: Engine) -> None:
    async def use(tx: Tx) -> None:
        execute = tx.connection.execute
        await execute("create temp table parent (id int primary key) on commit drop")
        await execute("create temp table child (id int references parent deferrable initially deferred) on commit drop")
        await execute("insert into child values (1)")
        await execute("insert into parent values (1)")
        await write(tx, "mine")

    assert await alone(engine, use) == ["applied"]
    assert book.effects == ["mine"]


async def test_the_role_that_a_handler_took_writes_nothing_of_the_engines(book: Ledger, engine: Engine) -> None:
    """That role may write no record."""
    assert await alone(engine, lambda tx: tx.connection.execute("set local role pg_read_all_data")) == ["applied"]


async def test_a_session_that_cannot_be_reset_is_closed(
    book: Ledger, store: PostgresStore, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[object] = []

    async def look_around(tx: Tx) -> None:
        pids.append(await look(tx, "select pg_backend_pid()"))

    async def take(tx: Tx) -> None:
        await look_around(tx)
        await tx.connection.execute("set statement_timeout = 12345")

    monkeypatch.setitem(store.pool.queries, "reset_session", b"select 1/0")  # all stores of the schema share them
    assert await alone(engine, take, 1) == ["applied"]
    assert await alone(engine, look_around, 2) == ["applied"]
    assert len(set(pids)) == 2


async def alone(engine: Engine, act: Act, id: object = 1) -> list[str]:
    @idempotent_handler(SOURCE, key="id", name="acts", max_attempts=1)
    async def handler(order: dict[str, Any], tx: Tx) -> dict[str, int]:
        await act(tx)
        return {"n": 1}  # a result is stored

    return kinds(await engine.run(works(handler, id)))
