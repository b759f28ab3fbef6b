"""Sharing and being alone, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Context
from functools import partial

import pytest

from idemconsumer.engine.company import Company, Stay
from tests.support.inside import impatient, set_longest, set_patience
from tests.support.waiting import until


class Room:
    """Somebody who comes in, stays until told to leave, and whose name is in `inside` meanwhile."""

    def __init__(self) -> None:
        self.company = Company(patience=0.0)
        self.inside: list[str] = []
        self.asked: list[str] = []
        self.stays: dict[str, Stay] = {}
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def comes(self, name: str) -> None:
        """Alone if the name is in capitals, alone at first if it is a title. A saga gives way, into `asked`."""
        way: AbstractAsyncContextManager[Stay]
        give_way = partial(self.asked.append, name) if name.lower().startswith("saga") else None
        if name.istitle() and give_way is not None:
            way = self.company.alone_at_first(give_way)
        else:
            way = self.company.alone() if name.isupper() else self.company.shared(give_way)
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._stay(name, way), context=Context())  # part of nobody
        await self.quiet()

    async def _stay(self, name: str, way: AbstractAsyncContextManager[Stay]) -> None:
        async with way as self.stays[name]:
            self.inside.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.inside.remove(name)

    async def goes(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await self.quiet()

    async def is_cancelled(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        ends = await asyncio.gather(*(self._tasks[name] for name in names), return_exceptions=True)
        assert [end for end in ends if not isinstance(end, asyncio.CancelledError | None)] == []
        await self.quiet()

    async def quiet(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    @asynccontextmanager
    async def emptied(self) -> AsyncIterator[None]:
        """At the end nobody is inside, and the next one may be alone at once."""
        yield
        await self.is_cancelled(*self._tasks)
        async with asyncio.timeout(30), self.company.alone():
            assert self.inside == []


@pytest.fixture
def room() -> Room:
    return Room()


async def test_one_that_is_alone_has_nobody_beside_it(room: Room) -> None:
    async with room.emptied():
        await room.comes("a")
        await room.comes("b")
        await room.comes("X")
        assert room.inside == ["a", "b"]
        await room.goes("a")
        assert room.inside == ["b"]
        await room.goes("b")
        assert room.inside == ["X"]
        await room.comes("c")
        await room.comes("Y")
        assert room.inside == ["X"]
        await room.goes("X")
        assert room.inside == ["c"]
        await room.goes("c")
        assert room.inside == ["Y"]


async def test_who_comes_later_waits_behind_one_that_waits_to_be_alone(room: Room) -> None:
    """Else a stream of groups would keep it out for ever; and those that wait to share go in together after it."""
    async with room.emptied():
        for name in ("a", "X", "Y", "b", "c"):
            await room.comes(name)
        assert room.inside == ["a"]
        await room.goes("a")
        assert room.inside == ["X"]
        await room.goes("X")
        assert room.inside == ["b", "c"], "before the next one that is alone"
        await room.comes("d")
        for name in ("b", "c"):
            await room.goes(name)
        assert room.inside == ["Y"]
        await room.goes("Y")
        assert room.inside == ["d"]


async def test_one_that_gives_up_waiting_lets_those_behind_it_in(room: Room) -> None:
    async with room.emptied():
        for name in ("a", "X", "b"):
            await room.comes(name)
        await room.is_cancelled("X")
        assert room.inside == ["a", "b"]


async def test_several_that_give_up_at_the_same_moment_leave_nobody_behind(room: Room) -> None:
    async with room.emptied():
        for name in ("a", "X", "Y", "b"):
            await room.comes(name)
        await room.is_cancelled("a", "X", "Y")
        assert room.inside == ["b"]


async def test_what_is_inside_may_come_in_again_while_one_waits_to_be_alone(room: Room) -> None:
    """As a handler does that has another message processed: it would wait for its own end."""
    async with room.emptied(), asyncio.timeout(30):
        async with room.company.shared():
            await room.comes("X")
            async with room.company.shared():
                assert room.inside == []
        await room.goes("X")


async def test_one_that_is_cancelled_as_its_turn_comes_gives_it_on(room: Room) -> None:
    async with room.emptied():
        for name in ("A", "X", "b"):
            await room.comes(name)
        room._leave["A"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await room.is_cancelled("X")
        assert room.inside == ["b"]


async def test_one_that_wants_to_be_alone_inside_another_is_part_of_it(room: Room) -> None:
    """It would wait for the end of what waits for it."""
    async with room.emptied(), asyncio.timeout(30):
        async with room.company.shared(), room.company.alone(), room.company.alone():
            pass
        await room.comes("X")
        assert room.inside == ["X"]


async def test_who_can_give_way_is_asked_once_another_waits_to_be_alone(room: Room) -> None:
    async with room.emptied():
        for name in ("saga", "a", "b"):
            await room.comes(name)
        assert room.asked == []
        await room.comes("X")
        await until(lambda: room.asked == ["saga"])
        for name in ("saga", "a"):
            await room.goes(name)
        assert room.inside == ["b"], "who cannot give way is waited for"
        await room.comes("saga 2")
        await room.goes("b")
        assert room.inside == ["X"]
        await room.goes("X")
        assert (room.inside, room.asked) == (["saga 2"], ["saga"])


async def test_nobody_is_asked_for_one_that_has_stopped_waiting(room: Room) -> None:
    async with room.emptied():
        await room.comes("saga")
        set_patience(room.company, 1000.0)
        await room.comes("X")
        assert impatient(room.company)
        await room.is_cancelled("X")
        assert not impatient(room.company)
        assert room.asked == []


async def test_who_does_not_give_way_is_not_waited_for_any_longer(room: Room) -> None:
    set_longest(room.company, 0.0)
    async with room.emptied():
        await room.comes("saga")
        await room.comes("X")
        await until(lambda: room.inside == ["saga", "X"])
        await room.comes("a")
        await room.goes("saga")
        assert room.inside == ["X"], "its end lets nobody in"
        await room.goes("X")
        assert room.inside == ["a"]


@pytest.mark.parametrize("how", ["it shares", "its time is over"])
async def test_one_that_is_alone_at_first_lets_others_in_beside_it(room: Room, how: str) -> None:
    async with room.emptied():
        if how == "its time is over":
            set_longest(room.company, 0.0)
        await room.comes("Saga")
        for name in ("a", "X"):
            await room.comes(name)
        if how == "it shares":
            assert (room.inside, room.asked) == (["Saga"], []), "nobody asks one that is alone"
            room.company.share(room.stays["Saga"])
        await until(lambda: room.inside == ["Saga", "a"])
        await until(lambda: room.asked == ["Saga"])
        for name in ("Saga", "a"):
            await room.goes(name)
        assert room.inside == ["X"]
        await room.goes("X")
