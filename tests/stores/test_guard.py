"""J3: nobody but the engine commits. Whoever tries is blamed, and what stands beside it in its group is applied."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import psycopg
import pytest

from idemconsumer import Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.rules.values import State
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, message, to_the_end, work
from tests.support.tuning import tuned


@pytest.fixture(autouse=True)
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements are waited for on one server and sent ahead on the other (J26)."""
    tuned(monkeypatch, runs_before_ahead=0 if "postgres18" in request.node.name else 1_000_000)


Attack = Callable[[Tx], Awaitable[object]]


def through_tx(statement: Any) -> Attack:
    async def attack(tx: Tx) -> None:
        await tx.execute(statement)

    return attack


def through_connection(statement: Any) -> Attack:
    async def attack(tx: Tx) -> None:
        await tx.connection.execute(statement)

    return attack


async def write(tx: Tx, effect: str) -> None:
    await tx.connection.execute("insert into witness (id) values (%s)", [effect])


async def commit_and_go_on(tx: Tx) -> None:
    with suppress(psycopg.Error):
        await tx.connection.commit()
    await write(tx, "after the commit")


async def roll_back_write_commit(tx: Tx) -> None:
    await tx.connection.rollback()
    await write(tx, "after the rollback")
    await tx.connection.commit()


async def commit_under_a_seal_of_its_own(tx: Tx) -> None:
    """As a handler does that calls what it takes for the seal."""
    await tx.execute("select set_config('idemconsumer.sealed', 'mine', true)")
    with suppress(psycopg.Error):
        await tx.connection.commit()


async def roll_back_begin_write_commit(tx: Tx) -> None:
    for statement in ("rollback", "begin read write"):
        await tx.connection.execute(statement)
    await write(tx, "after the rollback")
    await tx.connection.commit()


async def roll_back_and_write(tx: Tx) -> None:
    await tx.connection.rollback()
    with suppress(psycopg.Error):
        await write(tx, "after the rollback")


async def swallow_an_error(tx: Tx) -> None:
    with suppress(psycopg.Error):
        await tx.execute("select 1 / 0")


async def swallow_an_error_and_commit(tx: Tx) -> None:
    await swallow_an_error(tx)
    with suppress(psycopg.Error):
        await tx.connection.commit()  # answered by ROLLBACK


async def forge_a_function(tx: Tx) -> None:
    """What the guard would call by its bare name is the handler's own."""
    for arguments in ("text", "text, boolean"):
        await tx.execute("create schema if not exists forged")
        await tx.connection.execute(
            f"create function forged.current_setting({arguments}) returns text language sql return 'sealed'"
        )
    await commit_with_forged_names(tx)


async def forge_an_operator(tx: Tx) -> None:
    """And so are its comparisons, none of which holds."""
    await forge_operators(tx)
    await commit_with_forged_names(tx)


async def forge_an_operator_under_a_seal_of_its_own(tx: Tx) -> None:
    await tx.execute("select set_config('idemconsumer.sealed', 'mine', true)")
    await forge_an_operator(tx)


async def forge_operators(tx: Tx) -> None:
    await tx.execute("create schema forged")
    await tx.execute("create function forged.never(text, text) returns boolean language sql return false")
    for operator in ("=", "<>"):
        await tx.connection.execute(
            f"create operator forged.{operator} (function = forged.never, leftarg = text, rightarg = text)"
        )
    await tx.execute("set local search_path = forged, pg_catalog, public")


async def roll_back_and_forge_an_operator(tx: Tx) -> None:
    """The seal finds no mark, and by the handler's own operator would not see that."""
    await tx.connection.execute("rollback; begin read write")
    await write(tx, "after the rollback")
    await forge_operators(tx)


async def risk_the_commit_and_forge_an_operator(tx: Tx) -> None:
    await tx.execute("set local synchronous_commit = off")
    await forge_operators(tx)


async def commit_with_forged_names(tx: Tx) -> None:
    await tx.execute("set local search_path = forged, pg_catalog, public")
    with suppress(psycopg.Error):
        await tx.connection.commit()


