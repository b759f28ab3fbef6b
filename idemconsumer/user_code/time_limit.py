"""How long a user's function may take, and the error when it took longer (L15)."""

from __future__ import annotations

import math
import time

from idemconsumer.errors import ServerSilent, StoreUnavailable, TransactionEnded


class TimeLimit:
    """The time limit of one call, from its creation on. Times are seconds.

    `lease` is for a function inside a transaction of a saga: the server ends a transaction that was idle for that long
    (L5).
    """

    __slots__ = ("_alone", "_end", "_error", "_lease", "_timeout", "cut_off", "locked_out", "seconds")

    def __init__(self, timeout: float, lease: float | None = None) -> None:
        self._timeout = timeout
        self._alone = lease is not None
        self._lease = math.inf if lease is None else lease
        self.seconds = min(timeout, self._lease)
        self.cut_off = False  # by the loop's timer, which may be a moment ahead of our clock
        self.locked_out = False  # when its time was over, the server reported that the function waited for a lock (B14)
        self._end = time.monotonic() + self.seconds  # uvloop's own clock stands still while a function computes
        self._error: TimeoutError | None = None

    @property
    def over(self) -> bool:
        return self.cut_off or time.monotonic() >= self._end

    def check(self) -> None:
        """Raise TimeoutError if the time is over: the function swallowed its cancellation, or blocked the loop. Called
        before COMMIT, so that nothing has happened."""
        if self.over:
            raise self.exceeded()

    def exceeded(self) -> TimeoutError:
        """The error of this limit, always the same object."""
        if self._error is None:
            self._error = TimeoutError(
                f"did not end within its timeout of {self._timeout:g} s; raise `timeout`, or do less in one transaction"
                if self._timeout <= self._lease
                else f"did not end within {self._lease:g} s, the shortest `lease` of this worker's sagas, which bounds "
                "every transaction; raise `lease`, or do the slow part in a step of its own, with saga.call"
            )
        return self._error

    def caused(self, error: BaseException) -> bool:
        """Whether `error` is this limit's, so that it is unknown how far the function got."""
        return error is self._error

    def blame(self, error: Exception) -> Exception:
        """The error to report for `error`.

        A transaction that is gone because the function took too long is the function's failure, not an outage. A saga's
        function has its transaction to itself, so an idle timeout is its own. In a group another message may have
        caused it: there a function is blamed only for its own time (G14). If the server is silent, nobody is to blame
        (R20).
        """
        if isinstance(error, ServerSilent):
            return error
        idle = isinstance(error, TransactionEnded) and self._alone
        return self.exceeded() if idle or (isinstance(error, StoreUnavailable) and self.over) else error
