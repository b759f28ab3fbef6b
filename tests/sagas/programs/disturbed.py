"""Runs random programs on stations, straight or disturbed, and judges what has become of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from idemconsumer import Message, OutcomeKind
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import CommitUnknown, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.message.headers import decode_headers
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import State, StepState
from idemconsumer.sagas.engine import LeasedEngine
from idemconsumer.settings import Settings
from tests.sagas.programs.interpreter import Run, app_of
from tests.sagas.programs.source import Program, open_ended, signals
from tests.support.sagas import Bench, Station

ID: Final = "k"
_SECONDS: Final = 120.0  # it only ends a program that hangs


class Memory:
    """The world of sagas whose process is this one."""

    def __init__(self) -> None:
        self.calls: list[tuple[UUID, str]] = []
        self.all_runs: dict[str, list[Run]] = defaultdict(list)
        self.tried: set[str] = set()

    async def note(self, key: UUID, name: str) -> None:
        self.calls.append((key, name))

    async def first_time(self, name: str) -> bool:
        new = name not in self.tried
        self.tried.add(name)
        return new

    def runs(self, run: Run) -> None:
        self.all_runs[run.id].append(run)


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


@dataclass
class End:
    """What has become of one program."""

    state: State
    result: bytes | None
    effects: Counter[str]
    undone: list[str]
    rows: list[tuple[str, StepState, int | None, bool, bool, bytes | None]]
    runs: list[Run]
    letters: list[str]


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
        self.world.all_runs.clear()
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
        bench = self._bench
        key = keys.digest("programs", None, "book", ID)
        effects = bench.effects
        rows = bench.run(
            "select name, state, position, has_undo, until is not null, output from idemconsumer.step"
            " order by key = %s desc, position", (key,)
        )  # fmt: skip
        calls = dict(self.world.calls)
        everything = [*effects, *calls.values()]
        return End(
            state=State(bench.run("select state from idemconsumer.record where key = %s", (key,))[0][0]),
            result=next(
                (body for (body,) in bench.run("select body from idemconsumer.result where key = %s", (key,))), None
            ),
            effects=Counter(name for name in everything if not name.startswith("undo ")),
            undone=[name for name in everything if name.startswith("undo ")],
            rows=[(name, StepState(state), *rest) for name, state, *rest in rows],
            runs=list(self.world.all_runs[ID]),
            letters=[str(letter) for letter in bench.run("select reason, error from idemconsumer.dead_letter")],
        )


def wrong(program: Program, straight: End, end: End) -> list[str]:
    """What is not as it should be at `end`."""
    found = consistent(end)
    if end.state is not straight.state:
        found.append(f"state {straight.state} straight, {end.state} disturbed")
    if not open_ended(program):
        if straight.effects != end.effects:
            found.append(f"effects: missing {straight.effects - end.effects}, more {end.effects - straight.effects}")
        if sorted(straight.undone) != sorted(end.undone):
            found.append(f"undone: {sorted(straight.undone)} straight, {sorted(end.undone)} disturbed")
        if _sorted(straight.result) != _sorted(end.result):
            found.append(f"result: {straight.result!r} straight, {end.result!r} disturbed")
    return found


def _sorted(result: bytes | None) -> Any:
    if result is None:
        return None
    value = json.loads(result)
    return sorted(value) if isinstance(value, list) else value


def consistent(end: End) -> list[str]:
    """What does not fit together at `end` alone."""
    found = [f"dead: {letter}" for letter in end.letters]
    positions = {name: position for name, _, position, *_ in end.rows if position is not None}
    done, undone = Counter[str](), list[tuple[int, str]]()
    for name, state, position, has_undo, waits, output in end.rows:
        if waits or name.startswith("patch:") or state is StepState.REJECTED:
            continue
        value = json.loads(output) if output else None
        if not isinstance(value, str):  # a child: what it left is undone
            continue
        done[f"{ID}/{value}"] += 1
        if state is StepState.UNDONE:
            undone.append((position or 0, f"undo {ID}/{value}"))
        elif state is not StepState.DONE:
            found.append(f"step {name} ends as {state.name}")
        elif has_undo and end.state is State.FAILED and not name.endswith("_driven"):
            found.append(f"step {name} is not undone")
    if done != end.effects:
        found.append(f"effects without a record {end.effects - done}, records without an effect {done - end.effects}")
    compensated = {f"undo {ID}/{name}" for name, *_ in end.rows} - {name for _, name in undone}
    if sorted(name for _, name in undone) != sorted(name for name in end.undone if name not in compensated):
        found.append(f"recorded as undone {sorted(undone)}, undone {end.undone}")
    if end.result is not None and end.state is State.COMPLETED:
        given = json.loads(end.result)
        if given != end.runs[-1].done:
            found.append(f"result {given}, last run {end.runs[-1].done}")
    for number, run in enumerate(end.runs):
        places = [positions[name] for name in run.given if name in positions]
        if len(places) < len(run.given):
            found.append(f"run {number} was given what is not recorded: {set(run.given) - positions.keys()}")
        if places != sorted(places):
            found.append(f"run {number} was given {run.given} at positions {places}")
    for number, (one, other) in enumerate(zip(end.runs, end.runs[1:], strict=False)):
        shorter = min(len(one.given), len(other.given))
        if one.given[:shorter] != other.given[:shorter]:
            found.append(f"run {number} was given {one.given}, the next one {other.given}")
    return found
