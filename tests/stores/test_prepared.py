"""Statements that a handler runs again and again: the same effects and errors, whoever sends them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg._queries import PostgresQuery

from idemconsumer import Tx
from idemconsumer.rules.habits import Habits
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.prepared import PreparedStatements
from idemconsumer.stores.tx import PostgresTx
from tests.support.inside import converted
from tests.support.ledger import SCHEMA, Ledger
from tests.support.tuning import tuned

INSERT = "insert into item (id, qty) values (%s, %s)"
UPDATE = "update item set qty = %s where id = %s"


@pytest.fixture
async def store(ledger: Ledger) -> AsyncIterator[PostgresStore]:
    """With a single connection, and a table that takes nothing twice."""
    ledger.run("create table item (id text primary key, qty bigint)")
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)
    yield store
    await store.close()


@pytest.fixture
async def tx(store: PostgresStore, waits: None) -> AsyncIterator[Tx]:
    """That of one transaction, as a handler has it."""
    async with store.transaction(group=1) as claims:
        await claims.begin()
        yield claims.tx(Habits())


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent ahead unless the handler asks for that."""
    tuned(monkeypatch, runs_before_ahead=1_000)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was sent by its name, without a cursor."""
    names: list[bytes] = []
    send = PreparedStatements._sent

    def sent(self: PreparedStatements, name: bytes, converted: Any) -> Generator[Any, Any, Any]:
        names.extend([name] if name else [])
        return send(self, name, converted)

    monkeypatch.setattr(PreparedStatements, "_sent", sent)
    return names


async def items(tx: Tx) -> list[tuple[Any, ...]]:
    return await (await tx.execute("select id, qty from item order by id")).all()


async def test_a_statement_that_was_run_often_is_sent_by_its_name_and_does_what_it_did(
    tx: Tx, named: list[bytes]
) -> None:
    for number in range(6):
        rows = await tx.execute(INSERT, (f"i{number}", number))
        assert (rows.rowcount, await rows.all()) == (1, [])
        assert len(named) == max(0, number - 2)
    assert await items(tx) == [(f"i{number}", number) for number in range(6)]
    written = [
        (await tx.execute("update item set qty = %(qty)s where qty < %(least)s", {"least": least, "qty": 9})).rowcount
        for least in (1, 1, 2, 4, 9)
    ]
    assert (written, len(named)) == ([1, 0, 1, 2, 2], 5)


async def test_parameters_of_other_types_have_a_name_of_their_own(tx: Tx, named: list[bytes]) -> None:
    sizes = [1, 2**40, None, 2, 2**41, 3, 4, None, 2**42, 5, 2**43]
    for number, size in enumerate(sizes):
        await tx.execute(INSERT, (f"i{number:02}", size))
    assert [qty for _, qty in await items(tx)] == sizes
    assert (len(named), len(set(named))) == (3, 2)  # the small ones 4 and 5, and the large 2**43


async def test_what_returns_rows_has_no_parameters_or_is_no_text_goes_its_old_way(tx: Tx, named: list[bytes]) -> None:
    for number in range(6):
        rows = await tx.execute("insert into item (id) values (%s) returning id", (str(number),))
        assert await rows.one() == (str(number),)
        await tx.execute("update item set qty = 0")
        await tx.execute(psycopg.sql.SQL("update item set qty = {}").format(number))  # type: ignore[call-overload]
        assert (await (await tx.execute("select %s + 1", (number,), into=int)).one()) == number + 1
    assert named == []


async def test_an_error_is_the_same_and_names_the_same_things(tx: Tx) -> None:
    for number in range(4):
        await tx.execute(INSERT, (str(number), 0))
    with pytest.raises(psycopg.ProgrammingError, match="the query has 2 placeholders but 1 parameters were passed"):
        await tx.execute(INSERT, ("few",))
    with pytest.raises(psycopg.errors.UniqueViolation, match="item_pkey"):
        await tx.execute(INSERT, ("3", 0))


async def test_statements_of_two_tasks_at_once_keep_their_parameters(tx: Tx, named: list[bytes]) -> None:
    for number in range(3):
        await tx.execute(INSERT, (f"i{number}", number))
    await asyncio.gather(*(tx.execute(INSERT, (f"i{number}", number)) for number in range(3, 9)))
    assert await items(tx) == [(f"i{number}", number) for number in range(9)]
    assert len(named) == 6


@pytest.mark.parametrize("how", ["the transaction", "a savepoint", "deallocate all", "drop table other"])
async def test_what_drops_the_names_costs_nobody_an_error(
    store: PostgresStore, ledger: Ledger, named: list[bytes], waits: None, how: str
) -> None:
    """psycopg answers each of these with DEALLOCATE ALL, also where only it has prepared something."""
    ledger.run("create table other ()")
    ledger.run("grant all on other to public")
    with suppress(LookupError):
        async with store.transaction(group=1) as claims:
            await claims.begin()
            tx = claims.tx(Habits())
            for number in range(6):
                await (await tx.execute("select %s + 1", (number,), into=int)).one()
                await tx.execute(UPDATE, (number, "nobody"))
            if how == "the transaction":
                raise LookupError
            if how == "a savepoint":
                await tx.execute("savepoint here")
                await tx.execute("rollback to savepoint here")
            else:
                await tx.execute(how)
            await tx.execute(UPDATE, (1, "nobody"))
    before = len(named)
    async with store.transaction(group=1) as claims:
        await claims.begin()
        tx = claims.tx(Habits())
        for number in range(6):
            await tx.execute(INSERT, (f"i{number}", number))
            await tx.execute(UPDATE, (number + 1, f"i{number}"))
        assert await items(tx) == [(f"i{number}", number + 1) for number in range(6)]
    assert len(named) > before


async def test_names_that_are_of_no_use_any_more_are_dropped_together(
    store: PostgresStore, waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of statements with text are of one transaction each (J28)."""
    tuned(monkeypatch, passing_names=2)
    kept: list[int] = []
    for number in range(9):
        async with store.transaction(group=1) as claims:
            await claims.begin()
            tx = claims.tx(Habits())
            for run in range(4):
                await tx.execute(INSERT, (f"i{number}-{run}", number))
            await tx.execute("update item set qty = %s", (number,))
            kept.append(await (await tx.execute("select count(*) from pg_prepared_statements", into=int)).one())
            await claims.complete([], [])
    assert max(kept) == 2
    assert min(kept[3:]) == 1


