"""Statements that a handler runs again and again: the same effects and errors, whoever sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from idemconsumer import Tx
from idemconsumer.stores import _repeated
from idemconsumer.stores._tx import PostgresTx
from idemconsumer.stores.postgres import PostgresStore
from tests.ledger import SCHEMA, Ledger

INSERT = "insert into item (id, qty) values (%s, %s)"
NAMES = "select name, statement from pg_prepared_statements where name like 'idemconsumer%' order by name"


@pytest.fixture
async def tx(ledger: Ledger) -> AsyncIterator[Tx]:
    """That of one transaction, as a handler has it."""
    ledger.run("create table item (id text primary key, qty bigint)")
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)
    try:
        async with store.transaction(group=1) as claims:
            await claims.begin()
            yield claims.tx()
    finally:
        await store.close()


async def items(tx: Tx) -> list[tuple[Any, ...]]:
    return await (await tx.execute("select id, qty from item order by id")).all()


async def prepared(tx: Tx) -> list[str]:
    return [name for name, _ in await (await tx.execute(NAMES)).all()]


async def test_a_statement_that_was_run_often_is_prepared_and_does_what_it_did(tx: Tx) -> None:
    for number in range(6):
        rows = await tx.execute(INSERT, (f"i{number}", number))
        assert (rows.rowcount, await rows.all()) == (1, [])
        assert await prepared(tx) == (["idemconsumer_1"] if number >= 2 else [])
    assert await items(tx) == [(f"i{number}", number) for number in range(6)]
    for _ in range(5):
        await tx.execute("update item set qty = %(qty)s where qty < %(least)s", {"least": 4, "qty": 9})
    assert [qty for _, qty in await items(tx)] == [9, 9, 9, 9, 4, 5]
    assert await prepared(tx) == ["idemconsumer_1", "idemconsumer_2"]


async def test_parameters_of_other_types_have_a_name_of_their_own(tx: Tx) -> None:
    sizes = [1, 2**40, None, 2, 2**41, 3, 4, None, 2**42, 5]
    for number, size in enumerate(sizes):
        await tx.execute(INSERT, (f"i{number}", size))
    assert [qty for _, qty in await items(tx)] == sizes
    assert await prepared(tx) == ["idemconsumer_1", "idemconsumer_2"]  # small and large ones; null came twice


async def test_what_returns_rows_has_no_parameters_or_is_no_text_goes_its_old_way(tx: Tx) -> None:
    for number in range(5):
        rows = await tx.execute("insert into item (id) values (%s) returning id", (str(number),))
        assert await rows.one() == (str(number),)
        await tx.execute("update item set qty = 0")
        await tx.execute(psycopg.sql.SQL("update item set qty = {}").format(number))  # type: ignore[call-overload]
        assert (await (await tx.execute("select %s + 1", (number,), into=int)).one()) == number + 1
    assert await prepared(tx) == []


async def test_an_error_is_the_same_and_names_the_same_things(tx: Tx) -> None:
    for number in range(4):
        await tx.execute(INSERT, (str(number), 0))
    with pytest.raises(psycopg.ProgrammingError, match="the query has 2 placeholders but 1 parameters were passed"):
        await tx.execute(INSERT, ("few",))
    with pytest.raises(psycopg.errors.UniqueViolation, match="item_pkey"):
        await tx.execute(INSERT, ("3", 0))


async def test_statements_of_two_tasks_at_once_keep_their_parameters(tx: Tx) -> None:
    for number in range(3):
        await tx.execute(INSERT, (f"i{number}", number))
    await asyncio.gather(*(tx.execute(INSERT, (f"i{number}", number)) for number in range(3, 9)))
    assert await items(tx) == [(f"i{number}", number) for number in range(9)]


@pytest.mark.parametrize("dropped", ["deallocate all", "deallocate idemconsumer_1"])
async def test_a_handler_may_drop_all_prepared_statements(tx: Tx, dropped: str) -> None:
    for number in range(3):
        await tx.execute(INSERT, (f"i{number}", number))
    await tx.execute(dropped)
    for number in range(3, 9):
        await tx.execute(INSERT, (f"i{number}", number))
    assert len(await items(tx)) == 9


async def test_a_name_that_is_gone_is_missed_once(tx: Tx) -> None:
    for number in range(3):
        await tx.execute(INSERT, (f"i{number}", number))
    await tx.execute("savepoint before")
    await tx.execute("do $$ begin execute 'deallocate all'; end $$")  # nothing tells us
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        await tx.execute(INSERT, ("i3", 3))
    await tx.execute("rollback to savepoint before")
    await tx.execute(INSERT, ("i3", 3))
    assert len(await items(tx)) == 4


async def test_who_takes_the_connection_gets_psycopgs_own_way_from_then_on(tx: Tx) -> None:
    class Money:
        cents = 250

    class MoneyDumper(psycopg.adapt.Dumper):
        def dump(self, obj: Any) -> bytes:
            return str(obj.cents).encode()

    for _ in range(4):
        await tx.execute("update item set qty = %s where id = %s", (1, "i0"))
    await tx.execute(INSERT, ("i0", 1))
    tx.connection.adapters.register_dumper(Money, MoneyDumper)
    async with tx.connection.pipeline():
        await tx.execute(INSERT, ("i1", 2))
    await tx.execute("update item set qty = %s where id = %s", (Money(), "i0"))
    assert await items(tx) == [("i0", 250), ("i1", 2)]


async def test_texts_that_are_made_for_one_run_do_not_pile_up(tx: Tx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_repeated, "_MOST", 3)
    for number in range(9):
        await tx.execute(f"delete from item where qty = %s and id = 'i{number}'", (1,))
    for number in range(9):
        await tx.execute(INSERT, (f"i{number}", number))
        await tx.execute(f"update item set qty = qty + %s where id = 'i{number}'", (1,))
    assert isinstance(tx, PostgresTx)
    assert len(tx._open().repeated._statements) <= 3
    assert await items(tx) == [(f"i{number}", number + 1) for number in range(9)]
    assert await prepared(tx) == ["idemconsumer_1"]
