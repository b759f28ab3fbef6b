"""Combines concurrent questions into one statement or commit: those that arrive while one runs go into the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from idemconsumer.errors import CommitUnknown, StoreUnavailable
from idemconsumer.stores.sharing import OTHERS, PARTY, SHORT
from idemconsumer.user_code.cancellation import until_done

Q = TypeVar("Q")
A = TypeVar("A")

MOST: Final = 32  # questions in one statement: of sagas for their steps, of tasks for one record each


def first(asked: Iterable[Q]) -> list[Q]:
    """The next questions, if all are of one kind."""
    return list(islice(asked, MOST))


class Together(Generic[Q, A]):
    """Combines the questions of one process. `group` takes some of the waiting questions, in their order, and `answer`
    returns an answer to each.

    No question waits for others to arrive: a single one is answered alone, at once. The statement serves all handlers,
    whichever asked first, so it has a party of its own (D13). `commits`: a caller that is cancelled while its commit
    runs waits for the end of it (J4).
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        group: Callable[[Iterable[Q]], Sequence[Q]] = first,
        *,
        commits: bool = False,
    ) -> None:
        self._answer = answer
        self._group = group
        self._commits = commits
        self._asked: dict[asyncio.Future[A], Q] = {}
        self._running: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """The answer sees all that was committed before the call. Raises what `answer` raises. If the loop is closed,
        raises StoreUnavailable, or CommitUnknown for a commit that was running. If the caller is cancelled before its
        question was taken, nothing is asked."""
        waiting: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._asked[waiting] = question
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        cancelled: asyncio.CancelledError | None = None
        while not waiting.done():
            try:
                await until_done(waiting)
            except asyncio.CancelledError as error:
                if waiting in self._asked or not self._commits:
                    self._asked.pop(waiting, None)
                    waiting.cancel()
                    raise
                cancelled = error
        if cancelled is not None:
            waiting.exception()
            raise cancelled
        return waiting.result()

    async def _run(self) -> None:
        PARTY.set(OTHERS if self._commits else SHORT)
        group: dict[asyncio.Future[A], Q] = {}
        try:
            while self._asked:
                taken = set(map(id, self._group(self._asked.values())))
                group = {waiting: each for waiting, each in self._asked.items() if id(each) in taken}
                for waiting in group:
                    del self._asked[waiting]
                await self._answer_all(group)
        except BaseException:
            _fail(group, (CommitUnknown if self._commits else StoreUnavailable)("the process is ending"))
            raise
        finally:
            self._running = None
            left, self._asked = self._asked, {}  # the loop is being closed
            _fail(left, StoreUnavailable("the process is ending"))

    async def _answer_all(self, group: Mapping[asyncio.Future[A], Q]) -> None:
        try:
            answers = await self._answer(list(group.values()))
        except Exception as error:  # noqa: BLE001 - for those who have asked
            _fail(group, error)
            return
        for waiting, answer in zip(group, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)


def _fail(group: Iterable[asyncio.Future[Any]], error: Exception) -> None:
    for waiting in group:  # a separate exception for each, since each is raised in a different task
        if not waiting.done():
            waiting.set_exception(type(error)(str(error)))
