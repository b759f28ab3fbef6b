"""Looks at records that are committed, of many who ask at once in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from idemconsumer.rules.values import Record
from idemconsumer.stores.answers import records
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.together import Together

_MOST: Final = 32  # records in one answer, of those who ask for one each


class Looks:
    """Those of one process. Nothing is claimed, and what has expired is not there."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together = Together(self.records, most=_MOST)

    async def record(self, key: bytes) -> Record | None:
        return await self._together.ask(key)

    async def records(self, keys: Sequence[bytes]) -> list[Record | None]:
        found = records(await self._pool.look("read", {"keys": list(keys)}), keys)
        return [found.get(key) for key in keys]
