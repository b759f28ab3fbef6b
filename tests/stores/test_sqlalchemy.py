"""J23: a SQLAlchemy session on tx writes with the message, and neither commits nor rolls back by itself."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from psycopg.rows import dict_row
from sqlalchemy import Enum, bindparam, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncSession

from idemconsumer import App, Reject, Retry, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.sqlalchemy import session
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.lent import LentConnection
from tests.support import ROOT
from tests.support.collisions import a_lock_is_taken
from tests.support.items import Act, Customer, Item, Order, OrderPlaced, Stock, stored, why, with_items, within
from tests.support.ledger import SOURCE, Ledger, kinds, message, run, work, works, write


@pytest.fixture
def items(book: Ledger) -> Ledger:
    return with_items(book)


@pytest.fixture
def store(one_connection: PostgresStore) -> PostgresStore:
    return one_connection


# ---------------------------------------------------------------------------------------------------------- what works
async def test_orm_core_and_tx_write_in_one_transaction_with_the_message(items: Ledger, engine: Engine) -> None:
    runs = 0

    @idempotent_handler(SOURCE, key="id")
    async def stock(order: dict[str, Any], tx: Tx) -> None:
        nonlocal runs
        runs += 1
        async with session(tx) as db:
            db.add(Item(id="orm", qty=1))
            await db.execute(insert(Item), [{"id": "core", "qty": 2}, {"id": "also core", "qty": 3}])
            await db.execute(text("insert into item values (:id, 4)"), {"id": "text"})
            await db.execute(update(Item).where(Item.id == "core").values(qty=Item.qty + 10))
            assert (await tx.execute("select qty from item where id = 'orm'", into=int)).rowcount == 1  # autoflushed
            names = [name async for name in await db.stream_scalars(select(Item.id).order_by(Item.id))]
            assert names == ["also core", "core", "orm", "text"]
            orm = await db.get(Item, "orm")
            assert orm is not None
            orm.qty += 100
            db.add(pending := Item(id="pending", qty=5))
        assert pending.qty == 5  # what was loaded stays
        await write(tx, "and tx")

    assert kinds(await engine.run(works(stock, 1))) == ["applied"]
    assert kinds(await engine.run(works(stock, 1))) == ["duplicate"]
    assert runs == 1
    assert stored(items) == [("also core", 3), ("core", 12), ("orm", 101), ("pending", 5), ("text", 4)]
    assert items.effects == ["and tx"]


async def put(db: AsyncSession, *ids: str) -> None:
    for id in ids:
        await db.execute(insert(Item).values(id=id, qty=0))


async def nested_in(db: AsyncSession, act: Callable[[], Awaitable[object]]) -> None:
    async with db.begin_nested():
        await act()


async def test_a_savepoint_takes_back_its_part_alone(items: Ledger, engine: Engine) -> None:
    async def nest(db: AsyncSession) -> None:
        db.add(Item(id="taken"))
        await db.flush()
        with pytest.raises(IntegrityError):
            await nested_in(db, lambda: put(db, "beside it", "taken"))
        inner = await db.begin_nested()
        db.add(Item(id="undone"))
        await inner.rollback()
        async with db.begin_nested():
            db.add(Item(id="outer"))
            with pytest.raises(IntegrityError):
                await nested_in(db, lambda: put(db, "inner", "outer"))
        db.add(Item(id="after"))

    assert await within(engine, nest) == ["applied"]
    assert stored(items) == [("after", 0), ("outer", 0), ("taken", 0)]


async def test_several_sessions_of_one_handler_are_one_transaction(items: Ledger, engine: Engine) -> None:
    async def twice(tx: Tx) -> None:
        for id in ("a", "b"):
            async with session(tx) as db:
                db.add(Item(id=id))
                assert await db.scalar(select(func.count()).select_from(Item)) == (1 if id == "a" else 2)

    assert await run(engine, twice) == ["applied"]
    assert stored(items) == [("a", 0), ("b", 0)]


async def test_how_a_handler_wants_its_own_rows_is_no_matter(engine: Engine) -> None:
    async def read(tx: Tx) -> None:
        tx.connection.row_factory = dict_row
        async with session(tx) as db:
            assert await db.scalar(text("select 1")) == 1

    assert await run(engine, read) == ["applied"]


async def test_the_example_in_the_docs_works(items: Ledger, engine: Engine) -> None:
    page = (ROOT / "docs" / "handlers.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(from idemconsumer\.sqlalchemy .*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"app": App("shop"), "OrderPlaced": OrderPlaced, "Tx": Tx}
    names |= {"Order": Order, "Stock": Stock, "Customer": Customer}
    exec(example.replace("kafka:orders.placed", SOURCE), names)
    items.run("create table if not exists placed (id text primary key, sku text, qty int)")
    items.run("create table if not exists customer (id text primary key)")
    items.run("create table if not exists stock as select 'x' as sku, 10 as qty")
    orders = [message(id, order_id=id, sku="x", qty=2, customer="c") for id in ("a", "b")]
    placing = names["place"].plan.bind("shop")
    assert kinds(await engine.run([work(placing, order) for order in orders])) == ["applied"] * 2
    assert items.run("select * from stock") == [("x", 6)]
    assert items.run("select * from placed order by id") == [("a", "x", 2), ("b", "x", 2)]
    assert items.run("select * from customer") == [("c",)]


async def test_a_session_costs_no_statement_of_its_own(
    engine: Engine, items: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the first one of a server."""
    sent: list[object] = []
    wait = LentConnection.wait

    async def count(self: LentConnection, gen: Any, *arguments: Any) -> Any:
        sent.append(gen)
        return await wait(self, gen, *arguments)

    monkeypatch.setattr(LentConnection, "wait", count)
    assert await within(engine, lambda db: db.execute(text("select 1")), 1) == ["applied"]
    sent.clear()
    assert await within(engine, lambda db: db.execute(text("select 1")), 2) == ["applied"]
    assert len(sent) == 1


