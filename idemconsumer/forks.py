"""Resources that belong to one process and one event loop, and what happens to them in another one (O25 to O28).

A fork copies every object and shares every socket. If a child closed its copies as usual, libpq would send the parent's
goodbye to the server, and the event loop would remove the socket from the epoll that both processes share. So from the
first moment of a child, each descriptor of ours leads nowhere. Its number stays taken, any object that still has it may
close it, and the server notices the end of the parent although the child lives on.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import stat
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures.thread import _WorkItem
from contextlib import suppress
from traceback import walk_stack
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from idemconsumer.errors import ConfigurationError
from idemconsumer.logs import log

T = TypeVar("T")

_Descriptors = Callable[[Any], Iterable[int]]

_owners: Final[WeakKeyDictionary[object, tuple[asyncio.AbstractEventLoop | None, _Descriptors]]] = WeakKeyDictionary()
_loops: Final[WeakSet[asyncio.AbstractEventLoop]] = WeakSet()
_workers: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[signal.Signals, ...]]] = WeakKeyDictionary()
_generation = 0  # how many forks lie between the first process and this one
_begun = 0  # forks of this process, whether or not they have ended
_mask: Final = threading.local()


# --------------------------------------------------------------------------------------------------------- registration
def not_inherited(owner: T, descriptors: Callable[[T], Iterable[int]]) -> None:
    """In a child that is forked while `owner` lives, the descriptors that `descriptors(owner)` returns at the fork lead
    nowhere. The same happens once the event loop that runs now is known to have been closed."""
    loop = None
    with suppress(RuntimeError):  # a thread without one
        loop = asyncio.get_running_loop()
    _owners[owner] = loop, descriptors


def use_loop() -> None:
    """The running loop has sockets of ours. A child inherits nothing that is registered with this loop, not even a
    user's sockets, since the child cannot run the loop."""
    _loops.add(asyncio.get_running_loop())


def use_worker_loop(*signals: signal.Signals) -> None:
    """Like `use_loop`. A child that returns to the running loop ends at once, and `signals` get their default effect in
    it. Otherwise it would repeat the work that the loop has in progress, and the parent would read the child's SIGTERM.
    """
    use_loop()
    _workers[asyncio.get_running_loop()] = signals


def count() -> int:
    """How many forks this process has begun. A socket becomes ours only once it is connected, so code that connects one
    compares the count before and after, to see whether a child has the socket too."""
    return _begun


class never_in_a_child:  # noqa: N801 - as those of contextlib
    """User code runs inside. A child that was forked there ends at once when it leaves the block, however it leaves,
    since it would go on with its parent's transaction. The exit code is that of a SystemExit, else 1."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _generation

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if _generation != self._before:
            leave(error)


def leave(error: BaseException | None = None) -> NoReturn:
    """End this process, which is a child, without running any code of its parent's. `error` is the exception that left
    the user's code; without it, the exception that is being handled."""
    error, code = error or sys.exc_info()[1], 1
    if not isinstance(error, SystemExit):
        log.error(
            "a process forked in a handler returned from it, ending that process",
            exc_info=error,
            instead="end it with os._exit(0), or start a function with multiprocessing.Process",
        )
    elif error.code is None or isinstance(error.code, int):
        code = (error.code or 0) & 0xFF
    else:
        print(error.code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


class PerLoop(Generic[T]):
    """One object from `make` for each event loop of this process; given to `end` when the loop ends (O26)."""

    def __init__(self, make: Callable[[], T], end: Callable[[T], Awaitable[None]]) -> None:
        self._make, self._end = make, end
        self._there: dict[asyncio.AbstractEventLoop, tuple[int, T, AsyncGenerator[None]]] = {}

    def here(self) -> T:
        """The object of the running loop. Objects of other loops stay with them, unless those loops are closed: they
        may run in other threads. Raises ConfigurationError in a child that goes on with its parent's loop."""
        loop = asyncio.get_running_loop()
        if (found := self._there.get(loop)) is None:
            self._drop_closed()
            use_loop()
            its = self._make()
            ending = self._kept(loop, its)
            with suppress(StopIteration):  # now it is suspended at its `yield`, and the loop has registered it
                ending.asend(None).send(None)
            found = self._there[loop] = _generation, its, ending
        generation, its, _ = found
        if generation != _generation:
            raise ConfigurationError(
                "this event loop was used before this process was forked, and its sockets are the parent's; "
                "run the child's code in a loop of its own, with asyncio.run(…)"
            )
        return its

    def forget(self) -> T | None:
        """Remove the running loop's object and return it, for the caller to close. None if missing or the parent's."""
        self._drop_closed()
        generation, its, ending = self._there.pop(asyncio.get_running_loop(), (_generation, None, None))
        if ending is not None:
            with suppress(StopIteration):  # it has nothing left to wait for
                ending.aclose().send(None)
        return its if generation == _generation else None

    async def _kept(self, loop: asyncio.AbstractEventLoop, its: T) -> AsyncGenerator[None]:
        """Calls `end`: a loop that ends finishes its asynchronous generators, after its tasks
        (`shutdown_asyncgens`)."""
        generation = _generation
        try:
            yield
        finally:
            if self._there.pop(loop, None) is not None and generation == _generation:
                await self._end(its)

    def _drop_closed(self) -> None:
        """Sever the sockets of closed loops. They can be neither used nor closed any more, and until they are collected
        the servers keep their sessions."""
        for closed in [each for each in self._there.copy() if each.is_closed()]:
            self._there.pop(closed, None)
            _lead_nowhere([*_owned_in(closed), *_sockets_of(closed)])


# ------------------------------------------------------------------------------------------------------------ at a fork
def _before() -> None:
    global _begun
    _begun += 1
    # A signal that reached the child before it has handlers of its own would count as the parent's.
    blocked = {number for signals in list(_workers.values()) for number in signals}
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)


