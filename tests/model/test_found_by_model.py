"""What the model, and reading the code for it, found in the code: each stays found."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from msgspec.structs import replace

from idemconsumer import Message, Saga, StoreUnavailable, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import CommitUnknown
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import OutcomeKind, State, StepRow
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.sagas.saga_engine import LeasedEngine
from idemconsumer.sql.queries import load
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases as LeaseStore
from tests.support.servers.postgres import migrated


async def _book(order: dict[str, Any], saga: Saga) -> str:
    return "booked"


def _work() -> Work:
    bound = idempotent_handler("memory:orders", name="book", key="id")(_book).plan.bind("shop")
    return Work.of(bound, Message("memory:orders", json.dumps({"id": "k"}).encode(), position="here"))


class _Script:
    """A LeaseStore that notes what it is asked, and is away when told so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away = False
        self.begun = asyncio.Event()
        self.answer = asyncio.Event()
        self.answer.set()

    async def begin(self, claim: Claim, message: Message, handler: str, version: str | None) -> LeasedSaga:
        self.begun.set()
        await self.answer.wait()
        return LeasedSaga(
            key=claim.key, scope=claim.scope, handler=handler, token=1, worker=1, state=State.PROCESSING, attempt=1,
            version=version, rejection=None, stale=False, message=message,
        )  # fmt: skip

    async def steps(self, key: bytes, window: int = 0) -> list[StepRow]:
        self.asked.append("steps")
        return []

    async def complete(self, holding: LeasedSaga, state: State, result: object) -> None:
        self.asked.append(f"complete with {holding.token}")
        if holding.token == 1:
            self.away = True
            raise CommitUnknown("lost")

    async def retake(self, key: bytes, token: int | None) -> LeasedSaga:
        self.asked.append(f"retake {token}")
        if self.away:
            raise StoreUnavailable("away")
        work = _work()
        assert work.call is not None
        held = await self.begin(work.call.claim, work.message, "book", None)
        return replace(held, token=2)


# Nothing of these tests reaches it.
NO_STORE = cast(PostgresStore, SimpleNamespace(most_locks=1, server_started=None, cut_within=None))


async def _told() -> None:
    return


async def test_a_lost_commit_is_still_in_doubt_after_the_database_was_away() -> None:
    """Presented again with the old token, it read the steps beside a COMMIT in flight, and ran one twice."""
    script, work = _Script(), _work()
    engine = LeasedEngine(Engine(NO_STORE), cast(LeaseStore, script))
    with pytest.raises(StoreUnavailable):
        await engine.run(work, _told)
    script.away = False
    outcome = await engine.run(work, _told)
    assert outcome.kind is OutcomeKind.APPLIED
    assert script.asked == ["steps", "complete with 1", "retake 1", "retake 1", "steps", "complete with 2"]


async def test_a_lease_lost_during_the_claim_leaves_the_message_with_the_broker() -> None:
    """It was settled as fenced, though nothing had been stored: the message was gone."""
    script, work = _Script(), _work()
    script.answer.clear()
    engine = LeasedEngine(Engine(NO_STORE), cast(LeaseStore, script))
    running = asyncio.create_task(engine.run(work, _told))
    await script.begun.wait()
    engine.lose()
    outcome = await running
    assert outcome.kind is OutcomeKind.FENCED
    assert settle(outcome) is Settlement.HOLD


_SAGA = (
    "with scope as (insert into idemconsumer.scope (name) values ('shop/-/book') returning id)"
    " insert into idemconsumer.saga (key, scope_id, handler, state, token, worker, due, attempt, source, position,"
    " body, headers, started_at)"
    " select 'k', id, 'book', %s, 5, %s::bigint, clock_timestamp(), 3, 's', 'p', '', '', clock_timestamp() from scope"
)
_TAKE: dict[str, Any] = {
    "scopes": "shop/", "handlers": ["book"], "limit": 5, "unheld": [], "tokens": [],
    "app": "shop", "versions": [""], "grace": 600.0,
}  # fmt: skip


def test_an_undo_that_only_began_does_not_start_the_attempts_anew(database: str) -> None:
    """The row of its step is finished, as a step, so an undo that always failed was never given up."""
    migrated(database, "idemconsumer")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(_SAGA, (2, None))
        connection.execute("set session_replication_role = replica")  # the guard wants a sealed transaction
        connection.execute(
            "insert into idemconsumer.step (key, name, kind, state, has_undo, token, started_at, finished_at)"
            " values ('k', 'charged', 2, 4, true, 5, clock_timestamp(), clock_timestamp())"
        )
        taken = connection.execute(load("idemconsumer")["take_sagas"], _TAKE | {"worker": 1}).fetchall()
    assert [row[4] for row in taken] == [4]
