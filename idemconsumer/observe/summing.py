"""Log lines of repeated events: the first of a kind in full, the others summed (O10). The rule: `rules.repeats`."""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias
from weakref import WeakSet

from idemconsumer.logs import log
from idemconsumer.rules.repeats import Repeats, came

_MOST: Final = 1_000  # kinds; beyond that, the kind that occurred least recently is forgotten
_LOOK: Final = 1.0  # seconds between two checks for lines that are due, while any is pending

Event: TypeAlias = Mapping[str, object]


@dataclass(slots=True)
class _Kind:
    """`fields` are common to all its events, `last` is from the last one. `first_letter`: the first dead letter that is
    not logged yet."""

    level: int
    again: str
    fields: Event
    repeats: Repeats
    last: Event
    first_letter: object = None


class Summing:
    """Of one worker, or of one app without a worker. Not thread-safe. With `every`, each event is logged."""

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._kinds: dict[tuple[object, ...], _Kind] = {}  # ordered by last occurrence
        self._timer: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None
        _ALL.add(self)

    def say(
        self, level: int, event: str, again: str, fields: Event, its: Event, error: BaseException | None = None
    ) -> None:
        """Log or count one more `event`. `fields` define its kind; `again` is the line for several of them. `its` are
        fields of this event alone, such as its position. `error` is logged with its traceback."""
        if self._every:
            log.log(level, event, **{**fields, **its}, exc_info=error)
            return
        identity = (event, *fields.values())
        kind = self._kinds.pop(identity, None)
        repeats = came(None if kind is None else kind.repeats, time.monotonic())
        if kind is None or not repeats.unsaid:
            log.log(level, event, **{**fields, **its}, exc_info=error)
            kind = _Kind(level, again, fields, repeats, its)
        if repeats.unsaid == 1:
            kind.first_letter = its.get("letter")
        kind.repeats, kind.last = repeats, its
        self._kinds[identity] = kind
        if len(self._kinds) > _MOST:
            _tell(self._kinds.pop(next(iter(self._kinds))))
        if repeats.unsaid:
            self._look_soon()

    def close(self) -> None:
        """Log everything that is pending."""
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None
        for kind in self._kinds.values():
            _tell(kind)

    def _look_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer[0] is not loop:  # a closed loop runs no timer
            self._timer = loop, loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        self._timer, now = None, time.monotonic()
        for kind in self._kinds.values():
            if kind.repeats.due is not None and kind.repeats.due <= now:
                _tell(kind)
        if any(kind.repeats.unsaid for kind in self._kinds.values()):
            self._look_soon()


def _tell(kind: _Kind) -> None:
    repeats, now = kind.repeats, time.monotonic()
    if not repeats.unsaid:
        return
    last = {f"last_{name}": kind.last.get(name) for name in ("position", "letter")} | {"text": kind.last.get("text")}
    some = {"first_letter": kind.first_letter, **last}
    some = {name: value for name, value in some.items() if value is not None}
    seconds = round(now - repeats.said, 1)
    log.log(kind.level, kind.again, **kind.fields, count=repeats.unsaid, seconds=seconds, **some)
    kind.repeats = repeats.told(now)


_ALL: Final[WeakSet[Summing]] = WeakSet()


def say_all() -> None:
    """Log everything that is pending, at the end of the process."""
    for summing in list(_ALL):
        summing.close()


atexit.register(say_all)
os.register_at_fork(after_in_child=_ALL.clear)  # the parent logs what is pending
