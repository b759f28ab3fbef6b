"""Finds a task that a handler left running and that still refers to an object of its run.

Searched for only when such an object is still referenced after the handler has returned, so it may take a while. A task
that refers to nothing of the run is left alone: for example a client's reader that the first use started.
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
_FAR: Final = 20_000  # objects inspected per task


class Everybodys:
    """A base class for objects that all runs share, such as a cache: they refer to nothing of one run, and may be
    large."""


def begin_run() -> int:
    """Begin a run; returns its number. Tasks that are created in this context from now on are recognised by it."""
    number = next(_NUMBERS)
    _RUN.set(number)
    return number


def left_running(run: int, *things: object) -> asyncio.Task[Any] | None:
    """A task created in this run that is not done and refers to one of `things`."""
    wanted = {id(thing) for thing in things if thing is not None}
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if _made_in(task, run) and _reaches(task, wanted):
            return task
    return None


def name_of(task: asyncio.Task[Any]) -> str:
    """The task's name and coroutine, by which its author knows it."""
    return f"{task.get_name()!r} ({getattr(task.get_coro(), '__qualname__', 'unknown')})"


def _made_in(task: asyncio.Task[Any], run: int) -> bool:
    # Task.get_context() is new in Python 3.12.
    return any(isinstance(each, Context) and each.get(_RUN) == run for each in gc.get_referents(task))


def _reaches(task: asyncio.Task[Any], wanted: set[int]) -> bool:
    """Whether the task refers to them: through its coroutine, those it awaits, their variables and their parts."""
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


# What these refer to belongs to no single run.
_ELSEWHERE: Final = (Everybodys, type, ModuleType, Context, asyncio.AbstractEventLoop, asyncio.Task)
# With an OpenTelemetry provider, FastAPI keeps an endpoint's arguments, to report them.
_TELEMETRY: Final = "fastapi.telemetry"


def _is_elsewhere(each: object) -> bool:
    return isinstance(each, _ELSEWHERE) or str(type(each).__module__).startswith(_TELEMETRY)


def _parts(each: object) -> list[object]:
    if isinstance(each, FunctionType):  # its globals are shared by all
        return [*(each.__closure__ or ()), *(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
    return gc.get_referents(each)
