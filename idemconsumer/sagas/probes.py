"""Functions of sagas that fail in one saga after the other (D17), kept for one process. The rule is in `rules.failing`.

A saga calls several functions, and one that works says nothing of the next one: each has a `Health` of its own, by its
name and its code, since the names of steps may have no end, and lambdas of one handler share a name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from idemconsumer.engine.blame import said
from idemconsumer.errors import OfTheEngine, Retry
from idemconsumer.logs import log
from idemconsumer.rules.failing import Health
from idemconsumer.rules.verdicts import refused

_SOON: Final = 0.5  # seconds
_LONGEST: Final = 30.0  # seconds that a saga waits for a function that may work again at any time

Function: TypeAlias = Callable[..., Any]
_Identity: TypeAlias = tuple[str, object]  # a function's name, and its code


class Held(OfTheEngine):
    """The function is not called: another saga tries it, or it has just failed. This one is to ask in `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"held for {seconds:.1f} s")
        self.seconds = seconds


@dataclass(slots=True)
class _Failing:
    """`tried`: a saga calls it now. `slot`: when the last one that waits is to ask."""

    health: Health = field(default_factory=Health)
    tried: bool = False
    slot: float = 0.0


class Probes:
    """Of all functions that sagas call. None is probed unless they are `watched`: nobody would continue the saga."""

    def __init__(self, *, watched: bool) -> None:
        self._watched = watched
        self._failing: dict[_Identity, _Failing] = {}

    @contextmanager
    def trying(self, fn: Function, fail_on: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Around a call of a step's function, or of its undo. Raises Held where another saga has to come first."""
        its, now = _identity(fn), asyncio.get_running_loop().time()
        probed = self._failing.get(its)
        if probed is None or not probed.health.probing:
            probed = None
        elif not probed.tried and now < probed.health.next_run <= now + _SOON:  # in its turn, but for a moment
            raise Held(probed.health.next_run - now)
        elif probed.tried or now < probed.health.next_run:
            raise Held(self.seconds(fn))
        else:
            probed.tried = True
        try:
            yield
        except Exception as error:
            if refused(error, fail_on):  # it has decided
                self._succeeded(its)
            raise
        else:
            self._succeeded(its)
        finally:
            if probed is not None:
                probed.tried = False

    def seconds(self, fn: Function) -> float:
        """Until the saga that asks is to try it again: behind those that have asked before."""
        failing, now = self._failing[_identity(fn)], asyncio.get_running_loop().time()
        failing.slot = min(max(failing.slot, now) + failing.health.pause, now + _LONGEST)
        return failing.slot - now

    def _succeeded(self, its: _Identity) -> None:
        before = self._failing.pop(its, None)
        if before is not None and before.health.since is not None:
            seconds = asyncio.get_running_loop().time() - before.health.since
            log.info("function of sagas works again", function=its[0], seconds=round(seconds, 1))

    def failed(self, fn: Function, error: BaseException, *, first: bool) -> bool:
        """Whether this failure costs no attempt. `first`: it had not failed in this saga before. One that the function
        asked for (Retry) is no sign, and costs one."""
        if not self._watched or isinstance(error, Retry):
            return False
        its, now = _identity(fn), asyncio.get_running_loop().time()
        failing = self._failing.setdefault(its, _Failing())
        probing = failing.health.probing
        failing.health = failing.health.failed(now, first=first)
        if failing.health.probing and not probing:
            log.error(
                "a function fails in all sagas, trying one at a time",
                function=its[0],
                failed=failing.health.failures,
                **said(error),
            )
        return failing.health.is_free(now)


def _identity(fn: Function) -> _Identity:
    while isinstance(fn, partial):
        fn = fn.func
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{named.__module__}.{named.__qualname__}", getattr(fn, "__code__", None)
