"""The clock of an event loop, put forward: what is to take too long does so once it has come so far, on a machine of
any speed. A limit that is so short that a test can wait for it may be over before that, and under it what is to be in
time may be late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.support.waiting import until

R = TypeVar("R")


def forward(seconds: float) -> None:
    """What waits in this loop for a time within so many seconds has waited for long enough."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]


async def over_time(run: Coroutine[Any, Any, R], seconds: float, when: Callable[[], object]) -> R:
    """What `run` comes to if so many seconds are over once this is true of it; of the run before it is no longer."""
    await until(lambda: not when())
    running = asyncio.create_task(run)
    await until(lambda: running.done() or when())
    forward(seconds)
    return await running
