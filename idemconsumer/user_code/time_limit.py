"""How long a function of the user may take, and what is said when it took longer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from typing import TypeVar

from idemconsumer.errors import StoreUnavailable, TransactionEnded
from idemconsumer.user_code.cancellation import from_cancellation

T = TypeVar("T")


class TimeLimit:
    """Counts from when it is made. `lease` is for what runs inside a transaction: the server ends one that has been
    idle for that long (L5)."""

    def __init__(self, timeout: float, lease: float = math.inf) -> None:
        self._seconds = min(timeout, lease)
        self._error = TimeoutError(
            f"did not end within its timeout of {timeout:g} s; raise `timeout`, or make several steps of it"
            if timeout <= lease
            else f"did not end within {lease:g} s, the shortest `lease` of this worker's sagas, which bounds every "
            "transaction; raise `lease`, or do the slow part in a step of its own, with saga.call"
        )
        self._cut_off = False
        self._end = time.monotonic() + self._seconds  # uvloop's own clock stands still while a function computes

    @property
    def over(self) -> bool:
        return self._cut_off or time.monotonic() >= self._end

    async def hold(self, run: Awaitable[T]) -> T:
        """What it returns, be it too late: that is known then.

        Where it was cut off nobody knows how far it got, whatever it made of that: TimeoutError if we did so, and
        CancelledError if somebody else did.
        """
        task = asyncio.current_task()
        assert task is not None
        asked_before = task.cancelling()
        try:
            async with asyncio.timeout(self._seconds) as timer:
                return await run
        except Exception as error:
            if task.cancelling() > asked_before and from_cancellation(error):
                raise asyncio.CancelledError from error
            if timer.expired() and (isinstance(error, TimeoutError) or from_cancellation(error)):
                cut = error.__cause__ or error  # it tells where the function was
                raise self._error.with_traceback(cut.__traceback__) from None
            raise
        finally:
            self._cut_off = timer.expired()  # the loop's clock may be a moment ahead of ours

    def check(self) -> None:
        """Raise TimeoutError if it came too late, as from a function that swallowed its cancellation, or computed and
        never let the loop cancel it. Before COMMIT: then nothing has happened."""
        if self.over:
            raise self._error

    def caused(self, error: BaseException) -> bool:
        """Whether `error` is ours, so that nobody knows how far the function got."""
        return error is self._error

    def blame(self, error: Exception) -> Exception:
        """A transaction that is gone because the function took too long is its failure, and no outage."""
        idle = isinstance(error, TransactionEnded) or (isinstance(error, StoreUnavailable) and self.over)
        return self._error if idle else error
