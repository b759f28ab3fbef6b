"""Handlers whose messages all fail, and functions that fail in all sagas (D17): the ledger of one process.

The rule is in `rules.failing`. A saga calls several functions, and one that works says nothing of the next one: each
is on the ledger by its name and its code, since the names of steps may have no end, and lambdas of one handler share a
name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from idemconsumer.engine.blame import said
from idemconsumer.errors import Retry
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.rules.failing import Health

Function: TypeAlias = Callable[..., Any]

_HEALTHY = Health()


@dataclass(frozen=True, slots=True)
class Subject:
    """What may fail as a whole. `is_a` and `name` are its field in the log."""

    is_a: str
    name: str
    code: object = None
    fails: str = field(default="all messages of a handler fail, trying one at a time", compare=False)
    works: str = field(default="handler works again", compare=False)

    @classmethod
    def handler(cls, handler: BoundHandler) -> Subject:
        return cls("handler", handler.name)

    @classmethod
    def function(cls, fn: Function) -> Subject:
        while isinstance(fn, partial):
            fn = fn.func
        named = fn if hasattr(fn, "__qualname__") else type(fn)
        return cls(
            "function",
            f"{named.__module__}.{named.__qualname__}",
            getattr(fn, "__code__", None),
            "a function fails in all sagas, trying one at a time",
            "function of sagas works again",
        )


class Failing:
    """One `Health` per subject. Unless it is `watched`, none is ever probed: nobody would wait."""

    def __init__(self, *, watched: bool) -> None:
        self._watched = watched
        self._health: dict[Subject, Health] = {}

    def of(self, subject: Subject) -> Health:
        return self._health.get(subject, _HEALTHY)

    def succeeded(self, subject: Subject) -> None:
        if (before := self._health.pop(subject, _HEALTHY)).since is not None:
            seconds = asyncio.get_running_loop().time() - before.since
            log.info(subject.works, **{subject.is_a: subject.name}, seconds=round(seconds, 1))

    def failed(self, subject: Subject, error: BaseException, *, first: bool) -> bool:
        """Whether this failure costs no attempt. `first`: its message, or its saga, had not failed before. One that was
        asked for (Retry) is no sign, and costs one."""
        if not self._watched or isinstance(error, Retry):
            return False
        now, before = asyncio.get_running_loop().time(), self.of(subject)
        health = self._health[subject] = before.failed(now, first=first)
        if health.probing and not before.probing:
            log.error(subject.fails, **{subject.is_a: subject.name}, failed=health.failures, **said(error))
        return health.is_free(now)
