"""A schema that changes under running workers: what the engine prepares by itself is the engine's own affair (J28)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from typing import Any, LiteralString

import psycopg
import pytest

from idemconsumer import Reject, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.handlers.decorator import Handler
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, works
from tests.support.servers.postgres import fresh_database
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE

LANES = 4
TIME = "2026-01-01 12:00:00+00"
INSERT: LiteralString = "insert into thing (n, v) values (%s, %s)"
SELECT: LiteralString = "select * from thing where n = %s"
RETURNING: LiteralString = "update thing set n = n where n = %s returning *"

runs: Counter[str] = Counter()


@pytest.fixture(scope="module", params=["postgres18", "postgres15"])
def _one_database(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """Only from 18 on the server tells its search_path."""
    with fresh_database(request.getfixturevalue(request.param).dsn) as dsn, closing(Ledger(dsn)) as ledger:
        yield ledger


@pytest.fixture(autouse=True)
def thing(ledger: Ledger) -> Iterator[None]:
    runs.clear()
    ledger.run("create table thing (n int primary key, v text)")
    ledger.run("insert into thing (n) values (1)")
    yield
    ledger.run("drop table thing")


async def rounds(engine: Engine, handler: Handler[..., Any], name: str, most: int = 5) -> list[str]:
    """In each round as many messages at once as there are connections, so that all of them have it prepared."""
    found: list[str] = []
    for number in range(most):
        group = works(handler, *(f"{name}{number}{lane}" for lane in range(LANES)))
        found += kinds(await asyncio.gather(*map(engine.process, group)))
    return found


@pytest.fixture
async def store(ledger: Ledger) -> AsyncIterator[PostgresStore]:
    """With a single connection, on which all is prepared that ever is."""
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)
    yield store
    await store.close()


@pytest.fixture
async def lanes(ledger: Ledger) -> AsyncIterator[Engine]:
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=LANES, longest_run=30.0)
    yield Engine(store)
    await store.close()


async def one_by_one(engine: Engine, handler: Handler[..., Any], ids: Iterable[object]) -> list[str]:
    return [kinds([await engine.process(each)])[0] for each in works(handler, *ids)]


def met() -> asyncio.Barrier:
    return asyncio.Barrier(LANES)


async def looks(tx: Tx) -> None:
    await (await tx.execute(SELECT, (1,))).all()


async def returns(tx: Tx) -> None:
    await tx.execute(RETURNING, (1,))


async def sends(tx: Tx) -> None:
    await tx.send(SELECT, (1,))


async def swallows(tx: Tx) -> None:
    try:
        await looks(tx)
    except psycopg.Error:
        raise Reject("no") from None


async def borrows(tx: Tx) -> None:
    await looks(tx)
    await tx.connection.execute(SELECT, (1,), prepare=True)


@pytest.mark.parametrize("act", [looks, returns, sends, swallows, borrows], ids=lambda act: act.__name__)
async def test_a_column_that_is_added_costs_no_attempt(ledger: Ledger, lanes: Engine, act: Any) -> None:
    barrier = met()

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def acts(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        if runs[order["id"]] == 1 and order["id"] < "b":
            await barrier.wait()
        await act(tx)

    assert await rounds(lanes, acts, "a") == ["applied"] * 20
    ledger.run("alter table thing add column w text")
    assert await rounds(lanes, acts, "b") == ["applied"] * 20
    assert (ledger.attempts, ledger.letters) == ([], [])


async def test_the_first_one_that_meets_the_change_spares_all_others(
    ledger: Ledger, lanes: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, schema_calm=0)
    barrier = met()

    @idempotent_handler(SOURCE, key="id")
    async def acts(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        if runs[order["id"]] == 1 and order["id"] != "first":
            await barrier.wait()
        await looks(tx)

    await rounds(lanes, acts, "a")
    ledger.run("alter table thing add column w text")
    assert kinds([await lanes.process(*works(acts, "first"))]) == ["applied"]
    await rounds(lanes, acts, "b")
    assert {id: count for id, count in runs.items() if count > 1} == {"first": 2}


async def test_who_cannot_be_run_again_finds_nothing_prepared(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def acts(order: dict[str, Any], tx: Tx) -> None:
        await looks(tx)

    assert await one_by_one(engine, acts, range(5)) == ["applied"] * 5
    ledger.run("alter table thing add column w text")
    (suspect,) = works(acts, "suspect", suspect=True)
    assert (await engine.process(suspect)).kind == "applied"


@pytest.mark.parametrize("how", ["execute", "send", "connection"])
@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("timestamp", "timestamptz", "2026-01-01 12:00:00+05"),
        ("date", "timestamptz", "2026-01-01 12:00:00+05"),
        ("real", "double precision", "0.123456789012"),
    ],
)
async def test_text_is_read_as_the_column_that_is_there_reads_it(
    ledger: Ledger, engine: Engine, before: LiteralString, after: LiteralString, text: str, how: str
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def writes(order: dict[str, Any], tx: Tx) -> None:
        for n in range(4):  # prepared for one transaction
            given = order["id"] * 10 + n, text
            match how:
                case "execute":
                    await tx.execute(INSERT, given)
                case "send":
                    await tx.send(INSERT, given)
                case _:
                    await tx.connection.execute(INSERT, given)

    ledger.run(f"alter table thing alter v type {before} using null")
    assert await one_by_one(engine, writes, range(2, 9)) == ["applied"] * 7
    ledger.run(f"alter table thing alter v type {after}")
    assert await one_by_one(engine, writes, range(9, 13)) == ["applied"] * 4
    assert ledger.run(f"select bool_and(v = %s::{after}) from thing where n >= 90", [text]) == [(True,)]


@pytest.fixture
def tenants(ledger: Ledger) -> Iterator[None]:
    """One of them is migrated after the other."""
    ledger.run("create schema a; create schema b")
    ledger.run("grant usage on schema a, b to public")
    ledger.run("create type a.state as enum ('new'); create type b.state as enum ('new')")
    ledger.run("create table a.kept (n int, state a.state, at timestamptz)")
    ledger.run("create table b.kept (n bigint, state b.state, at timestamp, more int)")
    ledger.run(
        "create or replace function enter(text) returns void language sql as"
        " $$select set_config('search_path', $1, true)$$"
    )
    yield
    ledger.run("drop schema a cascade; drop schema b cascade")


@pytest.mark.usefixtures("tenants")
@pytest.mark.parametrize(
    "enter",
    ["set local search_path to {}", "select set_config('search_path', '{}', true)", "select enter('{}')"],
)
async def test_each_tenant_has_the_types_of_its_own_schema(ledger: Ledger, engine: Engine, enter: str) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def writes(order: dict[str, Any], tx: Tx) -> None:
        runs["all"] += 1
        await tx.execute(enter.format("a" if order["id"] % 2 else "b"))
        await tx.execute("insert into kept (n, state, at) values (%s, %s, %s)", (order["id"], "new", TIME))
        await (await tx.execute("select * from kept where n = %s", (order["id"],))).one()

    assert await one_by_one(engine, writes, range(24)) == ["applied"] * 24
    assert ledger.run("select count(*), bool_and(at = %s) from a.kept", [TIME]) == [(12, True)]
    assert (ledger.attempts, ledger.letters) == ([], [])
    assert runs["all"] <= 25, "what met it once is not prepared again and again"


@pytest.mark.usefixtures("tenants")
async def test_a_message_may_write_for_several_tenants(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def writes(order: dict[str, Any], tx: Tx) -> None:
        for tenant in ["b"] * 4 + ["a"] * 2:
            await tx.execute(f"set local search_path to {tenant}")
            await tx.execute("insert into kept (n, at) values (%s, %s)", (1, "2026-01-01 12:00:00+05"))

    assert await one_by_one(engine, writes, "a") == ["applied"]
    assert ledger.run("select count(*), bool_and(at = '2026-01-01 12:00:00+05') from a.kept") == [(2, True)]


async def test_names_that_somebody_has_dropped_cost_no_attempt(ledger: Ledger, engine: Engine) -> None:
    """A function of the database does, which psycopg does not see."""

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def acts(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        await looks(tx)
        if order["id"] == 6:
            await tx.execute("select drops()")

    ledger.run(
        "create or replace function drops() returns void language plpgsql as $$begin execute 'deallocate all'; end$$"
    )
    assert await one_by_one(engine, acts, range(9)) == ["applied"] * 9
    assert ledger.attempts == []
    assert max(runs.values()) == 2


async def test_what_is_prepared_by_the_handler_itself_is_its_own_affair(ledger: Ledger, engine: Engine) -> None:
    """It fails again where nothing of ours is prepared, and that counts."""

    @idempotent_handler(SOURCE, key="id", max_attempts=2)
    async def acts(order: dict[str, Any], tx: Tx) -> None:
        runs["all"] += 1
        await tx.execute("select executes()")

    ledger.run(
        "create or replace function executes() returns void language plpgsql as $$begin execute 'execute x'; end$$"
    )
    async with asyncio.timeout(PATIENCE):
        assert await one_by_one(engine, acts, "a") == ["retrying"]
    assert (runs["all"], ledger.attempts) == (2, [1])
