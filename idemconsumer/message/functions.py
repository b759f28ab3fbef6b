"""Functions of the user's that are called with values from a message: what can be said of them at import."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def is_async(function: object) -> bool:
    """Whether it returns a coroutine, as far as it can be seen."""
    call = getattr(function, "__call__", None)  # noqa: B004 - not whether it can be called, but what is
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def takes(function: Callable[..., Any], arguments: int) -> bool:
    """Whether it can be called with so many. True for one that does not say, as some builtins."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True