# -------------------------------------------------------------------------------------------- COMMIT and ROLLBACK (J23)
async def begin(db: AsyncSession) -> None:
    async with db.begin():
        db.add(Item(id="begun"))


async def commit_of_connection(db: AsyncSession) -> None:
    await (await db.connection()).commit()


COMMITS: dict[str, Act] = {
    "commit": lambda db: db.commit(),
    "commit first": lambda db: db.commit(),
    "begin": begin,
    "connection": commit_of_connection,
    "sync session": lambda db: db.run_sync(lambda sync: sync.commit()),
}


@pytest.mark.parametrize("commit", COMMITS)
async def test_a_commit_is_refused_with_what_to_do_instead(items: Ledger, engine: Engine, commit: str) -> None:
    async def act(db: AsyncSession) -> None:
        if commit not in ("begin", "commit first"):
            await db.execute(insert(Item).values(id="early", qty=1))
        await COMMITS[commit](db)

    assert await within(engine, act, max_attempts=1) == ["dead"]
    assert "a handler must not commit" in why(items)
    assert "leave commit() out" in why(items)
    assert stored(items) == []


async def rollback_of_connection(db: AsyncSession) -> None:
    await (await db.connection()).rollback()


async def connection_of_its_engine(db: AsyncSession) -> None:
    async with db.bind.connect() as connection:  # type: ignore[union-attr]
        await connection.execute(insert(Item).values(id="undone", qty=1))


async def fail_in_flush(db: AsyncSession) -> None:
    """In Python, when the first half has been sent: for the server nothing is wrong."""
    db.add(Item(id="half"))
    db.add(Item(id="other half", qty=object()))
    await db.flush()


async def violate(db: AsyncSession) -> None:
    db.add(Item(id="early"))
    await db.flush()


async def fail(db: AsyncSession) -> None:
    db.add(Item(id="pending"))
    raise ValueError


