"""Which of a handler's statements are pipelined, learnt from whether it reads their answers, not declared (J26)."""

from __future__ import annotations

from typing import Final

_RUNS: Final = 3  # runs without a read of the answer, after which it is pipelined
_AFTER_FAILURE: Final = 100  # runs after a failure, which cost a group; one that fails often is mostly waited for
_MOST: Final = 1_000  # texts; a handler that makes up new ones for each message is not learnt from
_CHARACTERS: Final = 1_000_000  # of all of them


class Habits:
    """Which statements of one handler, in one process, are pipelined: sent without waiting for the answer. `timeout`:
    for how many seconds the pipelined statements of one run may execute."""

    __slots__ = ("_characters", "_missing", "timeout")

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self._missing: dict[str, int | None] = {}  # runs until it is pipelined; None: an answer was read
        self._characters = 0

    def sends(self, query: str) -> bool:
        """Whether to pipeline it: the handler did not read the answers of its last runs."""
        return self._missing.get(query, _RUNS) == 0

    def ran(self, query: str) -> None:
        """It was answered, and the handler has not read the answer so far."""
        if (missing := self._missing.get(query, _RUNS)) and self._knows(query):
            self._missing[query] = missing - 1

    def failed(self, query: str) -> None:
        """It was pipelined, and failed."""
        if self._missing.get(query, _RUNS) is not None and self._knows(query):
            self._missing[query] = _AFTER_FAILURE

    def looked(self, query: str) -> None:
        """The handler read an answer: the statement is waited for from now on."""
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