STATEMENTS = [
    "COMMIT",
    "END",
    "COMMIT AND CHAIN",
    "COMMIT; BEGIN",
    "select 1; COMMIT; BEGIN READ WRITE",
    "ROLLBACK",
    "ABORT",
    "ROLLBACK; BEGIN",
    "select 1; ROLLBACK; BEGIN READ WRITE",
    "ROLLBACK AND CHAIN",
    "PREPARE TRANSACTION 'x'",
    "/* tidy */ -- up\n ; commit",
]

ATTACKS: dict[str, Attack] = {
    **{f"tx: {statement}": through_tx(statement) for statement in STATEMENTS},
    **{f"connection: {statement}": through_connection(statement) for statement in STATEMENTS},
    "connection.commit()": lambda tx: tx.connection.commit(),
    "connection.rollback()": lambda tx: tx.connection.rollback(),
    "commit(), error swallowed, another write": commit_and_go_on,
    "a seal of its own, commit()": commit_under_a_seal_of_its_own,
    "rollback(), a write, commit()": roll_back_write_commit,
    "rollback, begin read write, a write, commit()": roll_back_begin_write_commit,
    "a rollback and a write at once": through_connection("rollback; insert into witness (id) values ('escaped')"),
    "rollback(), a write whose error is swallowed": roll_back_and_write,
    "a function of its own that the guard would call": forge_a_function,
    "operators of its own that the guard would use": forge_an_operator,
    "a seal of its own, operators of its own that the guard would use": forge_an_operator_under_a_seal_of_its_own,
    "rollback, operators of its own that the seal would use": roll_back_and_forge_an_operator,
    "a commit that can be lost, operators of its own that the seal would use": risk_the_commit_and_forge_an_operator,
    "a swallowed error": swallow_an_error,
    "a swallowed error and commit()": swallow_an_error_and_commit,
}

# Who attacks in which group: the index of the offender.
POSITIONS = {"alone": (1, 0), "first": (3, 0), "middle": (3, 1), "last": (3, 2)}

# Each attack in each position; each of them, and each position, on both servers and so both ways.
PAIRS = [
    (server, attack, position)
    for n, attack in enumerate(ATTACKS)
    for m, position in enumerate(POSITIONS)
    for server in [("postgres18", "postgres15")[(n + m) % 2]]
]

attacking: ContextVar[Attack] = ContextVar("attacking")


@idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=2)
async def pay(order: dict[str, Any], tx: Tx) -> str:
    await tx.execute("insert into witness (id) values (%s)", (order["id"],))
    if order["id"] == "offender":
        await attacking.get()(tx)
    return "paid"


@contextmanager
def under(attack: Attack) -> Iterator[None]:
    token = attacking.set(attack)
    yield
    attacking.reset(token)


@pytest.fixture
async def engine(shared_ledger: Ledger) -> AsyncIterator[Engine]:
    store = await PostgresStore.open(shared_ledger.dsn, SCHEMA, connections=2, longest_run=30.0)
    yield Engine(store)
    await store.close()


@pytest.mark.parametrize(("_one_database", "attack", "position"), PAIRS, indirect=["_one_database"])
async def test_whoever_ends_the_transaction_is_blamed_and_nobody_else(
    shared_ledger: Ledger, engine: Engine, attack: str, position: str
) -> None:
    size, index = POSITIONS[position]
    honest = [f"honest {n}" for n in range(size)]
    bound = pay.plan.bind("shop")
    group = [work(bound, message("offender" if n == index else honest[n])) for n in range(size)]

    with under(ATTACKS[attack]):
        outcomes = await to_the_end(engine, group)

    del honest[index]
    assert kinds(outcomes) == ["dead" if n == index else "applied" for n in range(size)]
    assert shared_ledger.effects == honest
    assert shared_ledger.states == [State.COMPLETED] * len(honest) + [State.DEAD]
    assert shared_ledger.letters == [("attempts_exhausted", 1)]
    assert shared_ledger.run("select count(*) from pg_prepared_xacts") == [(0,)]


