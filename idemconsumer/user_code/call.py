"""The one way to call a user's function, in both modes: limited in time, cancelled only from outside, blamed for
itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from idemconsumer import forks
from idemconsumer.errors import Contention, HandlerFault, IdemConsumerError, OfTheEngine, SelfCancelled
from idemconsumer.handlers.arguments import Tx
from idemconsumer.redaction import typed_text
from idemconsumer.rules.habits import Habits
from idemconsumer.user_code.cancellation import EXITS, CancellationWatch, from_cancellation
from idemconsumer.user_code.time_limit import TimeLimit

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)


class OpenTransaction(Protocol):
    """An open transaction in which a user's function may run; only the store can seal and commit it."""

    def tx(self, habits: Habits | None = None) -> Tx:
        """A Tx for one handler. The next call ends this Tx.

        With `habits`, statements may be pipelined (J26). Then the handler's calls, and every method here but
        `diagnose`, may raise RunEagerly.
        """

    def check(self, *, look: bool = False) -> None:
        """To be called after each handler.

        Raises HandlerFault if the handler left the transaction failed, or left a task at work in it; GuardViolated if
        it ended the transaction; StoreUnavailable if the connection is known to be lost. `look`: also read what the
        server has sent unasked.
        """

    async def restore(self) -> None:
        """To be called after `check`: undo what the handler may have changed in the session beyond this transaction."""

    async def settled(self, *, late: bool) -> None:
        """To be called when the function has failed. Raises RunEagerly if a pipelined statement had failed before that.

        `late`: its time is over. Then a statement still at work on the server is cancelled and counts as failed, and
        RunEagerly is raised if part of that time was spent waiting for other messages' pipelined statements.
        """

    async def waits_for_lock(self) -> bool:
        """Whether the server reports, right now, that a statement of the handler waits for a lock. Asked on another
        connection, within a second; no answer counts as no."""

    def diagnose(self, error: Exception) -> Exception:
        """The real cause of an error that a handler raised: StoreUnavailable, Contention, or the handler's own."""


class _Question:
    """Once the time of `limit` is over, asks the server whether the function waits for a lock, while it still does;
    then lets `timer` cut the function off (B14: waiting for a lock costs no attempt)."""

    __slots__ = ("_asking", "_handle", "_limit", "_opened", "_timer")

    def __init__(self, opened: OpenTransaction, limit: TimeLimit, timer: asyncio.Timeout) -> None:
        self._opened = opened
        self._limit = limit
        self._timer = timer
        self._asking: asyncio.Task[None] | None = None
        self._handle = asyncio.get_running_loop().call_later(limit.seconds, self._begin)

    def _begin(self) -> None:
        self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        self._limit.locked_out = await self._opened.waits_for_lock()
        self._timer.reschedule(asyncio.get_running_loop().time())

    def withdraw(self) -> None:
        self._handle.cancel()
        if self._asking is not None:
            self._asking.cancel()


async def call_user_code(
    run: Awaitable[T], limit: TimeLimit, opened: OpenTransaction | None = None, *, forget: bool = True
) -> T:
    """Await a user's function within `limit`. A late result is returned too, for `limit.check` to refuse (J14).

    `opened` is the transaction that the function runs in. `forget`: withdraw a cancellation that the function has
    swallowed.

    Raises what the function raises, except:
    - CancelledError if this task was cancelled from outside, even if the function turned that into another error (J13);
      a function that swallows the cancellation and returns has returned;
    - the limit's TimeoutError if the function was cut off: how far it got is unknown then;
    - SelfCancelled for a CancelledError of the function's own;
    - HandlerFault for anything that is not an Exception (B18).

    An error class of ours that the function raises is marked as the function's own (B12).
    """
    outside = CancellationWatch()
    timer = asyncio.timeout(limit.seconds if opened is None else None)
    question = None if opened is None else _Question(opened, limit, timer)
    try:
        async with timer:
            try:
                with forks.never_in_a_child():  # O27
                    value = await run
            finally:
                if question is not None:
                    question.withdraw()
    except asyncio.CancelledError as error:
        if outside.requested:
            raise
        raise SelfCancelled().with_traceback(error.__traceback__) from None
    except Exception as error:
        if outside.requested and from_cancellation(error):
            raise asyncio.CancelledError from error
        outside.withdraw()
        if timer.expired() and (isinstance(error, TimeoutError) or from_cancellation(error)):
            cut = error.__cause__ or error  # its traceback shows where the function was
            raise limit.exceeded().with_traceback(cut.__traceback__) from None
        mark(error)
        raise
    except OfTheEngine:
        raise
    except BaseException as error:  # else it would end its lane, and so the worker
        if (ours := _of_the_engine(error)) is not None:
            raise ours from error
        outside.withdraw()
        raise mark(exit_refused(error)) from error
    finally:
        limit.cut_off = timer.expired()
    if forget:
        outside.withdraw()
    return value


def _of_the_engine(error: BaseException) -> OfTheEngine | None:
    """The engine's own exception, also inside an exception group such as a TaskGroup raises."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, OfTheEngine) else None
    return next((found for each in error.exceptions if (found := _of_the_engine(each)) is not None), None)


async def call_in_transaction(
    opened: OpenTransaction, run: Awaitable[Any], limit: TimeLimit, accept: Callable[[Any], R], *, forget: bool = True
) -> R:
    """`call_user_code` in a transaction of the store. Returns what `accept` makes of the function's value.

    `accept` checks the transaction (`opened.check()`) and encodes. An error of either is raised as what it really is:
    StoreUnavailable, Contention, the limit's TimeoutError, or the function's own. After a success the engine restores
    the session (J21); if the server does not answer that, the function is not to blame (B5).
    """
    try:
        value = await call_user_code(run, limit, opened, forget=forget)
        limit.check()
        accepted = accept(value)
    except Exception as error:
        await opened.settled(late=limit.over)  # J27: what was pipelined decides nothing
        cause = limit.blame(opened.diagnose(error))
        if limit.locked_out and limit.caused(cause):
            raise Contention("it timed out while waiting for a lock") from error
        if cause is error:
            mark(error)
            raise
        raise cause from error
    except (asyncio.CancelledError, OfTheEngine):
        raise
    except BaseException as error:  # what encodes its value is the user's code too (B18)
        raise mark(exit_refused(error)) from error
    await opened.restore()
    return accepted


async def without_exit(run: Awaitable[T]) -> T:
    """As `run`, for a task of its own: there a SystemExit would end the event loop before any caller could catch it."""
    try:
        with forks.never_in_a_child():
            return await run
    except EXITS as error:
        raise exit_refused(error) from error


def exit_refused(error: BaseException) -> HandlerFault:
    """The failure of a function that tried to end the process (B18): otherwise it would end each worker, and never be
    counted."""
    why = (
        "only its launcher ends a worker"
        if isinstance(error, EXITS)
        else "that is not an Exception, so it would end a worker"
    )
    fault = HandlerFault(f"it raised {typed_text(error)}, and {why}; raise another exception")
    return fault.with_traceback(error.__traceback__)


def mark(error: E) -> E:
    """Mark an error class of ours as raised by a user's function, whatever its type says (B12)."""
    if isinstance(error, IdemConsumerError):
        error.by_function = True
    return error
