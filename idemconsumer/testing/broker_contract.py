"""The rules for every broker adapter, as tests. Subclass `BrokerContract` and give it a `harness` fixture.

```python
class TestMyBroker(BrokerContract):
    @pytest.fixture
    async def harness(self, my_server):
        return MyHarness(my_server)
```

It tests the rules that the worker relies on with any broker. Rules for one broker only have tests of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import pytest

from idemconsumer.errors import BrokerUnavailable, SessionEnded
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Broker, BytesInHand, Delivery, KnowsLag, Outgoing, Session

# Seconds to wait for anything expected; a first Kafka join is the slowest.
PATIENCE = 30.0
WIDE = Bounds(lanes=4, group=8, room=100)


class BrokerHarness(Protocol):
    """Gives the suite access to one broker."""

    @property
    def keeps_message_id(self) -> bool:
        """Whether `Outgoing.key` arrives as `Message.message_id`."""
        ...

    @property
    def names_are_free(self) -> bool:
        """Whether any name can be consumed from and published to without being created first."""
        ...

    def broker(self) -> Broker:
        """Return a new client, which the suite closes."""
        ...

    async def destination(self) -> str:
        """Return the name of a queue or topic that is new and empty."""
        ...

    def subscription(self, name: str) -> Subscription:
        """Return the subscription of a handler that is alone on this queue or topic."""
        ...


@dataclass(frozen=True)
class Destination:
    """A new, empty destination, with a client of its broker."""

    broker: Broker
    name: str
    subscription: Subscription

    async def publish(self, *bodies: bytes) -> None:
        await self.broker.publish(self.name, list(map(Outgoing, bodies)))

    @asynccontextmanager
    async def consuming(self, bounds: Bounds = WIDE) -> AsyncIterator[Session]:
        """A session, closed at the end."""
        session = await self.broker.open([self.subscription], bounds)
        try:
            yield session
        finally:
            await session.close()

    async def remaining(self) -> list[bytes]:
        """The bodies that a new session still receives."""
        async with self.consuming() as session:
            return sorted(bodies(await until_idle(session)))


@pytest.mark.asyncio
class BrokerContract:
    """The rules for every broker adapter, as tests. The module's docstring shows how to run them."""

    @pytest.fixture
    async def broker(self, harness: BrokerHarness) -> AsyncIterator[Broker]:
        broker = harness.broker()
        yield broker
        await broker.close()

    @pytest.fixture
    async def fresh(self, broker: Broker, harness: BrokerHarness) -> Destination:
        name = await harness.destination()
        return Destination(broker, name, harness.subscription(name))

    async def test_a_settled_message_is_gone(self, fresh: Destination) -> None:
        await fresh.publish(b"one", b"two")
        async with fresh.consuming() as session:
            deliveries = await arriving(session, 2)
            assert sorted(bodies(deliveries)) == [b"one", b"two"]
            await session.settle(deliveries)
        assert await fresh.remaining() == []

    async def test_an_unsettled_message_comes_again_after_its_session(self, fresh: Destination) -> None:
        await fresh.publish(b"settled")
        async with fresh.consuming() as session:
            await session.settle(await arriving(session, 1))
            await fresh.publish(b"held")
            await arriving(session, 1)
        assert await fresh.remaining() == [b"held"]

    async def test_messages_may_be_settled_out_of_order(self, fresh: Destination) -> None:
        await fresh.publish(*(b"%02d" % number for number in range(20)))
        async with fresh.consuming() as session:
            deliveries = await arriving(session, 20)
            for delivery in [*deliveries[1::2], *reversed(deliveries[0::2])]:
                await session.settle([delivery])
        assert await fresh.remaining() == []

    async def test_settling_twice_is_settling_once(self, fresh: Destination) -> None:
        await fresh.publish(b"one", b"two")
        async with fresh.consuming() as session:
            first, second = await arriving(session, 2)
            await session.settle([first])
            await session.settle([first])
            await session.settle([first, second])
            await fresh.publish(b"three")
            assert bodies(await arriving(session, 1)) == [b"three"]
        assert await fresh.remaining() == [b"three"]

    async def test_a_released_message_comes_again(self, fresh: Destination) -> None:
        await fresh.publish(b"first", b"second")
        async with fresh.consuming() as session:
            first, second = sorted(await arriving(session, 2), key=lambda delivery: delivery.message.body)
            await session.stop_fetching()
            await session.settle([first])
            await session.release([second])
        assert await fresh.remaining() == [b"second"]

    async def test_a_session_is_idle_only_when_nothing_is_left_to_fetch(self, fresh: Destination) -> None:
        async with fresh.consuming(Bounds(lanes=1, group=1, room=1)) as session:
            await until_idle(session)
            await fresh.publish(*(b"%d" % number for number in range(3)))
            assert not await session.idle()
            settled = 0
            while settled < 3:
                deliveries = await arriving(session, 1)
                await session.settle(deliveries)
                settled += len(deliveries)
            await until_idle(session)

    async def test_what_a_session_holds_does_not_keep_it_from_being_idle(self, fresh: Destination) -> None:
        await fresh.publish(b"held")
        async with fresh.consuming() as session:
            assert bodies(await arriving(session, 1)) == [b"held"]
            await until_idle(session)

    async def test_a_draining_session_fetches_nothing_new_and_still_settles(self, fresh: Destination) -> None:
        await fresh.publish(b"running")
        async with fresh.consuming() as session:
            running = await arriving(session, 1)
            await session.stop_fetching()
            await fresh.publish(b"new")
            assert not await session.fetch()
            await session.settle(running)
            assert not await session.fetch()
        assert await fresh.remaining() == [b"new"]

    async def test_settling_after_the_end_is_forgotten_quietly(self, fresh: Destination) -> None:
        await fresh.publish(b"late")
        async with fresh.consuming() as session:
            late = await arriving(session, 1)
        assert all(delivery.epoch.ended for delivery in late)
        await session.settle(late)
        async with fresh.consuming() as another:
            assert bodies(await arriving(another, 1)) == [b"late"]
            await another.settle(late)
        assert await fresh.remaining() == [b"late"]

    async def test_no_more_than_the_bound_is_in_flight(self, fresh: Destination) -> None:
        bounds = Bounds(lanes=2, group=2, room=1)
        await fresh.publish(*(b"%02d" % number for number in range(20)))
        seen: set[bytes] = set()
        async with fresh.consuming(bounds) as session:
            while len(seen) < 20:
                held = await arriving(session, min(bounds.in_flight, 20 - len(seen)))
                held += await session.fetch()
                assert len(held) <= bounds.in_flight
                seen.update(bodies(held))
                await session.settle(held)
        assert await fresh.remaining() == []

    async def test_no_more_is_taken_than_lanes_can_begin_soon(self, fresh: Destination) -> None:
        await fresh.publish(*(b"%02d" % number for number in range(60)))
        share = 4
        bounds = Bounds(lanes=4, group=32, share=lambda source: share)
        async with fresh.consuming(bounds) as session:
            held = await arriving(session, 4)
            held += await session.fetch()
            assert len(held) == 4
            share = 16
            held += await arriving(session, 8)  # a session may leave a few until they are worth a request
            share = 2
            while len(held) > 2:  # messages already on their way still arrive
                held = held[:2] + await self._settled(session, held[2:])
                assert len(held) <= 16 + 4 + 2
            for _ in range(5):
                held = held[1:] + await self._settled(session, held[:1])
                assert len(held) <= 2

    async def _settled(self, session: Session, deliveries: Sequence[Delivery]) -> list[Delivery]:
        await session.settle(deliveries)
        return list(await session.fetch())

    async def test_bytes_in_hand_stay_within_their_bound(self, fresh: Destination) -> None:
        await fresh.publish(*(b"x" * 10_000 for _ in range(30)))
        bounds = Bounds(lanes=4, group=32, memory=BytesInHand(100_000))
        seen = 0
        async with fresh.consuming(bounds) as session:
            while seen < 30:
                held = await arriving(session, 1)
                while not seen and (more := await session.fetch()):
                    held += more
                assert len(held) * 10_000 <= bounds.memory.held <= bounds.memory.bound
                seen += len(held)
                await session.settle(held)
            await until_idle(session)
        assert bounds.memory.held == 0

    async def test_a_message_above_the_bound_in_bytes_passes_alone(self, fresh: Destination) -> None:
        await fresh.publish(*(b"x" * 10_000 for _ in range(3)))
        bounds = Bounds(lanes=4, group=32, memory=BytesInHand(1_000))
        async with fresh.consuming(bounds) as session:
            for _ in range(3):
                alone = await arriving(session, 1)
                assert len(alone) == 1
                assert not await session.fetch()
                await session.settle(alone)

    async def test_of_a_paused_source_nothing_is_taken_and_later_all(self, fresh: Destination) -> None:
        await fresh.publish(b"before")
        paused = True
        async with fresh.consuming(replace(WIDE, paused=lambda source: paused)) as session:
            assert not await session.fetch()
            paused = False
            before = await arriving(session, 1)
            paused = True
            for _ in range(2):  # messages already on their way may still arrive
                assert not await session.fetch()
            await fresh.publish(b"meanwhile")
            assert not await session.fetch()
            await session.settle(before)
            assert not await session.fetch()
            paused = False
            meanwhile = await arriving(session, 1)
            assert bodies(meanwhile) == [b"meanwhile"]
            await session.settle(meanwhile)
        assert await fresh.remaining() == []

    async def test_a_session_that_knows_its_lag_says_how_much_nobody_has_taken(self, fresh: Destination) -> None:
        source = fresh.subscription.source
        await fresh.publish(*(b"%d" % n for n in range(30)))
        async with fresh.consuming(Bounds(lanes=1, group=1, room=1)) as session:
            if not isinstance(session, KnowsLag):
                pytest.skip("this session does not know its lag")
            held = await arriving(session, 2)
            seen = len(held)
            await _until_lag(session, source, 30 - seen)
            while seen < 30:
                await session.settle(held)
                held = await arriving(session, 1)
                seen += len(held)
            assert await _until_lag(session, source, 0) == 0.0
            await session.settle(held)

    async def test_a_message_arrives_as_it_was_published(self, fresh: Destination, harness: BrokerHarness) -> None:
        body = bytes(range(256)) * 5
        headers = {"Idempotency-Key": "a-1", "empty": "", "text": "äöü €", "number": "007"}
        await fresh.broker.publish(fresh.name, [Outgoing(body, headers, key="order-1"), Outgoing(b"")])
        async with fresh.consuming() as session:
            full, empty = sorted(await arriving(session, 2), key=lambda delivery: -len(delivery.message.body))
            assert (full.message.body, empty.message.body) == (body, b"")
            assert {header: full.message.headers[header] for header in headers} == headers
            assert full.message.source == fresh.subscription.source
            assert full.message.position != empty.message.position
            if harness.keeps_message_id:
                assert full.message.message_id == "order-1"
            await session.settle([full, empty])

    async def test_a_missing_destination_is_named(self, broker: Broker, harness: BrokerHarness) -> None:
        if harness.names_are_free:
            pytest.skip("this broker creates what is named")
        with pytest.raises(BrokerUnavailable, match="nobody-made-this"):
            await broker.open([harness.subscription("nobody-made-this")], WIDE)
        with pytest.raises(BrokerUnavailable, match="nobody-made-this"):
            await broker.publish("nobody-made-this", [Outgoing(b"lost?")])
        with pytest.raises(BrokerUnavailable, match="nobody-made-this"):
            await broker.check_destination("nobody-made-this")
        findings = await broker.check(harness.subscription("nobody-made-this"))
        assert any(found.level == "error" and "nobody-made-this" in found.text for found in findings)

    async def test_a_closed_session_ends_the_fetch_that_waits(self, fresh: Destination) -> None:
        session = await fresh.broker.open([fresh.subscription], WIDE)

        async def fetching() -> None:
            while True:
                await session.fetch()

        task = asyncio.create_task(fetching())
        await asyncio.sleep(0)
        await session.close()
        with pytest.raises(SessionEnded):
            await asyncio.wait_for(task, PATIENCE)
        with pytest.raises(SessionEnded):
            await session.fetch()

    async def test_a_healthy_destination_has_no_errors(self, fresh: Destination) -> None:
        await fresh.broker.check_destination(fresh.name)
        findings = await fresh.broker.check(fresh.subscription)
        assert findings
        assert [found for found in findings if found.level == "error"] == []


