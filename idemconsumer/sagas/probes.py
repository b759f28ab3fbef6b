"""Turns of sagas at functions that fail in one saga after the other (D17): see `engine.failing`."""

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
_SOON: Final = 0.5  # seconds that a saga waits for its turn in its lane if it has failed, or others of its tenant
_PATIENCE: Final = 3.0  # the same of any other one: the good ones may be behind many that always fail
_LONGEST: Final = 30.0  # seconds that a saga waits for a function that may work again at any time


class NotCalled(OfTheEngine):
    """The function is not called: another saga tries it, or it has just failed. This one is to ask in `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"held for {seconds:.1f} s")
        self.seconds = seconds


@dataclass(slots=True)
class _Turns:
    """Of one function. `taken`: since when a saga has called it, if one does. `again`: when one that has failed may.
    `slot`: when the last one that waits is to ask."""

    taken: float = -math.inf
    again: float = 0.0
    slot: float = 0.0

    def take(self, now: float, *, again: bool) -> Callable[[], None]:
        """Returns what is to be called at its end. Of those that have failed another one may come only then."""
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
    """See `Probes.trying`. One for each call of each saga, so no generator."""

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
    """Of all functions that sagas call."""

    def __init__(self, failing: Failing) -> None:
        self._failing = failing
        self._turns: dict[Subject, _Turns] = {}

    def trying(self, fn: Function, saga: LeasedSaga, fail_on: tuple[type[Exception], ...] = ()) -> _Trying:
        """Around a call of a step's function, or of its undo. Raises NotCalled where another saga has to come first."""
        return _Trying(self, fn, saga, fail_on)

    @property
    def any(self) -> bool:
        """Whether something has failed that has not ended."""
        return self._failing.any

    def works(self, fn: Function, saga: LeasedSaga) -> None:
        """It has ended, or decided."""
        self._failing.succeeded(Subject.function(fn), [saga.key], [tenant_of(saga.scope)])

    async def turn(self, fn: Function, saga: LeasedSaga) -> Callable[[], None] | None:
        """Take a turn, to be ended by what this returns; None where the function works, or works again. A saga that has
        not failed waits for it here, so that it is known within seconds whether it works; one that has failed is let in
        now and then. A call that hangs keeps nobody waiting who has not failed."""
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
        """Until the saga that asks is to try it again: behind those that have asked before."""
        return self._seconds(Subject.function(fn))

    def _seconds(self, its: Subject) -> float:
        turns, now = self._turns.setdefault(its, _Turns()), asyncio.get_running_loop().time()
        turns.slot = min(max(turns.slot, now) + failing.AGAIN, now + _LONGEST)
        return turns.slot - now

    def failed(self, fn: Function, saga: LeasedSaga, error: BaseException, *, first: bool) -> bool:
        """Whether this failure costs no attempt. `first`: as far as the saga's attempts tell."""
        its, tenant = Subject.function(fn), tenant_of(saga.scope)
        return self._failing.failed(its, saga.key, error, first=first, tenant=tenant, handler=saga.handler)