ENDS: dict[str, Act] = {
    "rollback": lambda db: db.rollback(),
    "rollback in a savepoint": lambda db: nested_in(db, lambda: db.rollback()),
    "connection": rollback_of_connection,
    "engine": connection_of_its_engine,
    "close": lambda db: db.close(),
    "reset": lambda db: db.reset(),
    "invalidate": lambda db: db.invalidate(),
    "flush": fail_in_flush,
    "database error": violate,
    "error": fail,
}


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("end", ENDS)
async def test_what_the_session_gave_up_is_not_committed_though_the_handler_goes_on(
    items: Ledger, engine: Engine, end: str, where: str
) -> None:
    async def act(tx: Tx) -> None:
        try:
            async with session(tx) as db:
                await db.execute(insert(Item).values(id="early", qty=1))
                try:
                    await ENDS[end](db)
                except Exception:
                    if where == "outside" or end == "error":
                        raise
        except Exception:
            pass
        if end != "database error":
            await write(tx, "late")

    assert await run(engine, act, max_attempts=1) == ["dead"]
    said = "swallowed a database error" if end == "database error" else "the message's transaction can only roll back"
    assert said in why(items)
    assert stored(items) == []
    assert items.effects == []


async def test_a_handler_learns_at_the_end_of_the_block_that_it_was_given_up(items: Ledger, engine: Engine) -> None:
    async def act(tx: Tx) -> None:
        async with session(tx) as db:
            await db.execute(insert(Item).values(id="early", qty=1))
            await db.close()
        raise AssertionError("went on")

    assert await run(engine, act, max_attempts=1) == ["dead"]
    assert "so its changes are lost" in why(items)


@pytest.mark.parametrize("nested", [False, True])
async def test_a_rollback_says_what_to_do_instead(items: Ledger, engine: Engine, nested: bool) -> None:
    end = ENDS["rollback in a savepoint" if nested else "rollback"]
    assert await within(engine, end, max_attempts=1) == ["dead"]
    assert "raise Reject or Retry to undo it all, or use begin_nested()" in why(items)


# ------------------------------------------------------------------------------------------------------ whose failure
@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [(lambda: Reject("no"), "failed", []), (lambda: Retry("1ms"), "retrying", [1]), (ValueError, "retrying", [1])],
)
async def test_an_error_that_leaves_the_block_undoes_the_message(
    items: Ledger, engine: Engine, error: Callable[[], Exception], kind: str, attempts: list[int]
) -> None:
    async def act(db: AsyncSession) -> None:
        await db.execute(insert(Item).values(id="early", qty=1))
        raise error()

    assert await within(engine, act) == [kind]
    assert stored(items) == []
    assert items.attempts == attempts


async def test_a_violated_constraint_is_the_handlers_failure_and_quotes_no_value(items: Ledger, engine: Engine) -> None:
    async def leak(db: AsyncSession) -> None:
        db.add(Item(id="a secret"))
        await db.flush()
        await db.execute(insert(Item).values(id="a secret", qty=1))

    assert await within(engine, leak, max_attempts=2) == ["retrying"]
    assert items.attempts == [1]
    assert await within(engine, leak, max_attempts=2) == ["dead"]
    assert "IntegrityError" in why(items)
    assert "item_pkey" in why(items)
    assert "a secret" not in why(items)


async def test_an_error_of_sqlalchemys_own_quotes_no_value_either(engine: Engine) -> None:
    mistake = text("select :a, :b").bindparams(bindparam("b", type_=Enum("x", native_enum=False)))
    errors: list[str] = []

    async def err(db: AsyncSession) -> None:
        try:
            await db.execute(mistake, {"a": "a secret", "b": 7})
        except StatementError as error:
            errors.append(str(error))

    assert await within(engine, err) == ["applied"]
    assert "a secret" not in errors[0]


@pytest.mark.parametrize("nested", [False, True])
async def test_a_collision_that_sqlalchemy_wraps_costs_no_attempt(items: Ledger, engine: Engine, nested: bool) -> None:
    async def collide(db: AsyncSession) -> None:
        await db.execute(text("set local lock_timeout = '1ms'"))
        lock = text("select pg_advisory_xact_lock(4711)")
        await (nested_in(db, lambda: db.execute(lock)) if nested else db.execute(lock))

    with a_lock_is_taken(items.dsn):
        assert await within(engine, collide, max_attempts=1) == ["retrying"]
    assert items.attempts == []
    assert await within(engine, collide, max_attempts=1) == ["applied"]


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; import idemconsumer.sqlalchemy"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "pip install 'idemconsumer[sqlalchemy]'" in ended.stderr


def test_nothing_else_imports_sqlalchemy() -> None:
    code = "import sys, idemconsumer, idemconsumer.cli.main; print('sqlalchemy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
