"""When the place at which what waits in Postgres begins is to be raised (P9)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

_FAR: Final = 200  # numbers behind the low water, from which on a message is far from it
_OWN: Final = 20  # messages of this process between two times
_AGAIN: Final = 1.0  # seconds, where a transaction that may have lower numbers had not ended

Line = tuple[str, str]  # which table, and the queue's name or the destination


class LowWater:
    """Of the lines that one session or relay takes from. `raise_` raises that of one line, and returns how many numbers
    are behind it then. What has gone of a table is counted together: many names may share one (P9)."""

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
