"""What leaves for other brokers goes on within two seconds of the database's return, however long it was away (D27)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from idemconsumer.errors import StoreUnavailable
from idemconsumer.observe.counts import Counts
from idemconsumer.rules.session_pause import SOON
from idemconsumer.sql.queries import load
from idemconsumer.worker.outgoing import OutgoingLane
from idemconsumer.worker.relay import Relay
from tests.support.waiting import PATIENCE, until

FAILURES = 12  # in a row


class Away:
    """The database: as connections that a relay asks for, and as a pool."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        raise self.error
        yield

    async def alone(self, *_: Any) -> list[tuple[Any, ...]]:
        raise self.error


@pytest.fixture(params=[StoreUnavailable, ValueError])
def error(request: pytest.FixtureRequest) -> Exception:
    made: Exception = request.param("it is away")
    return made


async def test_a_relay_looks_again_soon_unless_it_is_its_broker_that_is_away(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pauses: list[float] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        pauses.append(seconds)
        if len(pauses) == FAILURES:
            lane.stop()
        return asyncio.Timeout(0)

    monkeypatch.setattr("asyncio.timeout", timeout)
    gone: Any = Away(error)
    lane = OutgoingLane("kafka:t", gone, gone, load("idemconsumer"), Counts(), gone, lambda *_: None)
    await lane.run()
    assert (max(pauses) <= SOON) == isinstance(error, StoreUnavailable)


async def test_a_drain_looks_once_more_for_letters_though_the_database_was_away() -> None:
    """O19: one that was written just before would wait for another worker, or for the next start."""
    looks = list[str]()

    class Back(Away):
        async def read(self, *asked: Any) -> list[tuple[Any, ...]]:
            looks.append(asked[0])
            if len(looks) == 1:
                raise self.error
            return []

    database: Any = Back(StoreUnavailable("it is away"))
    relay = Relay(database, "", "idemconsumer", ["kafka"], database, Counts(), lambda *_: None)
    async with asyncio.timeout(PATIENCE):
        running = asyncio.create_task(relay.run())
        await until(lambda: looks)
        relay.stop()
        await running
    assert looks == ["outbox_destinations"] * 2
