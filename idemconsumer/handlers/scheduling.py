"""Checks that a saga accepts the payloads of its schedule (L53)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.rules.schedules import Schedule


def check_slots(schedule: Schedule, handlers: Iterable[BoundHandler], now: datetime) -> None:
    """Raises ConfigurationError if every slot would become a dead letter. Only the next slot is tried, since a payload
    type may refuse times in the past."""
    handler = next(each for each in handlers if each.name == schedule.handler)
    slot = next(schedule.slots(now), now)
    try:
        handler.from_code(schedule.payload(slot), key=schedule.key(slot), tenant=None)
    except BadMessage as error:
        raise ConfigurationError(
            f"schedule {schedule.name!r}: {handler.name!r} cannot take what a slot gives it, "
            f'{{"schedule": "{schedule.name}", "slot": "{slot:%Y-%m-%dT%H:%M:%SZ}"}}: {error}; let its payload be '
            "dict[str, str], or a Struct with `schedule: str` and `slot: datetime`, and let `tenant` read nothing else"
        ) from None
