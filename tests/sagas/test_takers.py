"""Two takers of one stale saga, each interleaving made by locks and not by luck: one of them gets it (L2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import psycopg
import pytest

from idemconsumer import OutcomeKind, Saga
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.engine.work import Work
from idemconsumer.errors import ConfigurationError
from idemconsumer.sql.queries import load
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.support.sagas import SCHEMA, Bench, OpenStation, Station, order, put, saga
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database
from tests.support.waiting import until

_DOOR = 4711  # the advisory lock that a late taker waits for, between its snapshot and its row lock


async def book(order: dict[str, Any], saga: Saga) -> str:
    await saga.tx("a", put, "a")
    return "done"


HANDLER = saga(book)


@pytest.fixture(scope="module", params=["postgres18", "postgres15"])
def _one_database(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """In each supported version: what a statement sees of a row that was changed under it is the server's doing."""
    server: PostgresServer = request.getfixturevalue(request.param)
    with fresh_database(server.dsn) as dsn, closing(Bench(dsn)) as bench:
        yield bench


@pytest.fixture
async def stale(bench: Bench, open_station: OpenStation) -> LeasedSaga:
    """A saga whose owner's lease is over."""
    owner = await open_station()
    call = Work.of(HANDLER, order()).call
    assert call is not None
    holding = await owner.leases.begin(call.claim, order(), HANDLER.name, None)
    assert isinstance(holding, LeasedSaga)
    bench.expire(owner)
    return holding


@pytest.fixture
async def late(bench: Bench, open_station: OpenStation) -> Station:
    """A station whose takes have their snapshot before they come to the door, and lock rows only behind it."""
    bench.run(
        "create or replace function pass_door() returns boolean language sql volatile as"
        " 'select pg_advisory_xact_lock_shared(4711) is not null'"
    )
    station = await open_station()
    queries = dict(load(SCHEMA))
    handler = b"s.handler = h.handler"
    assert queries["take_sagas"].count(handler) == 2, "of the stale ones, and of those that are due"
    queries["take_sagas"] = queries["take_sagas"].replace(handler, handler + b" and pass_door()")
    station.store.pool.queries = queries
    return station


@asynccontextmanager
async def late_taker(bench: Bench, station: Station) -> AsyncIterator[asyncio.Task[LeasedSaga | None]]:
    """Its take has its snapshot, and comes to the rows when the block ends."""
    async with await psycopg.AsyncConnection.connect(bench.dsn, autocommit=True) as keeper:
        await keeper.execute("select pg_advisory_lock(%s)", (_DOOR,))
        taker = asyncio.create_task(station.take(HANDLER))
        await until(lambda: bench.waiting() == 1, "it has its snapshot")
        yield taker
        await keeper.execute("select pg_advisory_unlock(%s)", (_DOOR,))


@asynccontextmanager
async def taking(bench: Bench, station: Station) -> AsyncIterator[None]:
    """The station's take has run, and commits when the block ends."""
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        params = {
            "scopes": "shop/", "handlers": [HANDLER.name], "limit": 1, "worker": station.lease.worker,
            "unheld": list[bytes](), "tokens": list[int](), "app": "shop", "versions": [""], "grace": 600.0,
        }  # fmt: skip
        cursor = await rival.execute(load(SCHEMA)["take_sagas"], params)
        assert cursor.rowcount == 1
        yield
        await rival.commit()


@pytest.mark.usefixtures("stale")
async def test_a_taker_gets_nothing_and_does_not_wait_while_another_is_taking(
    bench: Bench, one: Station, two: Station
) -> None:
    async with taking(bench, one):
        async with asyncio.timeout(30):
            assert await two.take(HANDLER) is None
        assert bench.waiting() == 0
    assert await two.take(HANDLER) is None, "the saga has a living owner now"


@pytest.mark.parametrize("seen", ["stale", "due"])
async def test_a_taker_that_saw_the_saga_free_gets_nothing_when_another_has_taken_it_since(
    bench: Bench, stale: LeasedSaga, one: Station, late: Station, seen: str
) -> None:
    if seen == "due":
        bench.run("update idemconsumer.saga set worker = null")
    async with late_taker(bench, late) as behind:
        taken = await one.take(HANDLER)
        assert taken is not None
    assert await behind is None
    assert stale.token < taken.token == bench.token
    assert (await one.run(Work.of(HANDLER, taken.message, leased=taken))).kind is OutcomeKind.APPLIED


async def test_a_taker_that_saw_the_saga_stale_gets_nothing_while_another_is_taking(
    bench: Bench, stale: LeasedSaga, one: Station, late: Station
) -> None:
    async with AsyncExitStack() as rival:
        async with late_taker(bench, late) as behind:
            await rival.enter_async_context(taking(bench, one))
        async with asyncio.timeout(30):
            assert await behind is None
    assert bench.token > stale.token


@pytest.mark.usefixtures("stale")
async def test_a_taker_that_saw_the_saga_stale_gets_nothing_when_it_has_ended_since(
    bench: Bench, one: Station, late: Station
) -> None:
    async with late_taker(bench, late) as behind:
        assert (await one.resume(HANDLER)).kind is OutcomeKind.APPLIED
    assert await behind is None
    assert bench.effects == ["a"]


async def test_a_taker_that_saw_the_saga_stale_gets_it_the_next_time_when_it_was_released_since(
    bench: Bench, stale: LeasedSaga, one: Station, late: Station
) -> None:
    async with late_taker(bench, late) as behind:
        taken = await one.take(HANDLER)
        assert taken is not None
        await one.leases.release(taken, 0.0, None, count=False)
    assert await behind is None
    holding = await one.take(HANDLER)
    assert holding is not None
    assert stale.token < taken.token < holding.token == bench.token


# --------------------------------------------------------------------------------------------------- a person decides
def decide(bench: Bench, saga: LeasedSaga) -> asyncio.Task[None]:
    return asyncio.create_task(SagaAdmin(bench.dsn, SCHEMA).resume(saga.key, by="ann"))


async def test_nobody_decides_upon_a_saga_that_a_worker_took_while_the_decision_waited(
    bench: Bench, stale: LeasedSaga, one: Station
) -> None:
    async with taking(bench, one):
        decision = decide(bench, stale)
        await until(lambda: bench.waiting() == 1, "it waits for the row")
    with pytest.raises(ConfigurationError, match="is being run by test"):
        await decision


async def test_nobody_decides_upon_a_saga_whose_worker_renewed_its_lease_while_the_decision_waited(
    bench: Bench, stale: LeasedSaga
) -> None:
    """As it does while its open step is waited for."""
    async with await psycopg.AsyncConnection.connect(bench.dsn) as owner:
        await owner.execute("select 1 from idemconsumer.saga for share")
        decision = decide(bench, stale)
        await until(lambda: bench.waiting() == 1, "it waits for the row")
        bench.run("update idemconsumer.worker set until = clock_timestamp() + lease")
        await owner.commit()
    with pytest.raises(ConfigurationError, match="is being run by test"):
        await decision