# ---------------------------------------------------------------------------- also for an adapter's own tests
async def arriving(session: Session, count: int) -> list[Delivery]:
    """Fetch until `count` deliveries are there, or fail."""
    deliveries: list[Delivery] = []
    deadline = time.monotonic() + PATIENCE
    while len(deliveries) < count:
        assert time.monotonic() < deadline, f"{len(deliveries)} of {count} arrived in {PATIENCE:.0f} s"
        deliveries += await session.fetch()
    return deliveries


async def _until_lag(session: KnowsLag, source: str, messages: int) -> float | None:
    """Wait until so many messages are left; returns how old the oldest is. Some brokers count with a delay."""
    deadline = time.monotonic() + PATIENCE
    while (lag := (await session.lag(whole=True)).get(source)) is None or lag.messages != messages:
        assert time.monotonic() < deadline, f"{lag}, not {messages} messages after {PATIENCE:.0f} s"
        await asyncio.sleep(0.1)
    return lag.seconds


async def until_idle(session: Session) -> list[Delivery]:
    """Fetch until the session reports that it is idle; returns the deliveries."""
    deliveries: list[Delivery] = []
    deadline = time.monotonic() + PATIENCE
    while not await session.idle():
        assert time.monotonic() < deadline, f"not idle after {PATIENCE:.0f} s"
        deliveries += await session.fetch()
    return deliveries


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.message.body for delivery in deliveries]
