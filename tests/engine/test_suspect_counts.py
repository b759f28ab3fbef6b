"""What is counted before a suspect runs: once for each process that may have died of it, and for nothing else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from idemconsumer import Message, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.handlers.decorator import Handler
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Outcome
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, works, write
from tests.support.waiting import PATIENCE


class Cuts:
    """A handler whose connection breaks under its first runs; it then works, or fails for ever."""

    def __init__(self, cuts: int, *, fails: bool = False, **options: Any) -> None:
        self.seen: list[int] = []

        @idempotent_handler(SOURCE, key="id", **options)
        async def handle(order: dict[str, Any], tx: Tx, message: Message) -> None:
            self.seen.append(message.attempt)
            await write(tx, order["id"])
            if len(self.seen) <= cuts:
                await tx.execute("select pg_terminate_backend(pg_backend_pid())")
            if fails:
                raise ValueError

        self.handler: Handler[..., Any] = handle

    def suspect(self) -> Work:
        return works(self.handler, 1, suspect=True)[0]


async def through_outages(engine: Engine, cuts: Cuts, *, redelivered: bool, runs: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    given = cuts.suspect()
    for _ in range(runs):
        try:
            outcomes.append(await engine.process(given))
        except StoreUnavailable:
            if redelivered:
                given = cuts.suspect()
    return outcomes


@pytest.mark.parametrize("redelivered", [True, False], ids=["redelivered", "held meanwhile"])
async def test_a_suspect_that_outages_cut_off_is_counted_once_and_killed_nobody(
    ledger: Ledger, engine: Engine, redelivered: bool
) -> None:
    cuts = Cuts(2, max_attempts=1)  # a third one in a row would be its own doing (B13)
    outcomes = await through_outages(engine, cuts, redelivered=redelivered, runs=3)
    assert (kinds(outcomes), cuts.seen) == (["applied"], [1] * 3)
    assert (ledger.effects, ledger.letters, ledger.attempts) == (["1"], [], [])


@pytest.mark.parametrize("redelivered", [True, False], ids=["redelivered", "held meanwhile"])
async def test_what_another_process_had_begun_is_counted_once_though_outages_cut_it_off(
    ledger: Ledger, engine: Engine, store: PostgresStore, redelivered: bool
) -> None:
    cuts = Cuts(2, max_attempts=1)
    await store.mark_attempts([cuts.suspect().claim])
    outcomes = await through_outages(engine, cuts, redelivered=redelivered, runs=3)
    assert (kinds(outcomes), cuts.seen) == (["applied"], [1] * 3)
    assert (ledger.effects, ledger.letters, ledger.attempts) == (["1"], [], [])


@pytest.mark.parametrize("redelivered", [True, False], ids=["redelivered", "held meanwhile"])
async def test_after_an_outage_a_suspect_has_its_attempts_and_no_more(
    ledger: Ledger, engine: Engine, redelivered: bool
) -> None:
    cuts = Cuts(2, fails=True, max_attempts=3)
    outcomes = await through_outages(engine, cuts, redelivered=redelivered, runs=5)
    assert cuts.seen == [1, 1, 1, 2, 3]
    assert kinds(outcomes) == ["retrying", "retrying", "dead"]
    assert ledger.letters == [("attempts_exhausted", 1)]


async def test_another_process_does_count_what_was_cut_off_here(ledger: Ledger, store: PostgresStore) -> None:
    """It cannot know that the process that counted is alive: as far as it can tell, this message killed it."""
    cuts = Cuts(2, max_attempts=3)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await Engine(store).process(cuts.suspect())
    assert (await Engine(store).process(cuts.suspect())).kind == "applied"
    assert cuts.seen == [1, 1, 2], "marked, then counted, then counted once more"


async def test_a_suspect_that_runs_elsewhere_is_neither_counted_nor_waited_for_with_all_lanes_quiet(
    ledger: Ledger, store: PostgresStore
) -> None:
    running, go = asyncio.Event(), asyncio.Event()

    @idempotent_handler(SOURCE, key="id", max_attempts=1, wait="100ms")
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        running.set()
        await go.wait()

    elsewhere = await PostgresStore.open(ledger.dsn, SCHEMA, connections=2, longest_run=30.0)
    (ours,) = works(handle, 1, suspect=True)
    await store.mark_attempts([ours.claim])
    theirs = asyncio.create_task(Engine(elsewhere).process(works(handle, 1, suspect=True)[0]))
    await running.wait()
    engine = Engine(store)
    async with asyncio.timeout(PATIENCE), engine.company.shared():  # a lane of ours is busy
        meanwhile = [await engine.process(ours) for _ in range(3)]
    assert kinds(meanwhile) == ["busy"] * 3
    assert (ledger.attempts, ledger.letters) == ([1], []), "one run has begun, and that is not ours"

    theirs.cancel()  # as a drain does; it gives its count back
    await asyncio.gather(theirs, return_exceptions=True)
    await elsewhere.close()
    go.set()

    assert (await engine.process(ours)).kind == "applied"
    assert (ledger.effects, ledger.letters, ledger.attempts) == (["1"], [], [])


class RivalAfterCount(PostgresStore):
    """A rival begins to run the message after it was counted here."""

    rival: AsyncExitStack

    async def count_attempt(self, claim: Claim, error: str | None) -> int:
        count = await super().count_attempt(claim, error)
        claims = await self.rival.enter_async_context(self.transaction(group=1))
        await claims.claim([claim])
        return count


async def test_what_a_rival_runs_is_not_buried(ledger: Ledger) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def never(order: dict[str, Any], tx: Tx) -> None:
        raise AssertionError

    (given,) = works(never, 1, suspect=True)
    store = await RivalAfterCount.open(ledger.dsn, SCHEMA, connections=3, longest_run=30.0)
    assert isinstance(store, RivalAfterCount)
    async with AsyncExitStack() as store.rival:
        await PostgresStore.count_attempt(store, given.claim, None)
        outcome = await Engine(store).process(given)
        assert (outcome.kind, ledger.attempts, ledger.letters) == ("retrying", [1], [])
    await store.close()


async def test_what_a_rival_began_to_run_gets_its_count_back(ledger: Ledger) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=3)
    async def never(order: dict[str, Any], tx: Tx) -> None:
        raise AssertionError

    (given,) = works(never, 1, suspect=True)
    store = await RivalAfterCount.open(ledger.dsn, SCHEMA, connections=3, longest_run=30.0)
    assert isinstance(store, RivalAfterCount)
    async with AsyncExitStack() as store.rival:
        await PostgresStore.count_attempt(store, given.claim, None)
        assert (await Engine(store).process(given)).kind == "busy"
        assert ledger.attempts == [1]
    await store.close()
