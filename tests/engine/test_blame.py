"""Whose fault it is: what a handler raises by itself is its own failure, however much it looks like an outage.

A mistake here shows as a message that is run for ever, and everything behind it in its lane with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, LiteralString

import psycopg
import pytest

from idemconsumer import App, Batch, Reject, Retry, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import (
    CommitUnknown,
    ConfigurationError,
    Contention,
    Fenced,
    SessionEnded,
    StoreUnavailable,
    TransactionEnded,
)
from idemconsumer.handlers.decorator import Handler
from idemconsumer.message.message import Message
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.stores.joined import PostgresStore
from tests.support.collisions import a_lock_is_taken, collide
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, to_the_end, works, write
from tests.support.waiting import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("both_ways")

Act = Callable[[str, Tx], Awaitable[None]]


def guilty(act: Act, **options: Any) -> Handler[..., Any]:
    """A handler that does `act` for the message `bad` alone."""

    @idempotent_handler(SOURCE, key="id", **({"max_attempts": 2, "group_size": 8} | options))
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == "bad":
            await act(order["id"], tx)

    return handle


def raising(state: str) -> LiteralString:
    assert state.isalnum()
    return f"do $$ begin raise 'as it happens' using errcode = '{state}'; end $$"


# ----------------------------------------------------------------------------------- looks like an outage, and is none
@pytest.mark.parametrize("state", ["53300", "53400", "57P01", "57P03", "57014", "58000", "58P01"])
@pytest.mark.parametrize("where", ["its transaction", "another connection"])
async def test_an_error_of_the_handlers_own_statement_is_its_failure_and_its_lane_goes_on(
    ledger: Ledger, engine: Engine, state: str, where: str
) -> None:
    async def act(id: str, tx: Tx) -> None:
        if where == "its transaction":
            await tx.execute(raising(state))
        async with await psycopg.AsyncConnection.connect(ledger.dsn) as elsewhere:
            await elsewhere.execute(raising(state))

    async with asyncio.timeout(PATIENCE):
        outcomes = await to_the_end(engine, works(guilty(act), "good", "bad", "behind"))

    assert kinds(outcomes) == ["applied", "dead", "applied"]
    assert ledger.letters == [("attempts_exhausted", 1)]
    assert (ledger.effects, ledger.attempts) == (["behind", "good"], [])


async def test_a_file_that_the_server_does_not_have_is_the_failure_of_whoever_asked(
    ledger: Ledger, engine: Engine
) -> None:
    async def act(id: str, tx: Tx) -> None:
        await tx.execute("select pg_read_file('/nonexistent')")

    assert kinds(await to_the_end(engine, works(guilty(act), "bad", "behind"))) == ["dead", "applied"]
    assert "/nonexistent" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


async def test_another_database_that_does_not_answer_is_the_failure_of_whoever_asked(
    ledger: Ledger, engine: Engine
) -> None:
    async def act(id: str, tx: Tx) -> None:
        await psycopg.AsyncConnection.connect("postgresql://127.0.0.1:1/nowhere")

    assert kinds(await to_the_end(engine, works(guilty(act), "bad", "behind"))) == ["dead", "applied"]
    assert ledger.letters == [("attempts_exhausted", 1)]


OTHERS = [StoreUnavailable, TransactionEnded, CommitUnknown, Contention, ConfigurationError, Fenced, SessionEnded]


@pytest.mark.parametrize("batch", [False, True], ids=["one", "a batch"])
@pytest.mark.parametrize("kind", OTHERS)
async def test_an_error_of_ours_that_another_app_raised_is_the_failure_of_whoever_asked_it(
    ledger: Ledger, engine: Engine, kind: type[Exception], batch: bool
) -> None:
    async def act(id: str, tx: Tx) -> None:
        raise kind("of another app")

    @idempotent_handler(SOURCE, key="id", max_attempts=2, group_size=8)
    async def store_all(orders: Batch[dict[str, Any]], tx: Tx) -> None:
        for order in orders:
            await write(tx, order["id"])
            if order["id"] == "bad":
                raise kind("of another app")

    async with asyncio.timeout(PATIENCE):
        outcomes = await to_the_end(engine, works(store_all if batch else guilty(act), "good", "bad", "behind"))
    assert kinds(outcomes) == ["applied", "dead", "applied"]
    assert (ledger.effects, ledger.letters) == (["behind", "good"], [("attempts_exhausted", 1)])
    assert f"{kind.__name__}: of another app" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


async def test_another_app_whose_database_is_away_is_the_failure_of_whoever_asked_it(
    ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", "postgresql://127.0.0.1:1/nowhere")
    other = App("other")

    @other.idempotent_handler("memory:bills", key="id")
    async def bill(order: dict[str, Any]) -> None: ...

    async def act(id: str, tx: Tx) -> None:
        await other.process(Message("memory:bills", b'{"id": 1}'))

    outcomes = await to_the_end(engine, works(guilty(act), "good", "bad", "behind"))
    assert (kinds(outcomes), ledger.letters) == (["applied", "dead", "applied"], [("attempts_exhausted", 1)])


async def test_a_collision_on_another_connection_is_the_failure_of_whoever_opened_it(
    ledger: Ledger, engine: Engine
) -> None:
    async def act(id: str, tx: Tx) -> None:
        async with await psycopg.AsyncConnection.connect(ledger.dsn) as elsewhere:
            await elsewhere.execute("set local lock_timeout = '1ms'")
            await elsewhere.execute("lock table held_elsewhere")

    ledger.run("create table if not exists held_elsewhere ()")
    with psycopg.connect(ledger.dsn) as other:
        other.execute("lock table held_elsewhere")
        async with asyncio.timeout(PATIENCE):
            outcomes = await to_the_end(engine, works(guilty(act), "good", "bad", "behind"))
    assert (kinds(outcomes), ledger.letters) == (["applied", "dead", "applied"], [("attempts_exhausted", 1)])


async def test_a_collision_inside_a_savepoint_is_one(ledger: Ledger, engine: Engine) -> None:
    async def act(id: str, tx: Tx) -> None:
        await tx.execute("savepoint part")
        try:
            await collide(tx)
        except psycopg.Error:
            await tx.execute("rollback to savepoint part")
            raise

    (given,) = works(guilty(act), "bad")
    with a_lock_is_taken(ledger.dsn):
        assert [(await engine.process(given)).reason for _ in range(3)] == ["contention"] * 3
    assert ledger.attempts == []


async def test_a_handler_that_turns_durability_off_for_itself_has_failed(ledger: Ledger, engine: Engine) -> None:
    async def act(id: str, tx: Tx) -> None:
        await tx.execute("set local synchronous_commit = off")

    outcomes = await to_the_end(engine, works(guilty(act), "good", "bad", "behind"))

    assert kinds(outcomes) == ["applied", "dead", "applied"]
    assert (ledger.effects, ledger.letters) == (["behind", "good"], [("attempts_exhausted", 1)])
    assert "synchronous_commit is off" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


# ------------------------------------------------------------------------------- looks like contention, and is none
async def in_sql(tx: Tx, state: str) -> None:
    await tx.execute(raising(state))


async def in_python(tx: Tx, state: str) -> None:
    raise psycopg.errors.lookup(state)("as it happens")


async def in_python_for_a_reason(tx: Tx, state: str) -> None:
    raise RuntimeError("the ORM's own") from psycopg.errors.lookup(state)("as it happens")


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "53200"])
@pytest.mark.parametrize("raises", [in_sql, in_python, in_python_for_a_reason])
async def test_a_function_that_raises_a_collision_by_itself_has_failed(
    ledger: Ledger, engine: Engine, raises: Callable[[Tx, str], Awaitable[None]], state: str
) -> None:
    async def act(id: str, tx: Tx) -> None:
        await raises(tx, state)

    async with asyncio.timeout(PATIENCE):
        outcomes = await to_the_end(engine, works(guilty(act), "good", "bad", "behind"))

    assert kinds(outcomes) == ["applied", "dead", "applied"]
    assert ledger.letters == [("attempts_exhausted", 1)]
    assert (ledger.effects, ledger.attempts) == (["behind", "good"], [])


# --------------------------------------------------------------------------------------------- idle in the transaction
@pytest.mark.parametrize("last_writes", [False, True], ids=["found at the commit", "found by a statement"])
async def test_a_group_that_idles_longer_than_the_server_lets_it_shrinks_until_it_fits(
    ledger: Ledger, last_writes: bool
) -> None:
    """The server ends a transaction after longest_run + 5 s without a statement: here 0.3 s, two handlers' time."""
    ran: list[int] = []

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def idle(order: dict[str, Any], tx: Tx) -> None:
        ran.append(order["id"])
        await asyncio.sleep(0.1)  # what the handler does: no statement
        if last_writes and order["id"] == 7:
            await write(tx, order["id"])

    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=2, longest_run=-4.7)
    engine, left = Engine(store), works(idle, *range(8))
    done: list[Outcome] = []
    async with asyncio.timeout(PATIENCE):
        for _ in range(12):
            try:
                outcomes = await engine.run(left[: engine.group_size(left[0].handler)])
            except StoreUnavailable:
                continue
            assert OutcomeKind.RETRYING not in {outcome.kind for outcome in outcomes}
            done += outcomes
            left = left[len(outcomes) :]
            if not left:
                break
    await store.close()
    assert kinds(done) == ["applied"] * 8
    assert ledger.states == [State.COMPLETED] * 8
    assert len(ran) <= 5 * 8, f"it should shrink at once, not by luck: {ran}"
    assert (ledger.effects, ledger.letters) == (["7"] if last_writes else [], [])


