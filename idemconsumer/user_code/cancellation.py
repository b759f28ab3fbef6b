"""What must not be left half done, or end its caller, by a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from idemconsumer.errors import HandlerFault

T = TypeVar("T")


async def to_end(act: Coroutine[Any, Any, T]) -> T:
    """Do it whole, then let a cancellation pass.

    `asyncio.shield` would return at once and let the act go on behind the caller's back. A task of its own also for
    what begins after the cancellation: the store gives no connection to a task that is being cancelled.
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


async def ended(task: asyncio.Task[Any]) -> tuple[Any, BaseException | None]:
    """What the task returned or raised. A cancellation of the caller is passed on, and raised whatever the task makes
    of it; one that came from inside is a HandlerFault.

    User code has a task of its own, since what it does to its task must end with it: cancelled from inside it would
    end its lane, and before Python 3.13 a TaskGroup with a failed child leaves `cancelling()` raised for good.
    """
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
        raised = HandlerFault("raised CancelledError though nobody cancelled it").with_traceback(error.__traceback__)
    if cancelled is not None:
        raise cancelled
    return (None if raised is not None else task.result()), raised


def from_cancellation(error: BaseException | None) -> bool:
    """Whether user code made this of a cancellation, and not of the group that a TaskGroup raised."""
    while error is not None and not isinstance(error, BaseExceptionGroup):
        if isinstance(error, asyncio.CancelledError):
            return True
        error = error.__cause__ or error.__context__
    return False
