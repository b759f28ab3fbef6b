"""Cancellation: protecting operations that must not be cut in half, and finding out where a cancellation came from.

asyncio counts, in `Task.cancelling()`, how often a task's cancellation was requested. User code may raise that count
for good (before Python 3.13 a TaskGroup with a failed child does) or swallow the request. Only this file reads it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from idemconsumer.errors import SelfCancelled

T = TypeVar("T")

EXITS: Final = (SystemExit, KeyboardInterrupt)  # asyncio lets these end its loop
_ENDS: Final = (*EXITS, GeneratorExit)
_AGAIN: Final = 1.0  # seconds that a cancelled task has to clean up before it is cancelled again
_LEFT_BEHIND: Final[set[asyncio.Task[Any]]] = set()  # else Python would close them, and they would not end then either


class CancellationWatch:
    """Remembers how often cancellation of this task was requested, to tell later requests from earlier ones."""

    __slots__ = ("_before", "_task")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()

    @property
    def requested(self) -> bool:
        """Whether this task's cancellation was requested since this watch was created."""
        return self._task is not None and self._task.cancelling() > self._before

    def withdraw(self) -> None:
        """Set the count back to what it was: what user code did to it ends with the call."""
        task = self._task
        while task is not None and task.cancelling() > self._before:
            task.uncancel()


class LateCancellations:
    """Cancellations that arrived when the awaited operation was already decided. They are raised at the task's next
    await."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.Task[Any], tuple[CancellationWatch, asyncio.Handle]] = {}
        self._loop = asyncio.get_running_loop()

    def watch(self) -> CancellationWatch:
        """Start a watch. A deferred cancellation of this task is then raised only by it, and counts as requested."""
        task = asyncio.current_task() if self._pending else None
        if task is not None and (pending := self._pending.pop(task, None)) is not None:
            watch, handle = pending
            handle.cancel()
            if watch.requested:
                return watch
        return CancellationWatch()

    def defer(self, watch: CancellationWatch) -> None:
        """Raise later the cancellation that `watch` has seen, unless it is withdrawn, as by the end of a TaskGroup."""
        if watch.requested and (task := asyncio.current_task()) is not None:
            self._pending[task] = watch, self._loop.call_soon(self._raise, task)

    def _raise(self, task: asyncio.Task[Any]) -> None:
        watch, _ = self._pending.pop(task)
        if watch.requested and not task.done():
            task.uncancel()
            task.cancel()


def being_cancelled() -> bool:
    """Whether this task's cancellation was requested. True outside of a task, where nothing can be awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def ends_this_task(error: BaseException) -> bool:
    """Whether an exception that a library raised must be passed on: this task is being cancelled, or the process ends.
    Any other exception means only that the call has failed, even a CancelledError of the library's own."""
    return isinstance(error, _ENDS) or (isinstance(error, asyncio.CancelledError) and being_cancelled())


async def until_done(*futures: asyncio.Future[Any]) -> None:
    """Return once one of the futures is done, however it ended. CancelledError is raised only for a cancellation of the
    caller. `asyncio.wait` does the same and takes three times as long."""
    for future in futures:
        if future.done():
            return
    waiter = asyncio.get_running_loop().create_future()
    wake = partial(_wake, waiter)
    for future in futures:
        future.add_done_callback(wake)
    try:
        await waiter
    finally:
        for future in futures:
            future.remove_done_callback(wake)


