"""TRANSITIONS is documentation: each write of a worker to a record is one of its moves, and each move is made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from idemconsumer import App, Message, OutcomeKind, Reject, Saga, Tx
from idemconsumer.rules.values import State
from tests.support.ledger import Ledger
from tests.support.transitions import TRANSITIONS, Event

WATCH = """
create table move (before smallint, after smallint);
create function note_move() returns trigger language plpgsql as $$
begin
    insert into move values (case when tg_op = 'UPDATE' then old.state end, new.state);
    return null;
end
$$;
create trigger moves after insert or update of state on idemconsumer.record
    for each row execute function note_move()
"""


@pytest.fixture
def ledger(database: str) -> Iterator[Ledger]:
    with closing(Ledger(database)) as ledger:
        ledger.run(WATCH)
        yield ledger


async def write(tx: Tx, note: str) -> str:
    await tx.execute("insert into witness (id) values (%s)", (note,))
    return note


async def unwrite(tx: Tx, _: str, note: str) -> None:
    if note == "stuck":
        raise ValueError


async def test_records_move_as_the_docs_say(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", ledger.dsn)
    app = App("shop")

    async def end(id: str) -> None:
        match id:
            case "refused" | "undone" | "stuck":
                raise Reject("no_funds")
            case "broken":
                raise ValueError

    @app.idempotent_handler("memory:orders", key="id", max_attempts=1)
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        await end(order["id"])

    @app.idempotent_handler("memory:rides", key="id", max_attempts=1)
    async def book(order: dict[str, Any], saga: Saga) -> None:
        if order["id"] in ("undone", "stuck"):
            await saga.tx("written", write, order["id"], undo=unwrite)
        await end(order["id"])

    async def final(source: str, id: str) -> None:
        given = Message(source, json.dumps({"id": id}).encode())
        while (await app.process(given)).kind is OutcomeKind.RETRYING:
            await asyncio.sleep(0.05)

    for id in ("fine", "refused", "broken"):
        await final("memory:orders", id)
    for id in ("fine", "refused", "undone", "stuck", "broken"):
        await final("memory:rides", id)
    await app.close()

    made = {(None if old is None else State(old), State(new)) for old, new in ledger.run("select * from move")}
    documented = {(start, after) for (start, _), after in TRANSITIONS.items()}
    # A joined record is inserted in its final state, so its claim and its end are one move (J2).
    within = {(None, after) for start, after in documented if start is State.PROCESSING}
    assert made <= documented | within
    # Only in a worker do messages wait for their next attempt, which is one transaction that deletes and inserts. A
    # saga's rejection without finished steps is undone like any other.
    within_too = {move for move in documented if State.PENDING in move}
    assert documented - made == within_too | {(State.PROCESSING, TRANSITIONS[State.PROCESSING, Event.REJECT])}
