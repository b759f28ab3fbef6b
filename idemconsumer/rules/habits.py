"""What a handler does with the answers to its statements: what is sent ahead is learnt, and not declared (J26)."""

from __future__ import annotations

from typing import Final

_RUNS: Final = 3  # in which nobody looked, before nobody waits
_AFTER_FAILURE: Final = 100  # a group has run for nothing; where that is usual, the statement is mostly waited for
_MOST: Final = 1_000  # texts; a handler that makes up new ones for each message is not learnt from
_CHARACTERS: Final = 1_000_000  # of all of them


class Habits:
    """Of one handler, in one process: which of its statements are sent without waiting for the answer. `timeout`: for
    how many seconds what one run has sent may be at work."""

    __slots__ = ("_characters", "_missing", "timeout")

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._missing: dict[str, int | None] = {}  # runs until it is sent ahead; None: somebody has looked
        self._characters = 0

    def sends(self, query: str) -> bool:
        """Whether the answers to its last runs were of no interest to anybody."""
        return self._missing.get(query, _RUNS) == 0

    def ran(self, query: str) -> None:
        """It was answered, and so far nobody has looked at the answer."""
        if (missing := self._missing.get(query, _RUNS)) and self._knows(query):
            self._missing[query] = missing - 1

    def failed(self, query: str) -> None:
        """It was sent ahead, and failed."""
        if self._missing.get(query, _RUNS) is not None and self._knows(query):
            self._missing[query] = _AFTER_FAILURE

    def looked(self, query: str) -> None:
        """Somebody looked at an answer: it is waited for from now on."""
        if self._knows(query):
            self._missing[query] = None

    def _knows(self, query: str) -> bool:
        if query in self._missing:
            return True
        if len(self._missing) >= _MOST or self._characters + len(query) > _CHARACTERS:
            return False
        self._characters += len(query)
        self._missing[query] = _RUNS
        return True