async def test_what_one_transaction_has_prepared_is_prepared_at_once_in_the_next_one(store: PostgresStore) -> None:
    """Where it is sent ahead, that costs no round trip; one that each transaction runs once is not prepared (J28)."""
    names: list[int] = []
    for runs in (1, 1, 3, 1):
        async with store.transaction(group=1) as claims:
            await claims.begin()
            tx = claims.tx(Habits())
            for run in range(runs):
                await tx.send(INSERT, (f"i{len(names)}-{run}", 1))
            inserts = "select count(*) from pg_prepared_statements where statement like 'insert%'"
            names.append(await (await tx.execute(inserts, into=int)).one())
            await claims.complete([], [])
    assert names == [0, 0, 1, 2]


async def test_who_registers_types_on_the_connection_has_them_used(tx: Tx) -> None:
    class Name(str):
        pass

    class Loud(psycopg.adapt.Dumper):
        def dump(self, obj: Any) -> bytes:
            return str(obj).upper().encode()

    await tx.execute(INSERT, ("i", 0))
    for _ in range(4):
        await tx.execute("update item set id = %s where qty = %s", (Name("quiet"), 0))
    assert await items(tx) == [("quiet", 0)]
    tx.connection.adapters.register_dumper(Name, Loud)
    await tx.execute("update item set id = %s where qty = %s", (Name("loud"), 0))
    assert await items(tx) == [("LOUD", 0)]


async def test_in_a_pipeline_everything_goes_its_old_way(tx: Tx, named: list[bytes]) -> None:
    connection = tx.connection
    for number in range(4):
        await tx.execute(INSERT, (f"i{number}", number))
    del named[:]
    async with connection.pipeline():
        for number in range(4, 9):
            await tx.execute(INSERT, (f"i{number}", number))
            await tx.execute("select id from item where qty = %s", (number,))
    assert named == []
    assert await (await tx.execute("select id from item where qty = %s", (1,))).all() == [("i1",)]
    assert len(await items(tx)) == 9


async def test_texts_that_are_made_for_one_run_do_not_pile_up(
    tx: Tx, named: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, prepared_statements=3)
    for number in range(9):
        await tx.execute(INSERT, (f"i{number}", number))
        await tx.execute(f"update item set qty = qty + %s where id = 'i{number}'", (100,))
        await tx.execute(f"delete from item where qty = -%s and id = 'i{number}'", (100,))
    assert await items(tx) == [(f"i{number}", number + 100) for number in range(9)]
    assert isinstance(tx, PostgresTx)
    assert len(converted(tx)) == 3
    assert len(named) == 6, "the one that is used again and again is not the one to be forgotten"


@pytest.mark.parametrize("ahead", [False, True])
async def test_text_is_what_it_was_whatever_encoding_a_message_has_set(
    store: PostgresStore, ledger: Ledger, ahead: bool
) -> None:
    """Of two that come one after the other on a connection, one works in Latin-1."""
    for number, encoding in enumerate(["utf8", "latin1"] * 4):
        async with store.transaction(group=1) as claims:
            await claims.begin()
            tx = claims.tx(Habits())
            await tx.execute("select set_config('client_encoding', %s, true)", (encoding,))
            await (tx.send if ahead else tx.execute)(INSERT, (f"\xe9{number}", number))
            await claims.complete([], [])
    assert ledger.run("select id, qty from item order by qty") == [(f"\xe9{number}", number) for number in range(8)]


async def test_neither_parameters_nor_long_texts_are_kept(tx: Tx, named: list[bytes]) -> None:
    def kept() -> list[PostgresQuery]:
        return [found for found in gc.get_objects() if isinstance(found, PostgresQuery)]

    before = {id(found) for found in kept()}
    for number in range(6):
        await tx.execute(INSERT, (f"i{number}", number))
        await tx.execute(UPDATE, (number, f"i{number}"))
        await tx.execute(f"{UPDATE} /* {'x' * 20_000} */", (number, "nobody"))
        gc.collect()
        assert {found.params for found in kept() if id(found) not in before} <= {None}
    assert isinstance(tx, PostgresTx)
    assert converted(tx) == [INSERT, UPDATE]
    assert len(named) == 6
