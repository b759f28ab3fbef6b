"""Waiting for a rival (J5): a run that holds the key of a message. Imported by the first that waits (P10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_delay, wait_exponential, wait_random
from tenacity.stop import stop_base

from idemconsumer.rules.values import Outcome, OutcomeKind


class _Abandoned(stop_base):
    """Once the broker has taken the delivery back (D10)."""

    def __init__(self, abandoned: Callable[[], bool]) -> None:
        self._abandoned = abandoned

    def __call__(self, retry_state: RetryCallState) -> bool:
        return self._abandoned()


async def outlive(
    again: Callable[[], Awaitable[Outcome]], busy: Outcome, seconds: float, abandoned: Callable[[], bool]
) -> Outcome:
    """What `again` comes to when the rival has ended. `busy`: it has not within `seconds`, or the delivery is
    `abandoned`."""
    polling = AsyncRetrying(
        retry=retry_if_result(lambda outcome: outcome.kind is OutcomeKind.BUSY),
        wait=wait_exponential(multiplier=0.05, max=1.0) + wait_random(0, 0.05),
        stop=stop_after_delay(seconds) | _Abandoned(abandoned),
        retry_error_callback=lambda polled: busy,
    )
    outcome: Outcome = await polling(again)
    return outcome
