"""What several ask for at once, in one statement: what is asked while one is under way goes into the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from idemconsumer.errors import StoreUnavailable
from idemconsumer.stores.sharing import PARTY, SHORT

Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[Q, A]):
    """Of one process. `answer` has an answer to each of up to `most` questions, which are `alike` in one statement.

    Nobody waits for others to ask: who is alone is answered alone, at once.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        *,
        most: int,
        alike: Callable[[Q], Hashable] = lambda _: None,
    ) -> None:
        self._answer = answer
        self._most = most
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
                group = [each for each in self._asked if self._alike(each[0]) == kind][: self._most]
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
