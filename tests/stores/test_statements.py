"""J21: what the text of a statement tells about the session, and what the engine says in its own words."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from psycopg import sql
from psycopg.adapt import Dumper

from idemconsumer import Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.statements import Effect, special, writes
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, to_the_end, works

CHANGES = [
    ("set/**/search_path = other, public", Effect.REFUSED),
    ("SeT/* x */sTatement_timeout = 12345", Effect.REFUSED),
    ("/* /* a */ b */ set search_path = other", Effect.REFUSED),
    ("-- a\rset search_path = other", Effect.REFUSED),
    ('set "local".x = 1', Effect.REFUSED),
    ("select pg_advisory_lock/**/(7)", Effect.REFUSED),
    ('select "pg_advisory_lock"(7)', Effect.REFUSED),
    ('select"pg_advisory_lock"(7)', Effect.REFUSED),
    ("select pg_catalog.\"set_config\"('search_path','other',false)", Effect.REFUSED),
    ("select set_config('search_path','other', not true)", Effect.UNSEEN),
    ("select set_config('search_path', lower('OTHER'), false), set_config('app.y','b',true)", Effect.REFUSED),
    ("select set_config('search_path', f(g(1), h(2)), 1 = 2), set_config('app.y','b',true)", Effect.UNSEEN),
    ("select set_config(new_value => 'b', is_local => false, setting_name => 'a')", Effect.UNSEEN),
    ("update pg_settings set setting='other' where name='search_path'", Effect.UNSEEN),
    ("create temp/**/table zz(n int)", Effect.REFUSED),
    ("select 1 as n into local temp zz", Effect.UNSEEN),
    ("select 1 as n into/**/temporary zz", Effect.UNSEEN),
    ("explain analyze create temp table zz as select 1", Effect.UNSEEN),
    ("create table pg_temp.zz(n int)", Effect.UNSEEN),
    ("set local search_path = 'pg_temp'", Effect.UNSEEN),
    ("declare held cursor with/**/hold for select 1", Effect.REFUSED),
    ('declare "for" cursor with hold for select 1', Effect.REFUSED),
    ("select U&\"pg\\005fadvisory_lock\"(7)", Effect.UNSEEN),
    ("select query_to_xml('set x = 1', true, true, '')", Effect.UNSEEN),
    ("select 'a\\', ', pg_advisory_lock(7), '", Effect.UNSEEN),
    ("select 1$$'$$, pg_advisory_lock(7) as \"'\"", Effect.UNSEEN),
    ("select a$$, 1; set x = '$$'", Effect.UNSEEN),
    ("rollback/* to */ and chain", Effect.REFUSED),
    ("start/**/transaction", Effect.REFUSED),
    ("explain analyze execute planned", Effect.UNSEEN),
]  # fmt: skip
ENDS = [
    "set/**/constraints a deferred",
    "set constraints é deferred",
    "set /* x */ local statement_timeout = 1",
    "select set_config('a.b', lower('X'), true), set_config ('a.c', %s, TRUE)",
    "create local temporary table t on commit drop as select 1",
    "explain analyze create temp table t on commit drop as select 1",
    "declare/**/c scroll cursor for select 1",
    "savepoint /* x */ a",
    "rollback /* x */ to a",
]
ROLES = [
    "set local role a",
    'set/**/local "role" = a',
    "SET LOCAL ROLE a",
    "set local session authorization a",
    "set local session_authorization = a",
    "set local session/**/authorization default",
    "select set_config('role', %s, true)",
    "select set_config ( 'Session_Authorization' , %s, true)",
    "select set_config('ro'\n'le', 'a', true)",
    "select set_config(E'r\\x6fle', 'a', true)",
    "select set_config($$role$$, 'a', true)",
    "select set_config(%s, %s, true)",
    "select set_config(%s, %s, true) -- set_config('a.b', ",
    "select set_config('a.b', 'x', true), set_config(lower('ROLE'), 'a', true)",
]
WORKS = [
    "release /* x */ a",
    "lock table t in share mode",
    "fetch next from c",
    r"insert into t values (E'it\'s; pg_advisory_lock(1) ')",
    r"insert into t values (E'it''s\'; set_config(''a'', ''b'', false)')",
    "insert into t values ($a$ ; pg_advisory_lock(1) $$ $a$);",
    "insert into t values ('/*', 'pg_advisory_lock(1)', '*/')",
    'update t set "with hold" = 1, attempts = 2, temp = 3 -- ; set x = 1',
    "select pg_advisory_xact_lock(1)",
]
OWN = {
    Effect.ALL_IMMEDIATE: ["set constraints all immediate -- now", "set constraints all /* every */ immediate;"],
    Effect.RESET_ALL: ["reset all /* x */", "/* /* */ */ reset/**/all ; "],
    Effect.NOT_ALONE: [
        "reset all; select 1",
        "select 1; reset /* x */ all",
        "set constraints all immediate; select 1",
        "do $$ begin reset/**/all; end $$",
        "do $a$ begin set constraints all immediate; end $a$",
    ],
}  # fmt: skip


def effect_of(statement: str) -> Effect | None:
    known = special(statement)
    return None if known is None else known.effect


@pytest.mark.parametrize(("statement", "effect"), CHANGES)
def test_no_way_of_writing_hides_a_change_of_the_session(statement: str, effect: Effect) -> None:
    assert effect_of(statement) is effect


@pytest.mark.parametrize("statement", WORKS)
def test_what_changes_nothing_is_sent_as_it_is(statement: str) -> None:
    assert effect_of(statement) is None


@pytest.mark.parametrize("statement", ENDS)
def test_what_ends_with_the_transaction_is_of_one_message(statement: str) -> None:
    assert effect_of(statement) is Effect.PASSING


@pytest.mark.parametrize("statement", ROLES)
def test_no_way_of_writing_hides_another_role(statement: str) -> None:
    assert effect_of(statement) is Effect.UNSEEN


@pytest.mark.parametrize(("effect", "statement"), [(effect, one) for effect, all_ in OWN.items() for one in all_])
def test_what_the_engine_says_in_its_own_words(statement: str, effect: Effect) -> None:
    assert effect_of(statement) is effect


LONG = [
    ("insert into t values " + ",".join(f"('{n}')" for n in range(100_000)), None),
    ("insert into t values " + ",".join(f"($t{n}$;$t{n}$)" for n in range(10_000)), Effect.UNSEEN),
    ("do " + " ".join(f"$t{n}$" for n in range(10_000)), Effect.UNSEEN),
    ("/* */" * 100_000 + "select 1", Effect.UNSEEN),
    ("set x = '" + "a" * 1_000_000 + "'", Effect.REFUSED),
    ("select " + "e'\\'" * 4_000, None),
    ("select ';" + "e'\\'" * 4_000, Effect.UNSEEN),
    ("select ;" + "/*" * 7_000, None),
    ("select ;" + "".join(f"$t{n}$" for n in range(2_000)), Effect.UNSEEN),
]


@pytest.mark.parametrize(("statement", "effect"), LONG, ids=[text[:20] for text, _ in LONG])
def test_a_long_text_does_not_hold_up_the_loop(statement: str, effect: Effect | None) -> None:
    begun = time.process_time()
    assert effect_of(statement) is effect
    assert time.process_time() - begun < 1.0  # the worst of them takes a hundredth of it, and took seconds


def test_long_texts_are_not_kept() -> None:
    kept = special.__self__  # type: ignore[attr-defined]
    special("select '" + "x" * 5_000 + "'")
    assert max(map(len, kept)) <= 4_096
    for n in range(3_000):
        special(f"select {n}")
    assert len(kept) <= 1_024


# ------------------------------------------------------------------------------------------------------ on the server
@pytest.fixture
async def engine(book: Ledger) -> AsyncIterator[Engine]:
    """With a single connection, which every message gets."""
    store = await PostgresStore.open(book.dsn, SCHEMA, connections=1, longest_run=30.0)
    yield Engine(store)
    await store.close()


@pytest.mark.parametrize(
    "statement",
    [
        "select set_config('search_path', 'other', not true)",
        "update pg_settings set setting = 'other' where name = 'search_path'",
        "select 1 as n into local temp zz",
        "explain analyze create temp table zz as select 1",
        r'select U&"pg\005fadvisory_lock"(7)',
    ],
)
async def test_what_may_have_changed_the_session_is_reset(engine: Engine, statement: Any) -> None:
    seen: list[object] = []
    state = (
        "select current_setting('search_path') || coalesce(to_regclass('zz')::text, '') || count(*) from pg_locks"
        " where locktype = 'advisory' and objid = 7 and pid = pg_backend_pid()"
    )

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        seen.append(await (await tx.execute(state, into=str)).one())
        await tx.execute(statement)
        changed.append(await (await tx.execute(state, into=str)).one())

    changed: list[object] = []
    assert kinds(await to_the_end(engine, works(handler, 1, 2))) == ["applied"] * 2
    assert seen[0] == seen[1] != changed[0]


async def through_tx(tx: Tx, statement: Any) -> object:
    return await tx.execute(statement, [])


async def through_the_connection(tx: Tx, statement: Any) -> object:
    return await tx.connection.execute(statement, [])


@pytest.mark.parametrize("send", [through_tx, through_the_connection])
@pytest.mark.parametrize(
    ("statement", "outcome"),
    [
        ("reset all /* x */", "applied"),
        ("set constraints all /* every */ immediate -- now", "applied"),
        ("reset all; select 1", "dead"),
        ("do $$ begin set constraints all immediate; end $$", "dead"),
    ],
)
async def test_it_works_or_says_how(
    book: Ledger, engine: Engine, send: Callable[[Tx, Any], Awaitable[object]], statement: Any, outcome: str
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await send(tx, statement)

    assert kinds(await to_the_end(engine, works(handler, 1))) == [outcome]
    for (error,) in book.run("select error from idemconsumer.dead_letter"):
        assert "send it alone, not inside DO" in error


class Sku:
    """A type of the handler's own."""


