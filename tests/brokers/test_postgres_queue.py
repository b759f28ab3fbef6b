"""The queue in Postgres: what is taken is hidden from others, and only its latest delivery settles it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing

import psycopg
import pytest

from idemconsumer.brokers import postgres
from idemconsumer.brokers.postgres import PostgresBroker, PostgresSession
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from idemconsumer.settings import Settings
from tests.support.ledger import Ledger

Opens = Callable[[], Awaitable[PostgresSession]]


@pytest.fixture
def ledger(database: str) -> Iterator[Ledger]:
    with closing(Ledger(database)) as ledger:
        yield ledger


@pytest.fixture
def broker(ledger: Ledger) -> PostgresBroker:
    return PostgresBroker(Settings(dsn=ledger.dsn))


@pytest.fixture
async def opened(broker: PostgresBroker) -> AsyncIterator[Opens]:
    async with AsyncExitStack() as stack:

        async def open_() -> PostgresSession:
            bounds = Bounds(lanes=1, group=1, room=10)
            session = await broker.open([Subscription("postgres:emails", "send", "shop")], bounds)
            stack.push_async_callback(session.close)
            return session

        yield open_


async def publish(broker: PostgresBroker, *bodies: bytes) -> None:
    await broker.publish("emails", [Outgoing(body) for body in bodies])


async def taken(session: PostgresSession) -> list[Delivery]:
    async with asyncio.timeout(5):
        while not (deliveries := await session.fetch()):
            pass
    return list(deliveries)


def waiting(ledger: Ledger) -> int:
    return len(ledger.run("select 1 from idemconsumer.queue"))


async def test_a_late_settlement_of_an_expired_delivery_deletes_nothing(
    ledger: Ledger, broker: PostgresBroker, opened: Opens
) -> None:
    await publish(broker, b"1")
    slow, quick = await opened(), await opened()
    (first,) = await taken(slow)
    ledger.run("update idemconsumer.queue set visible_at = clock_timestamp() - interval '1 second'")
    (second,) = await taken(quick)
    assert (second.suspect, second.count) == (True, 2)

    await slow.settle([first])
    assert waiting(ledger) == 1

    await quick.settle([second])
    assert waiting(ledger) == 0


async def test_what_another_is_taking_is_passed_over_and_not_waited_for(
    ledger: Ledger, broker: PostgresBroker, opened: Opens
) -> None:
    await publish(broker, b"1", b"2")
    session = await opened()
    with psycopg.connect(ledger.dsn) as other:
        other.execute("select 1 from idemconsumer.queue order by id limit 1 for update")
        async with asyncio.timeout(2):
            assert [delivery.message.body for delivery in await taken(session)] == [b"2"]


async def test_what_is_held_stays_hidden_from_others(
    monkeypatch: pytest.MonkeyPatch, broker: PostgresBroker, opened: Opens
) -> None:
    monkeypatch.setattr(postgres, "VISIBILITY", 0.6)
    await publish(broker, b"1")
    holder, other = await opened(), await opened()
    (held,) = await taken(holder)
    for _ in range(2):
        assert not await other.fetch()  # each waits for a second
    await holder.settle([held])
    assert not await other.fetch()


async def test_what_was_never_started_comes_again_as_if_it_had_not_been_delivered(
    broker: PostgresBroker, opened: Opens
) -> None:
    await publish(broker, b"1")
    session = await opened()
    await session.release(await taken(session))
    (again,) = await taken(await opened())
    assert (again.suspect, again.count) == (False, 1)


async def test_a_message_that_nothing_announced_is_found_within_seconds(ledger: Ledger, opened: Opens) -> None:
    session = await opened()
    assert not await session.fetch()
    ledger.run("insert into idemconsumer.queue (name, body) values ('emails', 'quiet')")
    assert [delivery.message.body for delivery in await taken(session)] == [b"quiet"]
