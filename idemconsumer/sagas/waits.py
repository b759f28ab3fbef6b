"""Steps that wait: what is recorded of them, and how the run ends while they do (L40, L41)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from idemconsumer.errors import ConfigurationError, OfTheEngine, Reject, SagaMisused, SignalTimeout
from idemconsumer.handlers.durations import MAX_DURATION, parse_duration
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.handler import Duration, First
from idemconsumer.rules.saga import wrong_name
from idemconsumer.rules.values import StepKind, StepRow
from idemconsumer.sagas.step import StepSpec

_NULL: Final = StoredResult(b"null", "application/json")
_LOOK: Final = 1.0  # seconds between two looks, while steps of other branches run


class Paused(OfTheEngine):
    """Nothing is left of the run but these waits."""

    def __init__(self, waits: tuple[str, ...]) -> None:
        super().__init__(", ".join(waits))
        self.waits = waits


@dataclass(slots=True, eq=False)
class WaitSpec(StepSpec):
    """A step that lasts until its end, `seconds` after it was first requested, or until a `signal` of this name, or
    until the `child` under this stored key has ended."""

    seconds: float = 0.0
    signal: str | None = None
    child: bytes | None = None

    @property
    def parts(self) -> Sequence[WaitSpec]:
        """What is waited for."""
        return (self,)

    def rejection(self, output: StoredResult | None) -> Reject:
        return SignalTimeout(self.signal or self.name)

    def decode(self, output: StoredResult | None) -> Any:
        """A signal without a payload is null, which `into` may not allow."""
        return StepSpec.decode(self, _NULL if output is None else output)


@dataclass(slots=True, eq=False)
class FirstSpec(WaitSpec):
    """Lasts until the first of several waits is over (L74), which is `over`. It has the name of one of them."""

    waits: Mapping[str, WaitSpec] = field(default_factory=dict)
    over: WaitSpec | None = None

    @property
    def parts(self) -> Sequence[WaitSpec]:
        return tuple(self.waits.values())

    @property
    def recorded_as(self) -> str:
        return self.name if self.over is None else self.over.name

    def row(self, rows: Mapping[str, StepRow]) -> StepRow | None:
        recorded = [(row, each) for each in self.parts if (row := rows.get(each.name)) is not None]
        ended = [(row, each) for row, each in recorded if row.position is not None]
        if ended:
            row, self.over = min(ended, key=lambda pair: pair[0].position or 0)
            return row
        return recorded[0][0] if recorded else None

    def rejection(self, output: StoredResult | None) -> Reject:
        assert self.over is not None
        return self.over.rejection(output)

    def decode(self, output: StoredResult | None) -> Any:
        which = next(which for which, each in self.waits.items() if each is self.over)
        assert self.over is not None
        return First(which, self.over.decode(output))


def first(waits: Mapping[str, StepSpec | None]) -> FirstSpec:
    """Raises SagaMisused."""
    if not waits:
        raise SagaMisused("saga.first was given nothing; write saga.first(approved=saga.wait(…), late=saga.sleep(…))")
    given: dict[str, WaitSpec] = {}
    for which, spec in waits.items():
        if not isinstance(spec, WaitSpec) or isinstance(spec, FirstSpec):
            raise SagaMisused(
                f"saga.first({which}=…) was not given a wait of this saga; give it saga.wait(…), saga.sleep(…) "
                "or saga.result(…), not awaited yet. Run steps that have an effect with saga.all"
            )
        given[which] = spec
    name = next(iter(given.values())).name
    return FirstSpec(name, StepKind.WAIT, _nothing, (), None, waits=given)


def sleep(name: str, duration: Duration) -> WaitSpec:
    """Raises ConfigurationError for what is no duration."""
    return WaitSpec(name, StepKind.SLEEP, _nothing, (), None, seconds=parse_duration(duration))


def wait(name: str, into: Any, timeout: Duration | None, signal: str | None) -> WaitSpec:
    """Raises ConfigurationError for what is no duration, and for a signal that nobody can send."""

    async def payload() -> Any:
        raise AssertionError("what waits runs nothing")

    payload.__annotations__["return"] = into
    seconds = MAX_DURATION if timeout is None else parse_duration(timeout)
    awaited = name if signal is None else signal
    if (wrong := wrong_name(awaited)) is not None:
        raise ConfigurationError(f"step {name!r} waits for a signal whose name is {wrong}")
    return WaitSpec(name, StepKind.WAIT, payload, (), None, seconds=seconds, signal=awaited)


async def _nothing() -> None:
    raise AssertionError("what waits runs nothing")


class OpenWaits:
    """The waits of one run that are not over. `begun` has all of them, also those that look right now; `open` the task
    of each that rests."""

    def __init__(self) -> None:
        self.begun: set[str] = set()
        self.open: dict[str, asyncio.Task[Any] | None] = {}
        self._loop = asyncio.get_running_loop()
        self._moved = self._loop.time()
        self._changed = asyncio.Event()
        self._branches: set[asyncio.Task[Any]] = set()

    def branch(self, task: asyncio.Task[Any] | None) -> None:
        """A task other than the handler's own requests a step."""
        if task is not None:
            self._branches.add(task)

    def branches(self) -> bool:
        """Whether a branch that has requested a step goes on, and does not wait."""
        self._branches = {task for task in self._branches if not task.done()}
        return not self._branches <= set(self.open.values())

    def moves(self) -> None:
        """A step has ended, or the run has."""
        self._moved = self._loop.time()
        self._changed.set()

    async def rest(self, name: str, seconds: float, stays: Callable[[float], float | None]) -> None:
        """Return when it is time to look again, after `seconds` at the latest. Raises Paused when the run is to end
        here. `stays` says for how long it goes on, given the seconds in which nothing has moved; None: it has ended."""
        again = self._loop.time() + min(seconds, _LOOK)
        self.open[name] = asyncio.current_task()
        self._changed.set()
        try:
            while (left := again - self._loop.time()) > 0:
                if (stay := stays(self._loop.time() - self._moved)) is None:
                    return
                if not stay:
                    raise Paused(tuple(self.begun))
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, stay)):
                        await self._changed.wait()
        finally:
            del self.open[name]
