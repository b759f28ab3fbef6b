"""What must not be left half done by a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

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