async def test_a_handler_that_blocks_the_loop_past_its_timeout_is_late_even_if_its_connection_is_gone(
    ledger: Ledger,
) -> None:
    """It could not be cancelled, and meanwhile the server ended its transaction: its own failure, not an outage."""

    @idempotent_handler(SOURCE, key="id", timeout="50ms", max_attempts=2)
    async def block(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        # Blocks the loop, which is the mistake under test.
        eventually(lambda: ledger.sessions("idle in transaction") == 0, "the server ends the transaction")
        await write(tx, order["id"])

    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=2, longest_run=-4.8)
    async with asyncio.timeout(PATIENCE):
        assert kinds(await to_the_end(Engine(store), works(block, 1))) == ["dead"]
    await store.close()
    assert ledger.letters == [("attempts_exhausted", 1)]
    assert "did not end within its timeout" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


async def test_a_statement_that_is_cancelled_in_a_failed_transaction_was_answered(
    ledger: Ledger, engine: Engine
) -> None:
    """As in a TaskGroup, one of whose statements has failed. No silent server, which would be nobody's fault."""

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def siblings(order: dict[str, Any], tx: Tx) -> None:
        with suppress(psycopg.Error):
            await tx.execute("select 1 / 0")
        sibling = asyncio.create_task(tx.execute("select 1"))
        await asyncio.sleep(0)  # it is sent
        sibling.cancel()
        await asyncio.gather(sibling, return_exceptions=True)

    assert kinds(await to_the_end(engine, works(siblings, 1))) == ["dead"]
    assert ledger.letters == [("attempts_exhausted", 1)]


