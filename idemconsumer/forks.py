"""What belongs to one process and one event loop, and what becomes of it in another one (O25 to O28).

A fork copies every object and shares every socket. If a child closed its copy as usual, libpq would say goodbye in the
name of the parent, and an event loop would take the socket out of the epoll that both have. So in a child each
descriptor of ours leads nowhere from its first moment on: its number stays taken, whatever object still has it may
close it, and the server notices the parent's end although the child lives.
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


# --------------------------------------------------------------------------------------------------------------- to say
def not_inherited(owner: T, descriptors: Callable[[T], Iterable[int]]) -> None:
    """In a child that is forked while `owner` lives, what `descriptors` says of it then leads nowhere. Also once its
    event loop, that which runs now, is known to have been closed."""
    loop = None
    with suppress(RuntimeError):  # a thread without one
        loop = asyncio.get_running_loop()
    _owners[owner] = loop, descriptors


def use_loop() -> None:
    """The running loop has sockets of ours. A child gets none of what is registered with it, whosever that is: it
    cannot run that loop."""
    _loops.add(asyncio.get_running_loop())


def use_worker_loop(*signals: signal.Signals) -> None:
    """As `use_loop`. A child that comes back to the running loop leaves at once, and is ended by these signals: else
    it would do again whatever the loop has in hand, and its SIGTERM would be read by its parent."""
    use_loop()
    _workers[asyncio.get_running_loop()] = signals


def count() -> int:
    """A socket is not ours before it is connected: who has made one looks here whether a child has it too."""
    return _begun


class never_in_a_child:  # noqa: N801 - as those of contextlib
    """Code of a user's runs inside. A child that was forked there and comes out of it, however that is, ends at once:
    it would go on with its parent's transaction. After SystemExit with that code, else with 1."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _generation

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if _generation != self._before:
            leave(error)


def leave(error: BaseException | None = None) -> NoReturn:
    """End this process, which is a child, without running anything that is its parent's. `error` is what it came out of
    a user's code with; else what is being handled now."""
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
    """What `make` returns, once for each event loop of this process; given to `end` as that loop ends (O26)."""

    def __init__(self, make: Callable[[], T], end: Callable[[T], Awaitable[None]]) -> None:
        self._make, self._end = make, end
        self._there: dict[asyncio.AbstractEventLoop, tuple[int, T, AsyncGenerator[None]]] = {}

    def here(self) -> T:
        """That of the running loop. What other loops have stays with them, unless they are closed: they may run in
        other threads. Raises ConfigurationError in a child that goes on with its parent's loop."""
        loop = asyncio.get_running_loop()
        if (found := self._there.get(loop)) is None:
            self._drop_closed()
            use_loop()
            its = self._make()
            ending = self._kept(loop, its)
            with suppress(StopIteration):  # it stands at its `yield`, and the loop knows it
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
        """Returns what the running loop had, for who closes it. Nothing of a parent's."""
        self._drop_closed()
        generation, its, ending = self._there.pop(asyncio.get_running_loop(), (_generation, None, None))
        if ending is not None:
            with suppress(StopIteration):  # it has nothing to wait for any more
                ending.aclose().send(None)
        return its if generation == _generation else None

    async def _kept(self, loop: asyncio.AbstractEventLoop, its: T) -> AsyncGenerator[None]:
        """Who ends a loop finishes its asynchronous generators, behind its tasks: `shutdown_asyncgens`."""
        generation = _generation
        try:
            yield
        finally:
            if self._there.pop(loop, None) is not None and generation == _generation:
                await self._end(its)

    def _drop_closed(self) -> None:
        """Nobody can use or close what is left there, and until it is collected the servers have its sessions."""
        for closed in [each for each in self._there.copy() if each.is_closed()]:
            self._there.pop(closed, None)
            _lead_nowhere([*_owned_in(closed), *_sockets_of(closed)])


# ------------------------------------------------------------------------------------------------------------ at a fork
def _before() -> None:
    global _begun
    _begun += 1
    # One that comes before the child has its own handlers would be the parent's.
    blocked = {number for signals in list(_workers.values()) for number in signals}
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)


def _after() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _in_child() -> None:
    global _generation
    _generation += 1
    descriptors = set[int]()
    for owner, _, of in _all():
        with suppress(Exception):  # whatever state its driver was in: the others have to be let go of too
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
                loop._ready.rotate(1)  # type: ignore[attr-defined]  # before what is ready too, which uvloop does not let us
    if _owners or _loops:  # else nothing of ours is in this process, which may do as it likes
        with suppress(Exception):
            _end_with_its_thread()
    _owners.clear()
    _loops.clear()
    _workers.clear()
    _after()


class _Nobody:
    """To whom a thread of a pool tells, in a child, what its function has come to. It would then wait there for more
    to do, for ever, or do what its parent's pool has in hand."""

    def set_result(self, result: object) -> NoReturn:  # a future of concurrent.futures
        leave()

    def set_exception(self, error: BaseException) -> NoReturn:
        leave(error)

    def call_soon_threadsafe(self, report: object, future: object, result: object, error: BaseException) -> NoReturn:
        leave(error)  # anyio's event loop, as FastAPI has it for its `def` endpoints

    def is_closed(self) -> bool:
        return False


def _end_with_its_thread() -> None:
    """The thread that has forked is the only one of the child, which ends as soon as its function does (O27)."""
    thread: Any = threading.current_thread()
    thread._invoke_excepthook = lambda _: leave()
    thread._delete = leave
    if type(thread).__module__.startswith("anyio."):
        thread.loop = _Nobody()
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code is _WorkItem.run.__code__:  # of a ThreadPoolExecutor, such as that of asyncio.to_thread
            frame.f_locals["self"].future = _Nobody()


def _come_back(task: asyncio.Task[Any] | None) -> NoReturn:
    leave(task.exception() if task is not None and task.done() and not task.cancelled() else None)


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)


def _all() -> Iterator[tuple[object, asyncio.AbstractEventLoop | None, _Descriptors]]:
    for reference in _owners.keyrefs():  # a list, since other threads connect meanwhile
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
    """But for those that listen: whoever forks after listening means its children to accept."""
    found = set[int]() if loop.is_closed() else _registered_with(loop)
    for transport in getattr(loop, "_transports", {}).values():  # asyncio's; those too of which nothing is read now
        found.add(transport.get_extra_info("socket").fileno())
    for descriptor in found:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as same:
                    listens = same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if not listens:
                    yield descriptor


def _lead_nowhere(descriptors: Iterable[int]) -> None:
    """Not closed: a number that is free is given to the next file, and closed there by whoever had it before. What is
    sent there fails. It can be polled, since libuv aborts a process in which something cannot."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nothing:
        nothing.setblocking(False)
        for descriptor in descriptors:
            if descriptor >= 0:
                os.dup2(nothing.fileno(), descriptor, inheritable=False)


def _give_own_epoll(loop: asyncio.AbstractEventLoop) -> None:
    """What is closed here would be taken out of the parent's, under the number that it has in both."""
    with select.epoll() as own:
        for descriptor in _registered_with(loop):
            own.register(descriptor, 0)
        os.dup2(own.fileno(), _epoll_of(loop), inheritable=False)
