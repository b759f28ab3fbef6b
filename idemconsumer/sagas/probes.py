"""Turns of sagas at functions that fail in one saga after the other (D17): see `engine.failing`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from idemconsumer.engine.failing import Failing, Function, Subject
from idemconsumer.errors import OfTheEngine
from idemconsumer.rules.verdicts import refused

_SOON: Final = 0.5  # seconds
_LONGEST: Final = 30.0  # seconds that a saga waits for a function that may work again at any time


class Held(OfTheEngine):
    """The function is not called: another saga tries it, or it has just failed. This one is to ask in `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"held for {seconds:.1f} s")
        self.seconds = seconds


@dataclass(slots=True)
class _Turn:
    """`tried`: a saga calls it now. `slot`: when the last one that waits is to ask."""

    tried: bool = False
    slot: float = 0.0


class Probes:
    """Of all functions that sagas call."""

    def __init__(self, failing: Failing) -> None:
        self._failing = failing
        self._turns: dict[Subject, _Turn] = {}

    @contextmanager
    def trying(self, fn: Function, fail_on: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Around a call of a step's function, or of its undo. Raises Held where another saga has to come first."""
        its, now, turn = Subject.function(fn), asyncio.get_running_loop().time(), None
        if (health := self._failing.of(its)).probing:
            turn = self._turns.setdefault(its, _Turn())
            if not turn.tried and now < health.next_run <= now + _SOON:  # in its turn, but for a moment
                raise Held(health.next_run - now)
            if turn.tried or now < health.next_run:
                raise Held(self.seconds(fn))
            turn.tried = True
        try:
            yield
        except Exception as error:
            if refused(error, fail_on):  # it has decided
                self._succeeded(its)
            raise
        else:
            self._succeeded(its)
        finally:
            if turn is not None:
                turn.tried = False

    def seconds(self, fn: Function) -> float:
        """Until the saga that asks is to try it again: behind those that have asked before."""
        its, now = Subject.function(fn), asyncio.get_running_loop().time()
        turn = self._turns.setdefault(its, _Turn())
        turn.slot = min(max(turn.slot, now) + self._failing.of(its).pause, now + _LONGEST)
        return turn.slot - now

    def _succeeded(self, its: Subject) -> None:
        self._turns.pop(its, None)
        self._failing.succeeded(its)

    def failed(self, fn: Function, error: BaseException, *, first: bool) -> bool:
        """Whether this failure costs no attempt. `first`: it had not failed in this saga before."""
        return self._failing.failed(Subject.function(fn), error, first=first)
