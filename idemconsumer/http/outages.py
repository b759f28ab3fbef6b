"""A store that cannot be used: what the client is answered, and what the log says of it, once (H58)."""

from __future__ import annotations

from idemconsumer.errors import ConfigurationError, Contention, IdemConsumerError, StoreChanged
from idemconsumer.http.problems import Problem
from idemconsumer.logs import log


class Outages:
    """Of one use of a store. What it says of itself before it has ever worked is for the author of the service, who has
    to see it; later nobody has written anything new, and what has changed is for its operator to mend."""

    def __init__(self) -> None:
        self._worked = False
        self._said: type[IdemConsumerError] | None = None

    def answered(self, error: IdemConsumerError, problem: Problem) -> Problem:
        """Raises the error if it came from the application, which says nothing about our store (B12), or is for the
        author."""
        wrong = isinstance(error, ConfigurationError | StoreChanged)
        if error.by_function or (wrong and not self._worked):
            raise error
        if not isinstance(error, Contention) and (self._said is None or (wrong and self._said is not type(error))):
            self._said = type(error)
            if wrong:
                log.error("the front door answers 503 until its store is repaired", error=str(error))
            else:
                log.warning("the front door answers 503 while its store is unreachable", error=str(error))
        return problem

    def heard(self, *, wrote: bool) -> None:
        """It has answered, and `wrote` something, too: what is full, or lacks a right, still tells what it has."""
        self._worked = True
        if wrote and self._said is not None:
            self._said = None
            log.info("the store of the front door works again")