class SkuDumper(Dumper):
    def dump(self, obj: Sku) -> bytes:
        return b"reset all"


async def test_a_literal_of_a_type_of_the_connection_is_read(book: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        tx.connection.adapters.register_dumper(Sku, SkuDumper)
        insert: Any = sql.SQL("insert into witness values ({}, 'a')").format(sql.Literal(Sku()))
        await tx.execute(insert)
        await tx.connection.execute(insert)

    assert kinds(await to_the_end(engine, works(handler, 1))) == ["applied"]
    assert book.effects == ["reset all"] * 2


@pytest.mark.parametrize(
    ("query", "does"),
    [
        ("insert into a select * from b", True),
        (" \nUPDATE a set n = 1", True),
        ("delete from a", True),
        ("merge into a using b on true when matched then delete", True),
        ("with b as (select 1) insert into a select * from b", True),
        ("with b as materialized (\n  delete from a returning n) select * from b", True),
        ("select 1", False),
        ("select pg_advisory_xact_lock(1)", False),
        ("select * from a for update", False),
        ("with b as (select * from a for update) select 1", False),
        ("with b as (select * from a for no key\n update) select 1", False),
        ("values (1)", False),
        ("updated", False),
    ],
)
def test_what_writes(query: str, does: bool) -> None:
    assert writes(query) is does
