"""R14: the engine reads its own answers alike whatever psycopg has been told, and what is no answer is no claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader
from psycopg.rows import dict_row

from idemconsumer.errors import CommitUnknown, StoreUnavailable
from idemconsumer.handlers.arguments import Tx
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import Mark, Record, State
from idemconsumer.stores.answers import begun, outcomes
from idemconsumer.stores.joined import PostgresStore
from tests.stores.store_contract import A, B, complete
from tests.support.ledger import SCHEMA, Ledger

TYPES = ("bytea", "int2", "int4", "int8", "text")


class Strange(Loader):
    def load(self, data: Buffer) -> object:
        return f"strange {bytes(data)!r}"


class StrangeCursor(psycopg.AsyncCursor[Any]):
    async def fetchall(self) -> list[Any]:
        return []


def load_strangely(adapters: AdaptersMap) -> None:
    for name in TYPES:
        adapters.register_loader(name, Strange)


def be_strange(connection: psycopg.AsyncConnection[Any]) -> None:
    connection.cursor_factory = StrangeCursor
    connection.row_factory = dict_row


@pytest.fixture
def loaded_strangely() -> Iterator[None]:
    """What another library may do to all of the process."""
    before = [(oid, psycopg.adapters.get_loader(oid, psycopg.pq.Format.TEXT)) for oid in (17, 21, 23, 20, 25)]
    load_strangely(psycopg.adapters)
    yield
    for oid, loader in before:
        assert loader is not None
        psycopg.adapters.register_loader(oid, loader)


async def check_all(store: PostgresStore) -> None:
    """Each answer that decides whether something runs."""
    found = Record(State.COMPLETED, A.fingerprint, StoredResult(b"\0paid", "text/plain"))
    async with store.transaction(group=2) as claims:
        assert await claims.claim([A, B]) == [found, Mark.CLAIMED]
    assert await store.peek([A.key, B.key]) == [found, None]
    assert await store.mark_attempts([B]) == {B.key}
    assert await store.count_attempt(B, "failed") == 1
    assert await store.note_error(B, "failed") == 1


@pytest.mark.parametrize(
    "told",
    [
        lambda tx: load_strangely(tx.connection.adapters),
        lambda tx: be_strange(tx.connection),
        lambda tx: tx.connection.execute("set bytea_output = 'escape'"),
    ],
    ids=["loaders", "cursors and rows", "bytea_output"],
)
async def test_a_duplicate_stays_one_whatever_a_handler_tells_its_connection(
    book: Ledger, told: Callable[[Tx], Any]
) -> None:
    store = await PostgresStore.open(book.dsn, SCHEMA, connections=1, longest_run=30.0)
    async with store.transaction(group=1) as claims:
        await claims.claim([A])
        if (result := told(claims.tx())) is not None:
            await result
        await claims.complete([(A.key, StoredResult(b"\0paid", "text/plain"))], [])
    await check_all(store)
    await store.close()


async def test_a_duplicate_stays_one_whatever_the_process_tells_psycopg(book: Ledger, loaded_strangely: None) -> None:
    store = await PostgresStore.open(book.dsn, SCHEMA, connections=1, longest_run=30.0)
    await complete(store, [A], [(A.key, StoredResult(b"\0paid", "text/plain"))])
    await check_all(store)
    await store.close()


@pytest.mark.parametrize(
    "answer",
    [
        "select 'other'::bytea, null, null, null, null, null, null, null",
        "select 'other'::bytea, 3, null, null, null, null, null, null",
        "select null, 3, null, null, null, null, null, null",
        "select 'key'::bytea, 'done', null, null, null, null, null, null",
        "select 'key'::bytea, 99, null, null, null, null, null, null",
        "select 'key'::bytea",
        "select where false",
        "set local lock_timeout = 0",
    ],
)
async def test_what_is_no_answer_to_a_claim_is_an_error(store: PostgresStore, answer: LiteralString) -> None:
    async with store.pool.connection() as connection:
        results = await connection.simple(answer.encode())
        with pytest.raises(StoreUnavailable, match="answer to a claim"):
            outcomes(results[-1], [b"key"])


@pytest.mark.parametrize(
    "answer",
    [
        "select 'other'::bytea, null, null, null, null, null, null, null, 1",
        "select 'key'::bytea, null, null, null, null, null, null, null, 'none'",
        "select null, null, null, null, null, null, null, null, 1",
        "select 'key'::bytea, 99, null, null, null, null, null, null, null",
        "select 'key'::bytea, null, null, null, null, null, null, null",
        "select 'key'::bytea, null, null, null, null, null, null, null, 1 from generate_series(1, 2)",
        "select 'key'::bytea, null, null, null, null, null, null, null, 1 where false",
        "set local lock_timeout = 0",
    ],
)
async def test_what_is_no_answer_to_the_claim_of_a_saga_is_an_error(
    store: PostgresStore, answer: LiteralString
) -> None:
    async with store.pool.connection() as connection:
        results = await connection.simple(answer.encode())
        with pytest.raises(CommitUnknown, match="answer to a claim"):
            begun(results[-1], [b"key"])


async def test_a_record_that_was_not_asked_for_is_no_answer(store: PostgresStore) -> None:
    store.pool.queries = store.pool.queries | {"read": b"select 'other'::bytea, 3, null, null, null, null, null, null"}
    with pytest.raises(StoreUnavailable, match="answer to a claim"):
        await store.peek([b"key"])
