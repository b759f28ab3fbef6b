"""Rows of what waits in Postgres: those that a session has taken, and where the others begin (P9)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias

_FAR: Final = 200  # numbers behind the low water, from which on a message is far from it
_OWN: Final = 20  # messages of this process between two times
_AGAIN: Final = 1.0  # seconds, where a transaction that may have lower numbers had not ended

Row: TypeAlias = tuple[int, int]  # its id, and the token of its delivery
Line = tuple[str, str]  # which table, and the queue's name or the destination


class LowWater:
    """When the place at which what waits begins is to be raised, of the lines that one session or relay takes from.
    `raise_` raises that of one line, and returns how many numbers are behind it then. What has gone of a table is
    counted together: many names may share one (P9)."""

    def __init__(self, raise_: Callable[[Line], Awaitable[int]]) -> None:
        self._raise = raise_
        self._gone = Counter[str]()
        self._due: dict[Line, float] = {}

    def gone(self, line: Line, messages: int, behind: int | None = None) -> None:
        """So many were taken. `behind` the low water by so many numbers; None: by what was taken here."""
        self._gone[line[0]] += messages
        count = self._gone[line[0]]
        if count >= _OWN and (count if behind is None else behind) >= _FAR:
            self._due[line] = 0.0

    async def rise(self) -> None:
        """Of those that are far enough."""
        now = asyncio.get_running_loop().time()
        for line in [line for line, at in self._due.items() if at <= now]:
            if self._due.pop(line, None) is None:  # meanwhile another lane has raised it
                continue
            del self._gone[line[0]]
            if await self._raise(line) >= _FAR:
                self._due[line] = now + _AGAIN


class RowsInHand:
    """What a session has taken, and what it could not say of that before it was lost. What ends rows are queries of
    sql/queue.sql, by their names."""

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
