"""Runs random programs on stations, straight or disturbed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

from idemconsumer import Message, OutcomeKind
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import CommitUnknown, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.headers import decode_headers
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.sagas.saga_engine import LeasedEngine
from idemconsumer.settings import Settings
from tests.sagas.programs.interpreter import Seen, app_of
from tests.sagas.programs.judged import End, ends
from tests.sagas.programs.source import Program, signals
from tests.support.sagas import Bench, Station

ID: Final = "k"
_SECONDS: Final = 120.0  # it only ends a program that hangs


class Memory:
    """The world of sagas whose process is this one."""

    def __init__(self) -> None:
        self.calls: list[tuple[UUID, str]] = []
        self.seen: dict[str, list[Seen]] = defaultdict(list)
        self.tried: set[str] = set()

    async def note(self, key: UUID, name: str) -> None:
        self.calls.append((key, name))

    async def first_time(self, name: str) -> bool:
        new = name not in self.tried
        self.tried.add(name)
        return new

    def begins(self, saga: str, seen: Seen) -> None:
        self.seen[saga].append(seen)

    def got(self, saga: str, seen: Seen, name: str, entry: str | None) -> None:
        return


class Disturbance:
    """Observes a station, and disturbs it at random points: its lease is lost, or a commit has no answer."""

    def __init__(self, chosen: random.Random) -> None:
        self._chosen = chosen
        self._in = 0
        self.left = 0
        self.answers_lost = 0
        self.done: list[str] = []
        self.lose: Callable[[], None]

    def arm(self, times: int) -> None:
        self.left, self.answers_lost = times, 0
        self.done = []
        self._next()

    def _next(self) -> None:
        self._in = self._chosen.choice([1, 2, 3, 5, 8, 13, 21])

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        if not self.left:
            return
        self._in -= 1
        if self._in:
            return
        self.left -= 1
        self._next()
        what = self._chosen.choice(["lose", "lose", "answer"])
        self.done.append(f"{what} at {point}")
        if what == "lose":
            self.lose()
        else:
            self.answers_lost = 1


class Unanswering:
    """A store of leases that loses the answer of a commit when `disturbance` says so."""

    def __init__(self, leases: Any, disturbance: Disturbance) -> None:
        self._leases, self._disturbance = leases, disturbance

    def __getattr__(self, name: str) -> Any:
        given = getattr(self._leases, name)
        return self._answered(given) if name in ("intend", "record", "undo", "complete", "wait") else given

    def _answered(self, write: Any) -> Any:
        async def written(*args: Any, **more: Any) -> Any:
            answer = await write(*args, **more)
            self._lose()
            return answer

        return written

    def _lose(self) -> None:
        if self._disturbance.answers_lost:
            self._disturbance.answers_lost = 0
            raise CommitUnknown("its answer was lost")

    @asynccontextmanager
    async def step(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        async with self._leases.step(*args, **more) as opened:
            finish = opened.finish

            async def finished(*its: Any, **others: Any) -> int:
                position = await finish(*its, **others)
                self._lose()
                return int(position)

            opened.finish = finished
            yield opened


class Theatre:
    """Two stations that play programs one after another."""

    def __init__(self, bench: Bench, stations: Sequence[Station]) -> None:
        self._bench, self._stations, self.chosen = bench, stations, random.Random()
        self.disturbance = Disturbance(self.chosen)
        self.world = Memory()
        self.app = app_of(self.world)
        self._bound: dict[str, BoundHandler] = {
            each.name: each for each in self.app.bound_handlers(Settings(dsn=bench.dsn))
        }
        self._on = stations[0]
        self._lost = False
        self.disturbance.lose = self._lose

    def _lose(self) -> None:
        """As when a process is frozen: others go on while it ends."""
        self._bench.expire(self._on)
        self._lost = True
        asyncio.get_running_loop().call_soon(self._on.engine.lose)

    async def play(self, program: Program, disturbances: int) -> End:
        self._bench.clear()
        self.world.calls.clear()
        self.world.seen.clear()
        self.world.tried.clear()
        self.disturbance.arm(disturbances)
        unsent = signals(program)
        self.chosen.shuffle(unsent)
        for station in self._stations:  # a new engine has seen no function fail
            leases: Any = Unanswering(station.leases, self.disturbance)
            engine = Engine(station.store, self.disturbance)
            station.engine = LeasedEngine(engine, leases, self.disturbance, chance=lambda: 0.0)
            station.register(self._bench)
        async with asyncio.timeout(_SECONDS):
            message = Message("postgres:programs", json.dumps({"id": ID, "program": program}).encode(), position="here")
            work: Work | None = Work.of(self._bound["book"], message)
            while not self._over():
                while unsent and self.chosen.random() < 0.5:
                    self._send(unsent.pop())
                if work is None:
                    work = await self._next()
                if work is None:
                    while unsent:
                        self._send(unsent.pop())
                    await asyncio.sleep(0.001)
                    continue
                work = await self._run(work)
        return self._end()

    def _over(self) -> bool:
        if self._bench.letters:
            return True
        ended = self._bench.run("select 1 from idemconsumer.record") and not self._bench.held
        return bool(ended) and not self._bench.run("select 1 from idemconsumer.queue")

    def _send(self, signal: str) -> None:
        self._bench.run(
            "select idemconsumer.signal('programs', 'book', %s, %s, to_jsonb(%s::text))", (ID, signal, signal)
        )

    async def _run(self, work: Work) -> Work | None:
        """Returns what is to be presented again."""
        try:
            outcome = await self._on.run(work)
        except StoreUnavailable:
            return work
        if self._lost:
            self._lost = False
            self._on.register(self._bench)
        unstored = outcome.kind is OutcomeKind.FENCED and not work.of_saga.resumed and outcome.state is None
        return work if unstored else None

    async def _next(self) -> Work | None:
        self._on = self.chosen.choice(self._stations)
        for name in self.chosen.sample(["book", "ride"], 2):
            handler = self._bound[name]
            if (taken := await self._on.take(handler)) is not None:
                return Work.of(handler, taken.message, leased=taken)
        found = self._bench.run(
            "delete from idemconsumer.queue where id = (select min(id) from idemconsumer.queue)"
            " returning name, message_id, body, headers"
        )
        for name, key, body, headers in found:
            message = Message(f"postgres:{name}", body, decode_headers(headers), message_id=key)
            return Work.of(self._bound["ride"], message)
        return None

    def _end(self) -> End:
        return ends(self._bench, [ID], self.world.calls, self.world.seen)[ID]
