"""Any number of callers share a few connections, and none is left behind."""

from __future__ import annotations

import asyncio

import pytest

from idemconsumer.brokers.publishers import MOST, Publishers


class Connection:
    open: set[Connection]

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.open.discard(self)


class Server:
    def __init__(self) -> None:
        self.open: set[Connection] = set()
        self.made = 0
        self.publishers = Publishers(self.connect)

    async def connect(self) -> Connection:
        await asyncio.sleep(0)
        made = Connection()
        made.open = self.open
        self.open.add(made)
        self.made += 1
        assert len(self.open) <= MOST
        return made

    async def publish(self, last: asyncio.Event | None = None) -> None:
        async with self.publishers.one():
            await (asyncio.sleep(0) if last is None else last.wait())


async def test_a_connection_goes_from_one_caller_to_the_next_and_is_closed_by_the_last() -> None:
    server = Server()
    await asyncio.gather(*(server.publish() for _ in range(100)))
    assert (server.made, server.open) == (MOST, set())


async def test_one_that_failed_is_not_handed_on() -> None:
    server = Server()
    with pytest.raises(ValueError, match="no"):
        async with server.publishers.one():
            raise ValueError("no")
    assert not server.open
    await asyncio.gather(*(server.publish() for _ in range(10)))


async def test_callers_that_are_cancelled_leave_nothing_behind() -> None:
    server, never = Server(), asyncio.Event()
    callers = [asyncio.create_task(server.publish(never)) for _ in range(3 * MOST)]
    await asyncio.sleep(0.01)
    assert len(server.open) == MOST
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    assert not server.open
    await server.publish()
    assert not server.open


def test_each_event_loop_has_its_own() -> None:
    server = Server()
    for _ in range(2):
        asyncio.run(server.publish())
    assert (server.made, server.open) == (2, set())
