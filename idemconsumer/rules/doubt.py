"""What an exception says about a request to a store or a broker. The one place that decides it (H52, X10)."""

from __future__ import annotations

from enum import Enum, auto

from idemconsumer.errors import BadMessage, CannotKeep, ConfigurationError, Interrupted, Unavailable


class Meaning(Enum):
    """REFUSED: the server would take this value from no client, and has taken nothing. PASSING: the server cannot
    answer now; another attempt may succeed. DOUBT: nothing is known, so the request may have been carried out."""

    REFUSED = auto()
    PASSING = auto()
    DOUBT = auto()


def meaning(error: BaseException) -> Meaning:
    """The meaning of an error. Only our own errors have one: adapters raise them for an answer of the server. Errors of
    libraries mean nothing by themselves: for a reset connection asyncio raises OSError, uvloop a RuntimeError."""
    if isinstance(error, CannotKeep | BadMessage):
        return Meaning.REFUSED
    if isinstance(error, Unavailable | Interrupted | ConfigurationError):
        return Meaning.PASSING
    return Meaning.DOUBT
