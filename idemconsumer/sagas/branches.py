"""saga.all: many branches of one saga, a few of them at a time (L46).

Branches begin in their order, each in place of one that has ended, so no more tasks exist than may run. Once a branch
has raised, no unrecorded step begins. Recorded steps are still requested, so that a replay that meets the rejection
first still learns which other steps exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar

from idemconsumer.errors import OfTheEngine, SagaMisused
from idemconsumer.rules.replay import StepAnswer
from idemconsumer.rules.values import StepRow

T = TypeVar("T")

Branch = Coroutine[Any, Any, T]


class NotBegun(OfTheEngine):
    """An unrecorded step of a branch that must not begin any more. It does not interrupt the run."""


class Group:
    """The branches of one `all`, as their steps see it. `parent`: the enclosing group, if this `all` is in a branch
    itself.

    `end`: the name of a step without a record that a branch of an undoing saga has reached. `rejection`: the record of
    the latest rejection that was replayed.
    """

    def __init__(self, run: object, parent: Group | None, stopped: Callable[[], None]) -> None:
        """`stopped` is called when the group is stopped."""
        self.run = run
        self.parent = parent
        self._tell = stopped
        self.end: str | None = None
        self.rejection: StepRow | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self._tell()

    @property
    def stopped(self) -> bool:
        return self._stopped or (self.parent is not None and self.parent.stopped)

    def ends_before(self, row: StepRow | None, answer: StepAnswer, *, ended: bool) -> bool:
        """Whether a branch ends before this step. `ended`: the handler has ended. A call of unknown outcome is run all
        the same: otherwise its outcome would never be known (L4)."""
        begins = row is None or row.waits
        return answer is StepAnswer.END or (answer is StepAnswer.RUN and (ended or (self.stopped and begins)))

    def refuse(self, name: str, *, end: bool) -> NotBegun:
        """The exception for a step that does not begin. `end`: the saga is undone, so this step ends its branch."""
        if end:
            self.end = name
        return NotBegun(f"step {name!r} has not begun")

    def rejected(self, row: StepRow) -> None:
        if self.rejection is None or (row.position or 0) > (self.rejection.position or 0):
            self.rejection = row


_group: Final[ContextVar[Group | None]] = ContextVar("the branches of saga.all", default=None)


def group_of(run: object) -> Group | None:
    """The innermost group of this run to which the current task belongs."""
    group = _group.get()
    return group if group is not None and group.run is run else None


class Branches(Generic[T]):
    """Runs the branches of one `all`. `recorded`: whether recorded steps exist that have not been requested yet. `mark`
    is called with a branch and whether it is begun: with False for coroutines that exist already, with True when one
    begins."""

    def __init__(
        self,
        branches: Iterable[Branch[T]],
        limit: int,
        group: Group,
        recorded: Callable[[], bool],
        mark: Callable[[Branch[T], bool], None],
    ) -> None:
        self._given = branches
        self._mark = mark
        for branch in branches if isinstance(branches, Collection) else ():
            if isinstance(branch, Coroutine):
                mark(branch, False)
        self._items: Iterator[Branch[T]] = iter(branches)
        self._limit = limit
        self._group = group
        self._recorded = recorded
        self._taken = 0
        self._exhausted = False
        self._outputs: dict[int, T] = {}
        self._errors: dict[int, Exception] = {}

    async def run(self) -> bool:
        """Run until all have ended, or none may begin any more. False if some have no output, and none has raised."""
        tasks: list[asyncio.Task[None]] = []
        before = _group.set(self._group)
        try:
            while len(tasks) < self._limit and (first := self._take()) is not None:
                tasks.append(asyncio.create_task(self._work(first)))
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            _group.reset(before)
            await self._end(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if any(task.cancelled() for task in tasks):
            raise asyncio.CancelledError
        return bool(self._errors) or (self._exhausted and len(self._outputs) == self._taken)

    def outputs(self) -> list[T]:
        """The outputs, in the order of the branches. Raises the error of the first branch that failed."""
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._outputs[n] for n in range(self._taken)]

    async def _work(self, item: tuple[int, Branch[T]] | None) -> None:
        while item is not None:
            n, branch = item
            try:
                self._outputs[n] = await branch
            except NotBegun:
                pass
            except BaseExceptionGroup as group:  # raised by a TaskGroup
                _, rest = group.split(NotBegun)
                if isinstance(rest, Exception):
                    self._fail(n, rest)
                elif rest is not None:
                    raise rest from None
            except Exception as error:  # noqa: BLE001 - raised once the other branches have ended
                self._fail(n, error)
            # A recorded branch may never wait. Let those taken before begin first: one may have been rejected.
            await asyncio.sleep(0)
            item = self._take()

    def _take(self) -> tuple[int, Branch[T]] | None:
        """The next branch to begin. A branch that may have recorded steps begins in any case."""
        if (self._group.stopped or self._group.end is not None) and not self._recorded():
            return None
        try:
            branch: object = next(self._items)
        except StopIteration:
            self._exhausted = True
            return None
        except Exception as error:  # noqa: BLE001 - of the user's generator; raised likewise
            self._fail(self._taken, error)
            return None
        self._taken += 1
        if not isinstance(branch, Coroutine):
            given = type(branch).__name__
            self._fail(
                self._taken - 1,
                SagaMisused(f"saga.all was given a {given}; give it coroutines, such as saga.call(…), not awaited yet"),
            )
            return None
        self._mark(branch, True)
        return self._taken - 1, branch

    def _fail(self, n: int, error: Exception) -> None:
        self._errors[n] = error
        self._group.stop()

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """If it was cancelled or interrupted, end the branches that run; close coroutines that have not begun."""
        if isinstance(self._given, Collection):
            for branch in self._items:
                if isinstance(branch, Coroutine):
                    branch.close()
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # marks the error as retrieved: one is raised, and asyncio would log the others
