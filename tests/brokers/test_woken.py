"""P11: of many workers that wait for the same queues one is woken by a message, and others once it is not enough."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.brokers.postgres_session import PostgresSession
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.user_code.cancellation import end
from tests.support.inside import is_told, saw_earlier, told_how_many
from tests.support.ledger import SCHEMA, Ledger
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until


@pytest.fixture
def ledger(database: str) -> Iterator[Ledger]:
    with closing(Ledger(database)) as ledger:
        yield ledger


@pytest.fixture
def looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its beginning; what a session finds later it was told of, or shown."""
    tuned(monkeypatch, queue_look_pause=600.0)


@pytest.fixture
def two_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sessions, too, one may listen for both."""
    tuned(monkeypatch, queue_few_listening=1)


async def opened(broker: PostgresBroker, *queues: str, lanes: int = 8, app: str = "shop") -> PostgresSession:
    """As in a worker: each lane has a message that runs, and one that waits."""
    given = [Subscription(f"postgres:{each}", "send", app) for each in queues or ["emails"]]
    return await broker.open(given, Bounds(lanes=lanes, group=1, room=10, share=lambda _: 2 * lanes))


async def at_rest(session: PostgresSession) -> asyncio.Task[list[Delivery]]:
    """It has looked, has found nothing, and waits for what it can take."""

    async def taken() -> list[Delivery]:
        while not (deliveries := await session.fetch()):
            pass
        return list(deliveries)

    fetching = asyncio.create_task(taken())
    await until(lambda: session.readable and bool(session._woken._waiters))
    return fetching


async def bodies(taking: asyncio.Task[list[Delivery]]) -> Sequence[bytes]:
    async with asyncio.timeout(PATIENCE):
        return [each.message.body for each in await taking]


async def commits(dsn: str) -> int:
    """Once nobody is connected: a session tells its own when it ends. Asked from another database."""
    name = conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as judge:

        def alone() -> bool:
            query = "select 1 from pg_stat_activity where datname = %s and backend_type = 'client backend'"
            return not judge.execute(query, (name,)).fetchall()

        await until(alone, "the sessions are gone")
        ((number,),) = judge.execute("select xact_commit from pg_stat_database where datname = %s", (name,))
    return int(number)


async def spent(dsn: str, messages: int) -> int:
    """Transactions of twenty sessions that so many messages come to, one after the other."""
    broker, settled = PostgresBroker(Settings(dsn=dsn)), 0
    before = await commits(dsn)
    sessions = [await opened(broker) for _ in range(20)]

    async def work(session: PostgresSession) -> None:
        nonlocal settled
        while True:
            deliveries = await session.fetch()
            await session.settle(deliveries)
            settled += len(deliveries)

    def more_than(number: int) -> bool:
        return settled > number

    for session in sessions:
        await told_how_many(session)
    assert [session for session in sessions if is_told(session)] == sessions[:1]
    working = [asyncio.create_task(work(session)) for session in sessions]
    await until(lambda: all(session.readable for session in sessions), "each has looked once")
    with psycopg.connect(dsn, autocommit=True) as publisher:
        while settled < messages:
            done = partial(more_than, settled)
            publisher.execute("select idemconsumer.publish_bytes('emails', 'x')")
            await until(done, "it is taken at once, though the next look is in ten minutes")
    await end(*working)
    for session in sessions:
        await session.close()
    return await commits(dsn) - before


async def test_one_of_twenty_takes_a_message_and_no_other_asks(
    database: str, monkeypatch: pytest.MonkeyPatch, looks_once: None
) -> None:
    """Beside the transaction that publishes it: one that is told, takes it and settles it."""
    tuned(monkeypatch, queue_lead_pause=600.0, queue_visibility=600.0)
    migrated(database, SCHEMA)
    few = await spent(database, 10)  # with which each statement is prepared
    assert round((await spent(database, 30) - few) / 20) <= 1 + 3


async def test_one_that_is_told_for_all_leaves_what_its_lanes_cannot_begin(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, looks_once: None, two_are_many: None
) -> None:
    """Others find it, and each takes all that it may once all have looked."""
    tuned(monkeypatch, queue_lead_pause=600.0, queue_others_look_for=300.0)
    broker = PostgresBroker(Settings(dsn=ledger.dsn))
    first, second = await opened(broker), await opened(broker)
    await told_how_many(first)
    taking, waiting = await at_rest(first), await at_rest(second)
    assert [is_told(each) for each in (first, second)] == [True, False]

    ledger.run("insert into idemconsumer.queue (name, body) select 'emails', 'x' from generate_series(1, 20)")
    await broker.publish("emails", [Outgoing(b"x")])
    assert len(await bodies(taking)) == 8
    second.looked({"emails": -0.05})
    assert not second._woken.is_set(), "that is what the first one may be taking now"
    second.looked({"emails": -0.2})
    assert len(await bodies(waiting)) == 8, "there may be a third one"
    await until(lambda: is_told(second))
    rest = await at_rest(second)
    saw_earlier(second, 300.0)
    second.looked({"emails": -0.2})
    assert len(await bodies(rest)) == 5, "nobody else has taken it, so it may wait here"
    await first.close()
    await second.close()


async def test_who_has_seen_what_had_waited_listens_until_it_has_been_calm(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, looks_once: None, two_are_many: None
) -> None:
    tuned(monkeypatch, queue_lead_pause=0.1)
    broker = PostgresBroker(Settings(dsn=ledger.dsn))
    first, second = await opened(broker), await opened(broker)
    waiting = await at_rest(second)
    assert not is_told(second)
    second.looked({"emails": -0.2})
    await until(lambda: is_told(second))
    await broker.publish("emails", [Outgoing(b"x")])
    assert await bodies(waiting) == [b"x"], "it is told, and the first one takes nothing here"
    saw_earlier(second, 600.0)
    await until(lambda: not is_told(second), "it ceases to")
    assert is_told(first)
    await first.close()
    await second.close()


async def test_those_with_few_lanes_are_all_told(ledger: Ledger, looks_once: None, two_are_many: None) -> None:
    """Else the third message would wait for a look, while the first one has all that it may take."""
    broker, taken = PostgresBroker(Settings(dsn=ledger.dsn)), list[bytes]()
    sessions = [await opened(broker, lanes=1) for _ in range(2)]

    async def take(session: PostgresSession) -> None:
        while True:
            taken.extend(each.message.body for each in await session.fetch())

    taking = [asyncio.create_task(take(session)) for session in sessions]
    await until(lambda: all(session.readable for session in sessions), "each has looked once")
    for number in range(1, 5):
        await broker.publish("emails", [Outgoing(b"x")])
        await until(lambda: len(taken) == number)  # noqa: B023 - it is awaited here
    await end(*taking)
    for session in sessions:
        await session.close()


async def test_three_are_all_told_and_four_are_not(ledger: Ledger) -> None:
    broker = PostgresBroker(Settings(dsn=ledger.dsn))
    sessions = [await opened(broker) for _ in range(3)]
    assert all(map(is_told, sessions))
    sessions.append(await opened(broker))
    for session in sessions:
        await told_how_many(session)
    assert [is_told(each) for each in sessions] == [True, False, False, False]
    await sessions.pop().close()

    async def all_told() -> bool:
        for session in sessions:
            await told_how_many(session)
        return all(map(is_told, sessions))

    await until(all_told, "the server has noticed that one is gone")
    for session in sessions:
        await session.close()


async def test_another_one_listens_when_the_first_is_gone(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, looks_once: None, two_are_many: None
) -> None:
    tuned(monkeypatch, queue_lead_pause=0.2)
    broker = PostgresBroker(Settings(dsn=ledger.dsn))
    first, second, others, theirs = (
        await opened(broker),
        await opened(broker),
        await opened(broker, "letters"),
        await opened(broker, app="billing"),
    )
    told = [is_told(each) for each in (first, second, others, theirs)]
    assert told == [True, False, True, True], "one for each set of queues, and of handlers"

    waiting = await at_rest(second)
    unannounced = "insert into idemconsumer.queue (name, body) values ('emails', 'missed')"
    ledger.run(unannounced)
    await first.close()
    assert await bodies(waiting) == [b"missed"], "it takes its place, and looks"
    assert is_told(second)
    for session in (second, others, theirs):
        await session.close()


async def test_a_decision_is_seen_by_those_who_are_not_told(ledger: Ledger, two_are_many: None) -> None:
    broker, told = PostgresBroker(Settings(dsn=ledger.dsn)), asyncio.Event()
    broker.tell(told.set)
    first, second = await opened(broker), await opened(broker)
    await second.fetch()
    assert not told.is_set()
    ledger.run(
        "insert into idemconsumer.audit (at, by, role, what, target) values (now(), 'p', 'r', 'pause', 'shop/send')"
    )

    async def seen() -> bool:
        await second.fetch()
        return told.is_set()

    await until(seen, "a look has the number of the last decision")
    await first.close()
    await second.close()
