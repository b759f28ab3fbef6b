"""How the functions of a saga are called: with the app's resources, and within their time limits.

A step, its undo and its reconcile all begin with `StepFunctions.begin`; `user_code.call` awaits them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from idemconsumer.sagas.injection import injected
from idemconsumer.user_code.time_limit import TimeLimit


@dataclass(frozen=True, slots=True)
class StepFunctions:
    """`timeout` and `lease` in seconds; the lease bounds what runs in a transaction (L5)."""

    resources: Mapping[type, object]
    timeout: float
    lease: float

    def limit(self) -> TimeLimit:
        """Outside any transaction."""
        return TimeLimit(self.timeout)

    def limit_in_transaction(self) -> TimeLimit:
        return TimeLimit(self.timeout, self.lease)

    def begin(self, fn: Callable[..., Awaitable[Any]], *args: object, gets: str) -> Awaitable[Any]:
        """Call a step's function with `args` and the resources that it asks for; it runs once it is awaited.

        If it cannot be called like that, raises a TypeError that describes the right signature. `gets` names in that
        text what the function is given before the step's own arguments.
        """
        more = injected(fn, len(args), self.resources)
        try:
            running: object = fn(*args, **more)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise TypeError(
                f"{error}; it is called with {gets}, then with the step's arguments, "
                "and by name with the app's resources (@app.resource) that match the types of its other parameters"
            ) from None
        if not inspect.isawaitable(running):
            name = getattr(fn, "__qualname__", type(fn).__name__)
            raise TypeError(f"{name} is not async, it returned {type(running).__name__}; write async def")
        return running
