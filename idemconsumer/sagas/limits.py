"""What a step says of its own limits: its time, its attempts and the pauses between them (L45)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from idemconsumer.errors import HandlerError, SagaMisused
from idemconsumer.handlers.options import resolve
from idemconsumer.ports.handler import Duration
from idemconsumer.rules.backoff import Backoff


@dataclass(frozen=True, slots=True)
class OwnLimits:
    """`timeout` in seconds. None: as the handler says."""

    timeout: float | None = None
    max_attempts: int | None = None
    backoff: Backoff | None = None


NONE: Final = OwnLimits()


def own_limits(
    step: object,
    *,
    timeout: Duration | None,
    max_attempts: int | None,
    backoff: Backoff | tuple[Duration, Duration] | str | None,
    most: float | None = None,
) -> OwnLimits:
    """Check them as the handler's options are checked. `most`: the handler's `timeout` where a step may not have more.
    Raises SagaMisused."""
    if timeout is None and max_attempts is None and backoff is None:
        return NONE
    given: dict[str, Any] = {"timeout": timeout, "max_attempts": max_attempts, "backoff": backoff}
    given = {option: value for option, value in given.items() if value is not None}
    try:
        read = resolve("", given)
    except HandlerError as error:
        raise SagaMisused(f"step {step!r}: {error.problem}; {error.instead}") from None
    own = OwnLimits(**{option: getattr(read, option) for option in given})
    if most is not None and own.timeout is not None and own.timeout > most:
        raise SagaMisused(
            f"step {step!r}: `timeout` is {own.timeout:g} s, but a step in a transaction holds locks and is limited to "
            f"its handler's, {most:g} s; raise the handler's, or do the slow part in a step with saga.call"
        )
    return own