def _after() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _in_child() -> None:
    global _generation
    _generation += 1
    descriptors = set[int]()
    for owner, _, of in _all():
        with suppress(Exception):  # its driver may be in any state; release the others all the same
            descriptors.update(of(owner))
    for loop in list(_loops):
        with suppress(Exception):
            descriptors.update(_sockets_of(loop))
    _lead_nowhere(descriptors)
    for loop in list(_loops):
        with suppress(Exception):
            _give_own_epoll(loop)
    for loop, signals in list(_workers.items()):
        signal.set_wakeup_fd(-1)
        for number in signals:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        with suppress(RuntimeError):  # it was closed
            loop.call_soon(_come_back, asyncio.current_task(loop))
            if isinstance(loop, asyncio.BaseEventLoop):
                loop._ready.rotate(1)  # type: ignore[attr-defined]  # before what is ready; not possible in uvloop
    if _owners or _loops:  # otherwise the process has no resources of ours, and its children are free to go on
        with suppress(Exception):
            _end_with_its_thread()
    _owners.clear()
    _loops.clear()
    _workers.clear()
    _after()


class _Nobody:
    """Receives, in a child, the result of the function that a pool's thread was running, and ends the child. Otherwise
    the thread would wait for more work, for ever, or do the work that its parent's pool has in progress."""

    def set_result(self, result: object) -> NoReturn:  # a future of concurrent.futures
        leave()

    def set_exception(self, error: BaseException) -> NoReturn:
        leave(error)

    def call_soon_threadsafe(self, report: object, future: object, result: object, error: BaseException) -> NoReturn:
        leave(error)  # called by a worker thread of anyio, which FastAPI uses for `def` endpoints

    def is_closed(self) -> bool:
        return False


def _end_with_its_thread() -> None:
    """The thread that forked is the child's only one. The child ends as soon as this thread's function does (O27)."""
    thread: Any = threading.current_thread()
    thread._invoke_excepthook = lambda _: leave()
    thread._delete = leave
    if type(thread).__module__.startswith("anyio."):
        thread.loop = _Nobody()
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code is _WorkItem.run.__code__:  # a ThreadPoolExecutor's, such as the one of asyncio.to_thread
            frame.f_locals["self"].future = _Nobody()


def _come_back(task: asyncio.Task[Any] | None) -> NoReturn:
    leave(task.exception() if task is not None and task.done() and not task.cancelled() else None)


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)


def _all() -> Iterator[tuple[object, asyncio.AbstractEventLoop | None, _Descriptors]]:
    for reference in _owners.keyrefs():  # a list, since other threads may connect during the loop
        if (owner := reference()) is not None:
            yield owner, *_owners[owner]


def _owned_in(loop: asyncio.AbstractEventLoop) -> Iterator[int]:
    for owner, its, of in _all():
        if its is loop:
            yield from of(owner)


def _epoll_of(loop: Any) -> int:
    number: int = loop._selector.fileno() if hasattr(loop, "_selector") else loop._get_backend_id()
    return number


def _registered_with(loop: asyncio.AbstractEventLoop) -> set[int]:
    with open(f"/proc/self/fdinfo/{_epoll_of(loop)}") as lines:
        return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def _sockets_of(loop: asyncio.AbstractEventLoop) -> Iterator[int]:
    """All sockets except listening ones: a program that forks after it listens wants its children to accept."""
    found = set[int]() if loop.is_closed() else _registered_with(loop)
    for transport in getattr(loop, "_transports", {}).values():  # asyncio's, even those that are not reading now
        found.add(transport.get_extra_info("socket").fileno())
    for descriptor in found:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as same:
                    listens = same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if not listens:
                    yield descriptor


def _lead_nowhere(descriptors: Iterable[int]) -> None:
    """Replace descriptors by a socket without a peer. They are not closed: the next file would get a free number, and
    the former owner would close that file. Sending fails. Polling works, since libuv aborts a process in which a
    descriptor cannot be polled."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nothing:
        nothing.setblocking(False)
        for descriptor in descriptors:
            if descriptor >= 0:
                os.dup2(nothing.fileno(), descriptor, inheritable=False)


def _give_own_epoll(loop: asyncio.AbstractEventLoop) -> None:
    """Give the child's loop an epoll of its own. In the shared one, closing a descriptor here would remove the parent's
    registration, which has the same number."""
    with select.epoll() as own:
        for descriptor in _registered_with(loop):
            own.register(descriptor, 0)
        os.dup2(own.fileno(), _epoll_of(loop), inheritable=False)
