"""From an act of ours that has decided nothing yet to what it comes to: the answer to its COMMIT was lost (J4), or a
rival has its key (J5). The one place that answers either."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from idemconsumer.errors import CommitUnknown, Contention

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

_FIRST: Final = 0.05  # seconds until a rival's key is claimed again; doubled up to
_LONGEST: Final = 1.0


def contended(met: object) -> bool:
    """For `busy`, of an act that raises when a rival has its key."""
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
    """What `act` comes to, done again for as long as nothing is decided. Raises what it raises.

    Where the answer to its COMMIT was lost it is done again at once, and asks its record thereby: it claims its key, or
    writes behind a token, and so it finds what is committed. `ask` is called before, and may have the answer already.

    Without `within` the caller can ask at any later time, so whatever else is raised is raised as it is. With it
    somebody waits to be told: what is not known so many seconds after the first loss is CommitUnknown, and so is what
    an error of `asking` prevents from being known, since that does not say that nothing is stored.

    `busy` says of what `act` returned or raised whether a rival has the key. It is done again until that has ended, for
    `wait` seconds at most; then that is what it comes to.
    """
    clock = asyncio.get_running_loop().time
    until, told_by = clock() + wait, math.inf
    doubt: CommitUnknown | None = None

    async def known() -> T | Exception:
        """An error is one that is `busy`."""
        nonlocal until, told_by, doubt
        while True:
            try:
                return await act()
            except CommitUnknown as lost:
                if lost.by_function or clock() >= told_by:  # a function's own says nothing about our store (B12)
                    raise
                if within is not None:
                    if doubt is None:  # only from now on: it may have taken long to notice the loss
                        told_by = clock() + within
                        until = max(until, told_by)
                    else:  # what ends the connection each time does so at once, perhaps
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
        # Imported by the first that waits (P10).
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
