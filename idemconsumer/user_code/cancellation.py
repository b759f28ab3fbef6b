"""Cancellation: protecting what it must not cut in half, and finding out where it came from.

asyncio counts, in `Task.cancelling()`, how often a task's cancellation was requested. User code may raise that count
for good (before Python 3.13 a TaskGroup with a failed child does) or swallow the request. Only this file reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from idemconsumer.errors import SelfCancelled

T = TypeVar("T")


class CancellationWatch:
    """Remembers how often cancellation of this task was requested, to tell later requests from earlier ones."""

    __slots__ = ("_before", "_task")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()

    @property
    def requested(self) -> bool:
        """Whether this task's cancellation was requested since then."""
        return self._task is not None and self._task.cancelling() > self._before

    def withdraw(self) -> None:
        """Set the count back to what it was. What user code did to it ends with the call."""
        task = self._task
        while task is not None and task.cancelling() > self._before:
            task.uncancel()


def being_cancelled() -> bool:
    """Whether this task's cancellation was requested. True outside of a task, where nothing can be awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def uninterrupted(act: Coroutine[Any, Any, T]) -> T:
    """Run `act` to its end, then let a cancellation pass.

    `asyncio.shield` would return at once while the act goes on. The separate task also serves what begins after the
    cancellation: the store gives no connection to a task that is being cancelled.
    """
    task = asyncio.create_task(act)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()
        raise cancelled
    return task.result()


async def run_isolated(run: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Run user code in a task of its own: what it returned, or what it raised.

    What it does to its task ends with it (B10). A cancellation of the caller is passed on, and is raised whatever the
    user code does with it. A CancelledError that came from inside is returned as SelfCancelled.
    """
    task = asyncio.ensure_future(run)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    try:
        raised = task.exception()
    except asyncio.CancelledError as error:
        raised = SelfCancelled().with_traceback(error.__traceback__)
    if cancelled is not None:
        raise cancelled
    return (None if raised is not None else task.result()), raised


async def isolated(run: Awaitable[T]) -> T:
    """As `run_isolated`, raising what the user code raised."""
    value, error = await run_isolated(run)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def from_cancellation(error: BaseException | None) -> bool:
    """Whether user code turned a cancellation into this error. A TaskGroup's exception group does not count."""
    while error is not None and not isinstance(error, BaseExceptionGroup):
        if isinstance(error, asyncio.CancelledError):
            return True
        error = error.__cause__ or error.__context__
    return False
