"""Recorded steps of several sagas in one statement: what is asked for while one is under way goes into the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from idemconsumer.errors import StoreUnavailable
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import StepKind, StepRow, StepState
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.sharing import OTHERS, PARTY

_MOST_SAGAS: Final = 32


@dataclass(slots=True, eq=False)
class _Asked:
    key: bytes
    window: int
    answer: asyncio.Future[list[StepRow]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SharedReads:
    """Those of one process. Nobody waits for others to ask: who is alone is answered alone, at once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._asked: list[_Asked] = []
        self._running: asyncio.Task[None] | None = None

    async def steps(self, key: bytes, window: int) -> list[StepRow]:
        """See `ports.LeaseStore`. What is committed when it is called is read."""
        asked = _Asked(key, window)
        self._asked.append(asked)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await asked.answer

    async def _run(self) -> None:
        PARTY.set(OTHERS)  # it is for all handlers, whoever began it
        group: list[_Asked] = []
        try:
            while self._asked:
                window = self._asked[0].window
                group = [asked for asked in self._asked if asked.window == window][:_MOST_SAGAS]
                self._asked = [asked for asked in self._asked if asked not in group]
                await self._read(group, window)
        finally:
            self._running = None
            left, self._asked = [*group, *self._asked], []  # the loop is being closed
            _fail(left, StoreUnavailable("the process is ending"))

    async def _read(self, group: Sequence[_Asked], window: int) -> None:
        """They share the window, so that one answer is no larger than that of a single saga (L55)."""
        found: dict[bytes, list[StepRow]] = {asked.key: [] for asked in group}
        try:
            for key, *row in await self._pool.read("steps", {"keys": list(found), "window": window // len(found)}):
                found[key].append(step_row(*row))
        except Exception as error:  # noqa: BLE001 - for those who have asked
            _fail(group, error)
        for asked in group:
            if not asked.answer.done():
                asked.answer.set_result(found[asked.key])


def _fail(group: Sequence[_Asked], error: Exception) -> None:
    for asked in group:  # a separate exception for each, since each is raised in a different task
        if not asked.answer.done():
            asked.answer.set_exception(type(error)(str(error)))


def step_row(
    name: str, kind: int, state: int, has_undo: bool, overlapped: bool, position: int | None, attempt: int,
    output: bytes | None, content_type: str | None, left: int,
) -> StepRow:  # fmt: skip
    """Of a row of the statement `steps`, without its key."""
    stored = None if output is None else StoredResult(output, content_type or "")
    return StepRow(name, StepKind(kind), StepState(state), has_undo, overlapped, position, attempt, stored, left)
