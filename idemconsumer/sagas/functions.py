"""How the functions of a saga are called: with the app's resources, and within their time limits.

A step, its undo and its reconcile all begin with `StepFunctions.begin`; `user_code.call` awaits them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

from idemconsumer.logs import log
from idemconsumer.ports.tracing import NO_TRACING, Tracing
from idemconsumer.rules.habits import Habits
from idemconsumer.sagas.injection import injected
from idemconsumer.sagas.step import StepCall
from idemconsumer.user_code.call import without_exit
from idemconsumer.user_code.cancellation import run_mortal
from idemconsumer.user_code.time_limit import TimeLimit

GRACE: Final = 5.0  # seconds for what a cancelled function has to tidy up


def left_behind(function: object) -> None:
    """User code that swallows its cancellation is not waited for any longer (L34)."""
    name = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
    log.error("function still runs after cancellation, abandoned; does it catch CancelledError?", function=name)


@dataclass(frozen=True, slots=True)
class StepFunctions:
    """`timeout` and `lease` in seconds; the lease bounds what runs in a transaction (L5). `habits`: those of the steps
    that are one; None: each of their statements is waited for (J26)."""

    resources: Mapping[type, object]
    timeout: float
    lease: float
    habits: Habits | None = None
    tracing: Tracing = NO_TRACING

    def seconds(self, own: float | None = None) -> float:
        """For how long a step's function may run. `own`: the step's `timeout`, if it has one (L45)."""
        return self.timeout if own is None else own

    def limit(self, own: float | None = None) -> TimeLimit:
        """Outside any transaction."""
        return TimeLimit(self.seconds(own))

    def limit_in_transaction(self, own: float | None = None) -> TimeLimit:
        return TimeLimit(self.seconds(own), self.lease)

    def call(self, key: UUID, attempt: int) -> StepCall:
        """What the function of a call is given."""
        return StepCall(key, attempt, self.tracing.carried({}))

    def begin(self, fn: Callable[..., Awaitable[Any]], *args: object, gets: str) -> Awaitable[Any]:
        """Call a step's function with `args` and the resources that it asks for; it runs once it is awaited. It is left
        behind if it goes on after it was cancelled.

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
        return run_mortal(without_exit(running), GRACE, partial(left_behind, fn))
