"""Recorded steps of several sagas in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import StepKind, StepRow, StepState
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.together import Together

_MOST_SAGAS: Final = 32


class SharedReads:
    """Those of one process."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together: Together[tuple[bytes, int], list[StepRow]] = Together(
            self._read, most=_MOST_SAGAS, alike=itemgetter(1)
        )

    async def steps(self, key: bytes, window: int) -> list[StepRow]:
        """See `ports.LeaseStore`. What is committed when it is called is read."""
        return await self._together.ask((key, window))

    async def _read(self, asked: Sequence[tuple[bytes, int]]) -> list[list[StepRow]]:
        """They share the window, so that one answer is no larger than that of a single saga (L55)."""
        window, found = asked[0][1], {key: list[StepRow]() for key, _ in asked}
        for key, *row in await self._pool.read("steps", {"keys": list(found), "window": window // len(found)}):
            found[key].append(step_row(*row))
        return [found[key] for key, _ in asked]


def step_row(
    name: str, kind: int, state: int, has_undo: bool, overlapped: bool, position: int | None, attempt: int,
    output: bytes | None, content_type: str | None, left: int, arguments: bytes | None = None,
) -> StepRow:  # fmt: skip
    """Of a row of the statement `steps`, without its key."""
    stored = None if output is None else StoredResult(output, content_type or "")
    return StepRow(
        name, StepKind(kind), StepState(state), has_undo, overlapped, position, attempt, stored, left, arguments
    )
