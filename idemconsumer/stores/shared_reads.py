"""What several ask for at once, in one statement: what is asked while one is under way goes into the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from operator import itemgetter
from typing import Final, Generic, TypeVar

from idemconsumer.errors import StoreUnavailable
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import Record, StepKind, StepRow, StepState
from idemconsumer.stores.answers import records
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.sharing import PARTY, SHORT

Q = TypeVar("Q")
A = TypeVar("A")

_MOST: Final = 32  # questions in one statement: of sagas about their steps, of those who ask for one record each


class Together(Generic[Q, A]):
    """Of one process. `answer` has an answer to each of up to 32 questions, which are `alike` in one statement.

    Nobody waits for others to ask: who is alone is answered alone, at once.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        alike: Callable[[Q], Hashable] = lambda _: None,
    ) -> None:
        self._answer = answer
        self._alike = alike
        self._asked: list[tuple[Q, asyncio.Future[A]]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """What is committed when it is called is seen. Raises what `answer` raises."""
        waiting: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._asked.append((question, waiting))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await waiting

    async def _run(self) -> None:
        PARTY.set(SHORT)  # it is for all handlers, whoever began it
        group: list[tuple[Q, asyncio.Future[A]]] = []
        try:
            while self._asked:
                kind = self._alike(self._asked[0][0])
                group = [each for each in self._asked if self._alike(each[0]) == kind][:_MOST]
                self._asked = [each for each in self._asked if each not in group]
                await self._answer_all(group)
        finally:
            self._running = None
            left, self._asked = [*group, *self._asked], []  # the loop is being closed
            _fail(left, StoreUnavailable("the process is ending"))

    async def _answer_all(self, group: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._answer([question for question, _ in group])
        except Exception as error:  # noqa: BLE001 - for those who have asked
            _fail(group, error)
            return
        for (_, waiting), answer in zip(group, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)


def _fail(group: Sequence[tuple[Q, asyncio.Future[A]]], error: Exception) -> None:
    for _, waiting in group:  # a separate exception for each, since each is raised in a different task
        if not waiting.done():
            waiting.set_exception(type(error)(str(error)))


class Looks:
    """Looks at records that are committed, of one process. Nothing is claimed, and what has expired is not there."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together = Together(self.records)

    async def record(self, key: bytes) -> Record | None:
        return await self._together.ask(key)

    async def records(self, keys: Sequence[bytes]) -> list[Record | None]:
        found = records(await self._pool.look("read", {"keys": list(keys)}), keys)
        return [found.get(key) for key in keys]


class SharedReads:
    """Recorded steps of the sagas of one process."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together: Together[tuple[bytes, int], list[StepRow]] = Together(self._read, itemgetter(1))

    async def steps(self, key: bytes, window: int) -> list[StepRow]:
        """See `PostgresLeases.steps`. What is committed when it is called is read."""
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
