"""Repeats an act of ours until it is decided: the answer to its COMMIT was lost (J4), or a rival (another worker) holds
its key (J5). The one place that handles either."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from idemconsumer.errors import CommitUnknown, Contention

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

_FIRST: Final = 0.05  # seconds until a rival's key is claimed again; doubled each time, up to
_LONGEST: Final = 1.0


def contended(met: object) -> bool:
    """For `busy`, with an act that raises Contention when a rival holds its key."""
    return isinstance(met, Contention)


async def decided(
    act: Callable[[], Awaitable[T]],
    ask: Callable[[CommitUnknown], Awaitable[T | None]] | None = None,
    *,
    wait: float = 0.0,
    busy: Callable[[object], bool] = lambda _: False,
    within: float | None = None,
    asking: tuple[type[Exception], ...] = (Exception,),
) -> T:
    """Repeat `act` until something is decided. Returns its result; raises what it raises.

    If the answer to its COMMIT was lost, it is repeated at once. That also reads what was committed, since the act
    claims its key, or writes under a token. `ask` is called first, and may know the answer already.

    Without `within` the caller can ask again at any later time, so any other error is raised as it is. With `within` a
    caller waits for the answer. Then CommitUnknown is raised if the answer is not known that many seconds after the
    first loss, or if an error of the types `asking` prevents that, since such an error does not mean that nothing is
    stored.

    `busy` says whether a result or an error of `act` means that a rival holds the key. Then it is repeated until the
    rival has ended, for `wait` seconds at most; after that the result or error stands.
    """
    clock = asyncio.get_running_loop().time
    until, told_by = clock() + wait, math.inf
    doubt: CommitUnknown | None = None

    async def known() -> T | Exception:
        """The result; an error is returned only if it is `busy`."""
        nonlocal until, told_by, doubt
        while True:
            try:
                return await act()
            except CommitUnknown as lost:
                if lost.by_function or clock() >= told_by:  # B12: a function's own error says nothing about our store
                    raise
                if within is not None:
                    if doubt is None:  # counted from now on: the loss may have been noticed late
                        told_by = clock() + within
                        until = max(until, told_by)
                    else:  # perhaps it ends the connection each time, and does so at once
                        await asyncio.sleep(_FIRST)
                    doubt = lost
                if ask is not None and (answer := await ask(lost)) is not None:
                    return answer
            except asking as failed:
                if busy(failed):
                    return failed
                if doubt is None or getattr(failed, "by_function", False):
                    raise
                raise doubt from failed

    met = await known()
    if busy(met) and clock() < until:
        # Imported only by a process that waits (P10: start quickly).
        from tenacity import AsyncRetrying, retry_if_result, wait_exponential, wait_random

        pauses = wait_exponential(multiplier=_FIRST, max=_LONGEST) + wait_random(0, _FIRST)

        def pause(looks: RetryCallState) -> float:
            return min(pauses(looks), max(0.0, until - clock()))

        def over(_: RetryCallState) -> bool:
            return clock() >= until

        polling = AsyncRetrying(retry=retry_if_result(busy), wait=pause, stop=over, retry_error_callback=_last)
        await asyncio.sleep(min(_FIRST, until - clock()))
        met = await polling(known)
    if busy(met) and doubt is not None:
        raise doubt from (met if isinstance(met, Exception) else None)
    if isinstance(met, Exception):
        raise met
    return met


def _last(looks: RetryCallState) -> Any:
    assert looks.outcome is not None
    return looks.outcome.result()