async def honest_savepoint(tx: Tx) -> None:
    await tx.execute("savepoint part")
    with suppress(psycopg.Error):
        await tx.execute("select 1 / 0")
    await tx.execute("ROLLBACK TO part")
    await tx.execute("release part")


async def honest_nested_transaction(tx: Tx) -> None:
    with suppress(psycopg.Error):
        async with tx.connection.transaction():
            await write(tx, "undone")
            await tx.execute("select 1 / 0")


async def honest_rollback_to_savepoint(tx: Tx) -> None:
    await tx.execute("savepoint part")
    await write(tx, "undone")
    await tx.execute("rollback work to savepoint part")


async def honest_names_of_its_own(tx: Tx) -> None:
    """What the seal would call by its bare name is the handler's own, and does nothing of the kind."""
    await tx.execute("create schema forged")
    for name in ("current_setting(text)", "current_setting(text, boolean)", "set_config(text, text, boolean)"):
        await tx.connection.execute(f"create function forged.{name} returns text language sql return 'off'")
    await tx.execute("set local search_path = forged, pg_catalog, public")


async def test_names_of_a_handlers_own_are_not_called_by_the_seal(shared_ledger: Ledger, engine: Engine) -> None:
    with under(honest_names_of_its_own):
        outcomes = await to_the_end(engine, [work(pay.plan.bind("shop"), message("offender"))])

    assert kinds(outcomes) == ["applied"]
    assert shared_ledger.effects == ["offender"]
    shared_ledger.run("drop schema forged cascade")


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    "honest", [honest_savepoint, honest_nested_transaction, honest_rollback_to_savepoint], ids=lambda f: f.__name__
)
async def test_a_part_may_be_undone_by_a_savepoint(
    shared_ledger: Ledger, engine: Engine, honest: Attack, position: str
) -> None:
    size, index = POSITIONS[position]
    ids = ["offender" if n == index else f"honest {n}" for n in range(size)]
    bound = pay.plan.bind("shop")

    with under(honest):
        outcomes = await to_the_end(engine, [work(bound, message(id)) for id in ids])

    assert kinds(outcomes) == ["applied"] * size
    assert shared_ledger.effects == sorted(ids)


async def test_a_refused_statement_says_what_to_do_instead(shared_ledger: Ledger, engine: Engine) -> None:
    with under(through_tx("COMMIT")):
        await to_the_end(engine, [work(pay.plan.bind("shop"), message("offender"))])
    ((error,),) = shared_ledger.run("select error from idemconsumer.dead_letter")
    assert "a handler must not run COMMIT" in error
    assert "raise Reject or Retry to undo them, or use a SAVEPOINT" in error


async def test_a_commit_in_sql_that_tx_does_not_read_names_the_rule(shared_ledger: Ledger, engine: Engine) -> None:
    with under(through_connection("COMMIT")):
        await to_the_end(engine, [work(pay.plan.bind("shop"), message("offender"))])
    ((error,),) = shared_ledger.run("select error from idemconsumer.dead_letter")
    assert "committed by somebody other than the engine" in error


@pytest.mark.parametrize(
    ("attack", "text"),
    [
        (swallow_an_error, "swallowed a database error"),
        (lambda tx: tx.connection.rollback(), "ended the transaction it ran in"),
    ],
    ids=["a swallowed error", "a rollback"],
)
async def test_what_a_handler_did_to_the_transaction_is_seen_before_the_next_one_runs(
    shared_ledger: Ledger, engine: Engine, attack: Attack, text: str
) -> None:
    bound = pay.plan.bind("shop")
    with under(attack):
        outcomes = await to_the_end(engine, [work(bound, message(id)) for id in ("offender", "honest")])

    assert kinds(outcomes) == ["dead", "applied"]
    ((error,),) = shared_ledger.run("select error from idemconsumer.dead_letter")
    assert text in error  # and not what the next handler, or the seal, would have met with
