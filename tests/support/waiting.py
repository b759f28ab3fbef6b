"""How tests wait: until something is true, with a deadline, and never for a length of time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Final

PATIENCE: Final = 45.0  # seconds that anything expected may take: it only ends a test that hangs
_PAUSE: Final = 0.02


async def until(
    condition: Callable[[], object | Awaitable[object]], what: str = "not true", within: float = PATIENCE
) -> None:
    """Poll in the loop; the condition is a function or a coroutine function. AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while not (await holds if inspect.isawaitable(holds := condition()) else holds):
        assert time.monotonic() < deadline, f"waited {within:g} s in vain: {what}"
        await asyncio.sleep(_PAUSE)


def eventually(condition: Callable[[], object], what: str = "not true", within: float = PATIENCE) -> None:
    """As `until`, where there is no loop."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"waited {within:g} s in vain: {what}"
        time.sleep(_PAUSE)
