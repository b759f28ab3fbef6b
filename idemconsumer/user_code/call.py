"""One way to call a user's function, in both modes: limited in time, cancelled only from outside, blamed for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from idemconsumer.errors import SelfCancelled
from idemconsumer.ports.store import OpenTransaction
from idemconsumer.user_code.cancellation import CancellationWatch, from_cancellation
from idemconsumer.user_code.time_limit import TimeLimit

T = TypeVar("T")
R = TypeVar("R")


async def call_user_code(run: Awaitable[T], limit: TimeLimit) -> T:
    """Await a user's function within `limit`. A late result is returned too: `limit.check` finds it (J14).

    Raises what the function raises, except:
    * CancelledError if this task was cancelled from outside, also if the function made another error of that (J13);
      what swallows the cancellation and returns has returned;
    * the limit's TimeoutError if it was cut off: how far it got is not known then;
    * SelfCancelled for a CancelledError of its own making.
    """
    outside = CancellationWatch()
    timer = asyncio.timeout(limit.seconds)
    try:
        async with timer:
            value = await run
    except asyncio.CancelledError as error:
        if outside.requested:
            raise
        raise SelfCancelled().with_traceback(error.__traceback__) from None
    except Exception as error:
        if outside.requested and from_cancellation(error):
            raise asyncio.CancelledError from error
        outside.withdraw()
        if timer.expired() and (isinstance(error, TimeoutError) or from_cancellation(error)):
            cut = error.__cause__ or error  # its traceback tells where the function was
            raise limit.exceeded().with_traceback(cut.__traceback__) from None
        raise
    finally:
        limit.cut_off = timer.expired()
    outside.withdraw()
    return value


async def call_in_transaction(
    opened: OpenTransaction, run: Awaitable[Any], limit: TimeLimit, accept: Callable[[Any], R]
) -> R:
    """`call_user_code`, inside a transaction of the store: returns what `accept` makes of the function's value.

    `accept` checks the transaction (`opened.check()`) and encodes. An error that leaves the function or `accept` is
    raised as what it really is: StoreUnavailable, Contention, the limit's TimeoutError, or the function's own.
    """
    try:
        value = await call_user_code(run, limit)
        limit.check()
        return accept(value)
    except Exception as error:
        cause = limit.blame(opened.diagnose(error))
        if cause is error:
            raise
        raise cause from error
