"""Connections are shared by handlers: each has one of its own, and who holds the fewest gets the next one (D13)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from idemconsumer.stores.sharing import PARTY, Sharing
from tests.support.inside import held_by_party, spare


class Bench:
    """Five places: one for each of `a`, `b` and the others, and two more."""

    def __init__(self) -> None:
        self.sharing = Sharing(5, ["a", "b"])
        self.inside: list[str] = []
        self._leave: dict[str, list[asyncio.Event]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def enter(self, *parties: str) -> None:
        for party in parties:
            event = asyncio.Event()
            self._leave.setdefault(party, []).append(event)
            self._tasks.append(asyncio.create_task(self._hold(party, event)))

    async def _hold(self, party: str, event: asyncio.Event) -> None:
        PARTY.set(party)
        async with self.sharing.place():
            self.inside.append(party)
            await event.wait()
            self.inside.remove(party)

    def leave(self, party: str) -> None:
        self._leave[party].pop(0).set()

    def cancel(self, index: int) -> None:
        self._tasks[index].cancel()

    async def now(self) -> str:
        """Who has a place, once nothing more happens."""
        for _ in range(20):
            await asyncio.sleep(0)
        return "".join(sorted(self.inside))

    async def end(self) -> None:
        for event in [event for events in self._leave.values() for event in events]:
            event.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.end()
    assert held_by_party(bench.sharing) == {"": 0, "a": 0, "b": 0}
    assert spare(bench.sharing) == 2
    assert not bench.sharing._waiting


async def test_no_party_gets_what_another_one_has_for_itself(bench: Bench) -> None:
    bench.enter(*"aaaaaaaa")
    assert await bench.now() == "aaa"
    bench.enter("b")
    assert await bench.now() == "aaab", "at once"
    bench.enter("nobody's")
    assert await bench.now() == "aaabnobody's"


async def test_the_next_free_one_goes_to_the_party_with_the_fewest(bench: Bench) -> None:
    bench.enter(*"aaaaaabbb")
    assert await bench.now() == "aaab"
    bench.leave("a")
    assert await bench.now() == "aabb", "though three of the other waited before it"
    bench.leave("a")
    assert await bench.now() in ("aabb", "abbb")


async def test_what_a_party_has_for_itself_it_keeps(bench: Bench) -> None:
    bench.enter(*"aaabb")
    bench.leave("b")
    assert await bench.now() == "aaab"
    bench.leave("b")
    bench.enter("a")
    assert await bench.now() == "aaa"


@pytest.mark.parametrize("given", [False, True])
async def test_who_is_cancelled_while_it_waits_costs_nobody_a_place(bench: Bench, given: bool) -> None:
    bench.enter(*"aaaaa")
    assert await bench.now() == "aaa"
    if given:
        bench.leave("a")
        await asyncio.sleep(0)
    bench.cancel(3)
    await bench.now()
    if not given:
        bench.leave("a")
    assert await bench.now() == "aaa", "the last one has it"