def _wake(waiter: asyncio.Future[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def uninterrupted(act: Coroutine[Any, Any, T], *, hurry: Callable[[], None] | None = None) -> T:
    """Run `act` to its end, then raise a cancellation that came meanwhile.

    `hurry` is called when a cancellation has to wait. `asyncio.shield` would return at once while the act goes on. The
    separate task also serves operations that begin after the cancellation: the store gives no connection to a task that
    is being cancelled.
    """
    task = asyncio.create_task(act)
    if (cancelled := await _outlive(hurry, task)) is not None:
        task.exception()
        raise cancelled
    return task.result()


async def _outlive(told: Callable[[], object] | None, *futures: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Return once one of the futures is done, with the last cancellation of the caller meanwhile; `told` is called at
    each."""
    cancelled: asyncio.CancelledError | None = None
    while not any(future.done() for future in futures):
        try:
            await until_done(*futures)
        except asyncio.CancelledError as error:
            cancelled = error
            if told is not None:
                told()
    return cancelled


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel our own tasks, and wait until they have ended. A task that goes on all the same is cancelled again (D24).

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that arrives together with its result, and psycopg and
    its pool use it. A cancellation of the caller is passed on at once, and raised in the end.
    """
    cancelled: asyncio.CancelledError | None = None
    while going := [task for task in tasks if not task.done()]:
        for task in going:
            task.cancel()
        try:
            await asyncio.wait(going, timeout=_AGAIN)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        retrieve(task)
    if cancelled is not None:
        raise cancelled


def retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task that has ended, perhaps with no task waiting, so that Python does not log it."""
    if not task.cancelled():
        task.exception()


async def run_isolated(
    run: Coroutine[Any, Any, Any],
    *,
    leave: asyncio.Future[None] | None = None,
    cancelling: Callable[[], None] | None = None,
) -> tuple[Any, BaseException | None]:
    """Run user code in a task of its own. Returns what it returned, and what it raised.

    What it does to its task ends with it (B10). A cancellation of the caller is passed on, `cancelling` is called, and
    the cancellation is raised whatever the user code does with it. A CancelledError that came from inside is returned
    as SelfCancelled. So is the result of a task that still ran when `leave` was done.
    """
    task = asyncio.create_task(run)

    def pass_on() -> None:
        task.cancel()
        if cancelling is not None:
            cancelling()

    cancelled = await _outlive(pass_on, *((task,) if leave is None else (task, leave)))
    try:
        raised = task.exception() if task.done() else SelfCancelled()
    except asyncio.CancelledError as error:
        raised = SelfCancelled().with_traceback(error.__traceback__)
    if cancelled is not None:
        raise cancelled
    return (None if raised is not None else task.result()), raised


def leave_behind(task: asyncio.Future[Any]) -> None:
    """Abandon a task that does not end though it was cancelled: the loop, when it is closed, must not wait for it
    either."""
    if isinstance(task, asyncio.Task):
        _LEFT_BEHIND.add(task)
        asyncio.tasks._unregister_task(task)


async def run_mortal(run: Coroutine[Any, Any, T], grace: float, left: Callable[[], None]) -> T:
    """Run user code in a task of its own, which is abandoned if it has not ended `grace` seconds after it was cancelled
    (L34). `left` is called then. Code that swallows its cancellation and returns in time has returned."""
    task, now = asyncio.create_task(run), asyncio.get_running_loop().time
    cancelled: asyncio.CancelledError | None = None
    deadline = math.inf
    while not task.done():
        if cancelled is not None and now() >= deadline:
            leave_behind(task)
            left()
            raise cancelled
        try:
            await (until_done(task) if cancelled is None else asyncio.wait([task], timeout=deadline - now()))
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
            deadline = min(deadline, now() + grace)
    return task.result()


async def run_on(work: Coroutine[Any, Any, None], what: str) -> None:
    """Run one part of a worker. Raises RuntimeError if the part was cancelled from inside: a TaskGroup ignores a
    cancelled task, and the other parts would go on without this one (D9)."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    finally:
        await end(task)
    if task.cancelled():
        raise RuntimeError(f"a {what} was cancelled by the code that it ran, and the worker cannot go on without it")
    task.result()


async def isolated(run: Coroutine[Any, Any, T]) -> T:
    """As `run_isolated`, but raises what the user code raised."""
    value, error = await run_isolated(run)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def from_cancellation(error: BaseException | None) -> bool:
    """Whether user code turned a cancellation into this error. A TaskGroup's exception group does not count."""
    while error is not None and not isinstance(error, BaseExceptionGroup):
        if isinstance(error, asyncio.CancelledError):
            return True
        error = error.__cause__ or error.__context__
    return False
