"""Which task did a handler leave running, with something of its run in its hands?

Looked for only when that something is still referenced after the handler has returned, so it may take a while. A task
that holds nothing of the run is its author's own business: a client's reader, say, that was started by its first use.
"""

from __future__ import annotations

import asyncio
import gc
from contextvars import Context, ContextVar
from itertools import count
from types import FunctionType, ModuleType
from typing import Any, Final

_RUN: Final[ContextVar[int]] = ContextVar("idemconsumer_run")
_NUMBERS: Final = count()
_FAR: Final = 20_000  # objects looked at for each task


class Everybodys:
    """A base class for what all runs share, such as a cache: it leads to nothing of one run, and may be large."""


def begin_run() -> int:
    """The number of a run. Tasks that are made from now on, in this one, are known by it."""
    number = next(_NUMBERS)
    _RUN.set(number)
    return number


def left_running(run: int, *things: object) -> asyncio.Task[Any] | None:
    """A task made in this run that is not done and refers to one of `things`."""
    wanted = {id(thing) for thing in things if thing is not None}
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if _made_in(task, run) and _reaches(task, wanted):
            return task
    return None


def name_of(task: asyncio.Task[Any]) -> str:
    """What its author knows it by."""
    return f"{task.get_name()!r} ({getattr(task.get_coro(), '__qualname__', 'unknown')})"


def _made_in(task: asyncio.Task[Any], run: int) -> bool:
    # Task.get_context() is new in Python 3.12.
    return any(isinstance(each, Context) and each.get(_RUN) == run for each in gc.get_referents(task))


def _reaches(task: asyncio.Task[Any], wanted: set[int]) -> bool:
    """Through its coroutine, those it awaits, their variables, and what these are made of."""
    level: list[object] = [task.get_coro()]
    seen: set[int] = set()
    while level and len(seen) < _FAR:
        further: list[object] = []
        for each in level:
            if id(each) in wanted:
                return True
            if id(each) not in seen and not _is_elsewhere(each):
                seen.add(id(each))
                further += _parts(each)
        level = further
    return False


# What these refer to is no run's alone.
_ELSEWHERE: Final = (Everybodys, type, ModuleType, Context, asyncio.AbstractEventLoop, asyncio.Task)
# Where OpenTelemetry has a provider, FastAPI keeps what an endpoint was given, to tell of it.
_TELEMETRY: Final = "fastapi.telemetry"


def _is_elsewhere(each: object) -> bool:
    return isinstance(each, _ELSEWHERE) or str(type(each).__module__).startswith(_TELEMETRY)


def _parts(each: object) -> list[object]:
    if isinstance(each, FunctionType):  # its globals are everybody's
        return [*(each.__closure__ or ()), *(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
    return gc.get_referents(each)
