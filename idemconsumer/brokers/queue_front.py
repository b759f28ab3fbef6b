"""Rows of the queue and outbox tables: those that a session has taken, and the position where the remaining ones begin
(P9)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias

_FAR: Final = 200  # a message this many numbers behind the low water is far from it
_OWN: Final = 20  # messages taken by this process before it raises the low water again
_AGAIN: Final = 1.0  # seconds until the next try, where a transaction that may insert lower numbers had not ended

Row: TypeAlias = tuple[int, int]  # its id, and the token of its delivery
Line = tuple[str, str]  # the table, and the name of the queue or the destination


class LowWater:
    """Decides when to raise the low water: the number below which a line has no rows any more.

    For the lines that one session or relay takes from. `raise_` raises the low water of one line and returns how many
    numbers are behind it then. Rows taken are counted per table, since many names may share one (P9).
    """

    def __init__(self, raise_: Callable[[Line], Awaitable[int]]) -> None:
        self._raise = raise_
        self._gone = Counter[str]()
        self._due: dict[Line, float] = {}

    def gone(self, line: Line, messages: int, behind: int | None = None) -> None:
        """Count `messages` rows as taken, `behind` numbers past the low water; None: estimate that by the rows taken
        here."""
        self._gone[line[0]] += messages
        count = self._gone[line[0]]
        if count >= _OWN and (count if behind is None else behind) >= _FAR:
            self._due[line] = 0.0

    async def rise(self) -> None:
        """Raise the low water of each line whose rows are far enough from it."""
        now = asyncio.get_running_loop().time()
        for line in [line for line, at in self._due.items() if at <= now]:
            if self._due.pop(line, None) is None:  # another lane has raised it meanwhile
                continue
            del self._gone[line[0]]
            if await self._raise(line) >= _FAR:
                self._due[line] = now + _AGAIN


class RowsInHand:
    """The rows that a session has taken, and the statements about them that failed when the session was lost. Rows are
    ended by the queries of sql/queue.sql, given by name."""

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
        """Move these rows from taken to unconfirmed, until `said` confirms the query. Returns id and queue of those
        that were taken: a row may have been taken again meanwhile."""
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
        """The rows of a lost session, by the query that is still to be run for them.

        The session did not kill this process, so its rows are given back as if they had never been delivered. The
        exception is a queue that is not `at_rest`: one of its messages, perhaps this one, still runs.
        """
        owed = {query: set(rows) for query, rows in self._unsaid.items()}
        for number, (token, queue) in self._rows.items():
            owed["give_back" if at_rest(queue) else "let_go"].add((number, token))
        return {query: rows for query, rows in owed.items() if rows}


def handles(rows: Iterable[Row]) -> dict[str, Any]:
    """The rows as parameters of these queries."""
    ids, tokens = zip(*rows, strict=True)
    return {"ids": list(ids), "delivery_tokens": list(tokens)}
