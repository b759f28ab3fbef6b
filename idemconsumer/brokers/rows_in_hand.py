"""The rows of the Postgres queue that a session has taken, and what it could not say of them before it was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Row: TypeAlias = tuple[int, int]  # its id, and the token of its delivery


class RowsInHand:
    """Of one session. What ends them are queries of sql/queue.sql, by their names."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, str]] = {}  # by id: the token, and the queue
        self._unsaid: dict[str, set[Row]] = {"finish": set(), "give_back": set(), "let_go": set()}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        return [(number, token) for number, (token, _) in self._rows.items()]

    def took(self, row: Row, queue: str) -> None:
        number, token = row
        self._rows[number] = token, queue

    def ends(self, query: str, rows: Iterable[Row]) -> list[tuple[int, str]]:
        """From now on these are not in hand, but unsaid until `said`. Returns the ids of those that were, and their
        queues: a row may have been taken again meanwhile."""
        ended = []
        for number, token in rows:
            self._unsaid[query].add((number, token))
            if (its := self._rows.get(number)) is not None and its[0] == token:
                ended.append((number, its[1]))
                del self._rows[number]
        return ended

    def said(self, query: str, rows: Iterable[Row]) -> None:
        self._unsaid[query].difference_update(rows)

    def owed(self, at_rest: Callable[[str], bool]) -> dict[str, set[Row]]:
        """By query, for a session that was lost. Nothing of it has killed this process: so it is as if it had not been
        delivered, unless something of its queue, and so perhaps the row itself, still runs: not `at_rest`."""
        owed = {query: set(rows) for query, rows in self._unsaid.items()}
        for number, (token, queue) in self._rows.items():
            owed["give_back" if at_rest(queue) else "let_go"].add((number, token))
        return {query: rows for query, rows in owed.items() if rows}


def handles(rows: Iterable[Row]) -> dict[str, Any]:
    """As parameters of these queries."""
    ids, tokens = zip(*rows, strict=True)
    return {"ids": list(ids), "delivery_tokens": list(tokens)}
