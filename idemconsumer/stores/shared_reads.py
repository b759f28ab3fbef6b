"""Concurrent reads, combined into one statement: records, and the recorded steps of sagas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import Record, StepKind, StepRow, StepState
from idemconsumer.stores.answers import records
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.together import Together, first


class Looks:
    """Reads committed records for one process. Claims nothing, and leaves out expired records."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together = Together(self.records)

    async def record(self, key: bytes) -> Record | None:
        return await self._together.ask(key)

    async def records(self, keys: Sequence[bytes]) -> list[Record | None]:
        found = records(await self._pool.look("read", {"keys": list(keys)}), keys)
        return [found.get(key) for key in keys]


class SharedReads:
    """Reads the recorded steps of the sagas of one process."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together: Together[tuple[bytes, int], list[StepRow]] = Together(self._read, _alike)

    async def steps(self, key: bytes, window: int) -> list[StepRow]:
        """See `PostgresLeases.steps`. Sees all that was committed before the call."""
        return await self._together.ask((key, window))

    async def _read(self, asked: Sequence[tuple[bytes, int]]) -> list[list[StepRow]]:
        """The sagas share the window, so that the answer is no larger than that for a single saga (L55)."""
        window, found = asked[0][1], {key: list[StepRow]() for key, _ in asked}
        for key, *row in await self._pool.read("steps", {"keys": list(found), "window": window // len(found)}):
            found[key].append(step_row(*row))
        return [found[key] for key, _ in asked]


def _alike(asked: Iterable[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """Those with the same window as the first one."""
    every = list(asked)
    return first(each for each in every if each[1] == every[0][1])


def step_row(
    name: str, kind: int, state: int, has_undo: bool, overlapped: bool, position: int | None, attempt: int,
    output: bytes | None, content_type: str | None, left: int, arguments: bytes | None = None,
) -> StepRow:  # fmt: skip
    """The step in a row of the statement `steps`, without its key."""
    stored = None if output is None else StoredResult(output, content_type or "")
    return StepRow(
        name, StepKind(kind), StepState(state), has_undo, overlapped, position, attempt, stored, left, arguments
    )
