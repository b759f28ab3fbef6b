"""What an exception says about what was asked of a store or a broker. The one place that decides it (H52, X10)."""

from __future__ import annotations

from enum import Enum, auto

from idemconsumer.errors import BadMessage, CannotKeep, ConfigurationError, Interrupted, Unavailable


class Meaning(Enum):
    """REFUSED: who was asked says that it takes this value from nobody, and has taken nothing. PASSING: it cannot tell
    now; another attempt may not meet that. DOUBT: nothing is known, so it may have been done."""

    REFUSED = auto()
    PASSING = auto()
    DOUBT = auto()


def meaning(error: BaseException) -> Meaning:
    """By our own errors alone, which an adapter raises for what its server has said. What a library raises has no
    meaning of its own: for a connection that was reset, asyncio's raise OSError, uvloop's a RuntimeError."""
    if isinstance(error, CannotKeep | BadMessage):
        return Meaning.REFUSED
    if isinstance(error, Unavailable | Interrupted | ConfigurationError):
        return Meaning.PASSING
    return Meaning.DOUBT
