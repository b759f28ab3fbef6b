"""Probing of functions that fail in one saga after another (D17): which saga calls one, and when. See
`engine.failing`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from idemconsumer.engine.failing import Failing, Function, Subject
from idemconsumer.errors import OfTheEngine
from idemconsumer.message.keys import tenant_of
from idemconsumer.rules import breaker as failing
from idemconsumer.rules.verdicts import refused
from idemconsumer.stores.leased_saga import LeasedSaga

_LOOK: Final = 0.02  # seconds
_SOON: Final = 0.5  # seconds that a saga waits for its turn in its lane, if it or another saga of its tenant has failed
_PATIENCE: Final = 3.0  # the same for any other saga: good sagas may be queued behind many that always fail
_LONGEST: Final = 30.0  # seconds, the longest pause of a saga for a function that may work again at any time


class NotCalled(OfTheEngine):
    """The function is not called: another saga tries it, or it has just failed. This saga may ask again in
    `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"held for {seconds:.1f} s")
        self.seconds = seconds


@dataclass(slots=True)
class _Turns:
    """The turns at one function. `taken`: when the saga that calls it now began, if one does. `again`: when a saga that
    has failed may call it again. `slot`: when the last waiting saga may ask."""

    taken: float = -math.inf
    again: float = 0.0
    slot: float = 0.0

    def take(self, now: float, *, again: bool) -> Callable[[], None]:
        """Returns a function to call at the turn's end. Until then no other saga that has failed gets a turn."""
        self.taken = now
        if again:
            self.again = math.inf

        def end() -> None:
            if self.taken == now:
                self.taken = -math.inf
            if again:
                self.again = now + failing.AGAIN

        return end


class _Trying:
    """See `Probes.trying`. Created for each call of each saga, so it is a class and not a generator."""

    __slots__ = ("_end", "_fail_on", "_fn", "_probes", "_saga")

    def __init__(self, probes: Probes, fn: Function, saga: LeasedSaga, fail_on: tuple[type[Exception], ...]) -> None:
        self._probes = probes
        self._fn = fn
        self._saga = saga
        self._fail_on = fail_on
        self._end: Callable[[], None] | None = None

    async def __aenter__(self) -> None:
        if self._probes.any:
            self._end = await self._probes.turn(self._fn, self._saga)

    async def __aexit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if self._end is not None:
            self._end()
        if self._probes.any and (error is None or (isinstance(error, Exception) and refused(error, self._fail_on))):
            self._probes.works(self._fn, self._saga)


class Probes:
    """The probing of all functions that sagas call."""

    def __init__(self, failing: Failing) -> None:
        self._failing = failing
        self._turns: dict[Subject, _Turns] = {}

    def trying(self, fn: Function, saga: LeasedSaga, fail_on: tuple[type[Exception], ...] = ()) -> _Trying:
        """A context around a call of a step's function or undo. Raises NotCalled if another saga must come first."""
        return _Trying(self, fn, saga, fail_on)

    @property
    def any(self) -> bool:
        """Whether any function has failed and not ended since."""
        return self._failing.any

    def works(self, fn: Function, saga: LeasedSaga) -> None:
        """The function has returned, or rejected the message."""
        self._failing.succeeded(Subject.function(fn), [saga.key], [tenant_of(saga.scope)])

    async def turn(self, fn: Function, saga: LeasedSaga) -> Callable[[], None] | None:
        """Take a turn, which ends when the caller calls what this returns; None if the function works, or works again.
        A saga that has not failed waits here for its turn, so that it is known within seconds whether it works; a saga
        that has failed gets a turn now and then. A call that hangs does not block sagas that have not failed."""
        its = Subject.function(fn)
        if not self._failing.of(its).probing:
            return None
        now, turns = asyncio.get_running_loop().time, self._turns.setdefault(its, _Turns())
        has_failed = self._failing.has_failed(its, saga.key)
        beside = self._failing.failed_beside(its, tenant_of(saga.scope))
        deadline = now() + (_SOON if has_failed or beside else _PATIENCE)
        while (health := self._failing.of(its)).probing:
            due = max(health.next_run, turns.again) if has_failed else health.next_run
            if now() >= max(due, turns.taken + failing.HANGS):
                return turns.take(now(), again=has_failed)
            if max(now(), due) >= deadline:
                raise NotCalled(self._seconds(its))
            await asyncio.sleep(max(_LOOK, due - now()))
        return None

    def seconds(self, fn: Function) -> float:
        """The seconds until the asking saga may try again: after those that asked before."""
        return self._seconds(Subject.function(fn))

    def _seconds(self, its: Subject) -> float:
        turns, now = self._turns.setdefault(its, _Turns()), asyncio.get_running_loop().time()
        turns.slot = min(max(turns.slot, now) + failing.AGAIN, now + _LONGEST)
        return turns.slot - now

    def failed(self, fn: Function, saga: LeasedSaga, error: BaseException, *, first: bool) -> bool:
        """Record a failure. Returns whether it costs no attempt. `first`: as far as the saga's attempts tell."""
        its, tenant = Subject.function(fn), tenant_of(saga.scope)
        return self._failing.failed(its, saga.key, error, first=first, tenant=tenant, handler=saga.handler)
