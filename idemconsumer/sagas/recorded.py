"""The recorded outputs of a saga, read when they are asked for, and not all at once (L55)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from idemconsumer.errors import Fenced
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import StepRow
from idemconsumer.stores.leases import PostgresLeases

WINDOW: Final = 4 << 20  # bytes of outputs in memory that nobody has asked for yet, beside the largest one
_AT_ONCE: Final = WINDOW // 2  # bytes, so that two branches in different places do not drive each other's out


class Outputs:
    """Those of `rows`, which are asked for in about this order. What was read ahead is dropped, the oldest first, when
    it is more than the window."""

    def __init__(self, store: PostgresLeases, key: bytes, rows: Sequence[StepRow]) -> None:
        self._store = store
        self._key = key
        left = [row for row in rows if row.left]
        self._left = {row.name: row.left for row in left}  # not given out yet
        self._order = [row.name for row in left]
        self._place = {name: place for place, name in enumerate(self._order)}
        self._ahead: dict[str, StoredResult] = {}
        self.held = 0  # bytes
        self._reading = asyncio.Lock()

    async def of(self, row: StepRow) -> StoredResult | None:
        """Each once. Raises the store's errors, and Fenced if there is none any more."""
        if not row.left:
            return row.output
        async with self._reading:  # a branch may be reading what this one wants
            if row.name not in self._ahead:
                await self._read(row.name)
            output = self._ahead.pop(row.name)
            self.held -= self._left.pop(row.name)
            return output

    async def _read(self, name: str) -> None:
        """This one, and those that follow it as far as they fit."""
        names, size = [name], self._left[name]
        for place in range(self._place[name] + 1, len(self._order)):
            following = self._order[place]
            if following in self._left and following not in self._ahead:
                size += self._left[following]
                if size > _AT_ONCE:
                    break
                names.append(following)
        while self._ahead and self.held + size > WINDOW:
            oldest = next(iter(self._ahead))
            del self._ahead[oldest]
            self.held -= self._left[oldest]
        found = await self._store.outputs(self._key, names)
        if found.keys() != set(names):
            raise Fenced("the saga has ended, and its steps are pruned")
        self._ahead |= found
        self.held += sum(self._left[name] for name in names)