# ------------------------------------------------------------------------------------------- what a handler may answer
class Lazy:
    """Runs code of its own when it is turned into JSON."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def model_dump_json(self) -> str:
        raise self._error


@pytest.mark.parametrize("error", [AttributeError("lazy"), KeyError("x"), OSError(), Exception()], ids=repr)
@pytest.mark.parametrize("as_", ["a rejection's body", "a result"])
async def test_an_answer_that_raises_when_it_is_encoded_is_the_handlers_failure(
    ledger: Ledger, engine: Engine, as_: str, error: Exception
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=2)
    async def answer(order: dict[str, Any], tx: Tx) -> object:
        await write(tx, order["id"])
        if order["id"] != "bad":
            return None
        if as_ == "a result":
            return Lazy(error)
        raise Reject("no", Lazy(error))

    outcomes = await to_the_end(engine, works(answer, "good", "bad", "behind"))
    assert kinds(outcomes) == ["applied", "dead", "applied"]
    assert (ledger.effects, ledger.letters) == (["behind", "good"], [("attempts_exhausted", 1)])
    assert "cannot be stored as JSON" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


@pytest.mark.parametrize(
    "after", [10**400, 10**5000, float("inf"), float("nan"), "9" * 400 + "d", object()],
    ids=["10**400", "10**5000", "inf", "nan", "400 digits", "no duration"],
)  # fmt: skip
async def test_a_retry_after_an_impossible_time_is_a_retry(ledger: Ledger, engine: Engine, after: Any) -> None:
    async def act(id: str, tx: Tx) -> None:
        raise Retry("later", after=after)

    outcomes = [await engine.process(*works(guilty(act), "bad")) for _ in range(2)]
    assert kinds(outcomes) == ["retrying", "dead"]
    assert 0 <= outcomes[0].due <= 30
    assert ledger.letters == [("attempts_exhausted", 1)]
