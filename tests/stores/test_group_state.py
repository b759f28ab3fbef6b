"""G6: what a message leaves in its transaction is not there for the next one of its group, nor can that one undo it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, LiteralString

import psycopg
import pytest

from idemconsumer import Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SOURCE, Ledger, OpenStore, kinds, to_the_end, works, write
from tests.support.servers.made import PrivatePgBouncer
from tests.support.servers.pgbouncer import carry

Act = Callable[[Tx, Any], Awaitable[object]]


@pytest.fixture
def store(one_connection: PostgresStore) -> PostgresStore:
    return one_connection


async def through_tx(tx: Tx, statement: Any) -> object:
    return await tx.execute(statement)


async def through_the_connection(tx: Tx, statement: Any) -> object:
    return await tx.connection.execute(statement)


either = pytest.mark.parametrize("send", [through_tx, through_the_connection])


@either
@pytest.mark.parametrize("create", ["create temp table if not exists", "create temporary table"])
async def test_each_message_has_a_temporary_table_of_its_own(
    book: Ledger, engine: Engine, send: Act, create: str
) -> None:
    runs: list[object] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        runs.append(order["id"])
        await send(tx, f"{create} staging (id text) on commit drop")
        await tx.execute("insert into staging values (%s)", (order["id"],))
        await tx.execute("insert into witness (id) select id from staging")

    assert kinds(await to_the_end(engine, works(handler, *"abcd"))) == ["applied"] * 4
    assert book.effects == runs == [*"abcd"]


STATE = [
    ("declare c cursor for select 1", "select count(*)::text from pg_cursors where name = 'c'"),
    ("set local search_path = other, public", "select current_setting('search_path')"),
    ("select set_config('app.tenant', 'a', true)", "select coalesce(current_setting('app.tenant', true), '')"),
    ("set local role pg_read_all_data", "select current_user::text"),
    ("savepoint s", "select '' || 1"),
]


@either
@pytest.mark.parametrize(("statement", "state"), STATE)
async def test_what_would_end_with_the_transaction_ends_with_its_message(
    book: Ledger, engine: Engine, send: Act, statement: str, state: LiteralString
) -> None:
    seen: list[object] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        seen.append(await (await tx.execute(state, into=str)).one())
        await write(tx, order["id"])
        await send(tx, statement)

    assert kinds(await to_the_end(engine, works(handler, *"abc"))) == ["applied"] * 3
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert book.effects == [*"abc"]


@either
@pytest.mark.parametrize(
    "statement",
    ["set constraints all deferred", "set constraints all immediate", "set transaction read write",
     "do $$ begin set constraints all deferred; end $$", "set /* */ local transaction read write"],
)  # fmt: skip
async def test_nobody_follows_in_a_transaction_that_cannot_be_made_as_it_was(
    book: Ledger, engine: Engine, send: Act, statement: str
) -> None:
    seen: dict[object, int] = {}

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        seen[order["id"]] = await (await tx.execute("select pg_current_xact_id()::text::bigint", into=int)).one()
        await write(tx, order["id"])
        if order["id"] == "b":
            await send(tx, statement)

    assert kinds(await to_the_end(engine, works(handler, *"abcd"))) == ["applied"] * 4
    assert seen["a"] == seen["b"]
    assert seen["c"] == seen["d"] != seen["b"]
    assert book.effects == [*"abcd"]


async def test_what_ends_with_the_transaction_costs_no_prepared_statement(book: Ledger, engine: Engine) -> None:
    names: list[list[str]] = []

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        names.append(await (await tx.execute("select name from pg_prepared_statements", into=str)).all())
        await tx.execute("select set_config('app.tenant', 'a', true)")

    assert kinds(await to_the_end(engine, works(handler, *range(6)))) == ["applied"] * 6
    assert names[-1]


# ----------------------------------------------------------------------------------------------------------- savepoints
@either
@pytest.mark.parametrize("catches", [False, True])
async def test_nobody_rolls_back_to_the_savepoint_of_a_neighbour(
    book: Ledger, engine: Engine, send: Act, catches: bool
) -> None:
    runs: list[object] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        runs.append(order["id"])
        if order["id"] != "invalid":
            await send(tx, "savepoint s")
            await write(tx, order["id"])
            return
        await write(tx, order["id"])
        try:
            await send(tx, "rollback to savepoint s")
        except psycopg.Error:
            if not catches:
                raise

    outcomes = kinds(await to_the_end(engine, works(handler, "one", "two", "invalid", "three")))
    assert outcomes == ["applied", "applied", "dead", "applied"]  # as it would alone: there is no such savepoint
    assert book.effects == ["one", "three", "two"]
    assert runs.count("three") == 1


@either
async def test_a_savepoint_of_ones_own_works_whoever_has_one_of_that_name(
    book: Ledger, engine: Engine, send: Act
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        await send(tx, "savepoint s")
        await write(tx, "undone")
        await send(tx, "rollback to s")
        if order["id"] == "b":
            await send(tx, "release s")

    assert kinds(await to_the_end(engine, works(handler, *"abc"))) == ["applied"] * 3
    assert book.effects == [*"abc"]


# ---------------------------------------------------------------------------------------------------------------- roles
ROLES: list[LiteralString] = [
    "set local role clerk",
    "select set_config('role', 'clerk', true)",
    "set local session authorization clerk",
]


def clerk(ledger: Ledger) -> None:
    """A role that may write effects, and nothing of the engine's."""
    ledger.run("do $$ begin create role clerk; exception when duplicate_object then null; end $$")
    ledger.run("grant insert, select on witness to clerk")


@either
@pytest.mark.parametrize("statement", ROLES)
@pytest.mark.parametrize("ids", ["a", "abc"])
async def test_a_handler_may_take_a_role_that_may_write_no_record(
    book: Ledger, engine: Engine, send: Act, statement: LiteralString, ids: str
) -> None:
    clerk(book)
    roles: list[str] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> dict[str, int]:
        await send(tx, statement)
        roles.append(await (await tx.execute("select current_user::text", into=str)).one())
        await write(tx, order["id"])
        return {"n": 1}

    for _ in range(2):  # in the same session
        assert set(kinds(await to_the_end(engine, works(handler, *ids)))) <= {"applied", "duplicate"}
    assert book.effects == [*ids]
    assert set(roles) == {"clerk"}


@pytest.mark.parametrize("statement", ROLES)
@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_role_ends_with_its_handler_behind_a_pooler_too(
    ledger: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore, statement: LiteralString, mode: str
) -> None:
    clerk(ledger)
    carry(ledger.dsn)
    engine = Engine(await open_store(private_pgbouncer(ledger.dsn, mode).dsn))

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handler(order: dict[str, Any], tx: Tx) -> dict[str, int]:
        await tx.execute(statement)
        await write(tx, order["id"])
        return {"n": 1}

    assert kinds(await to_the_end(engine, works(handler, "alone"))) == ["applied"]
    assert kinds(await to_the_end(engine, works(handler, "one", "two"))) == ["applied"] * 2
    assert ledger.effects == ["alone", "one", "two"]
