"""One event loop for everybody: uvloop, as our own workers have it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

R = TypeVar("R")


def run(main: Coroutine[Any, Any, R]) -> R:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
