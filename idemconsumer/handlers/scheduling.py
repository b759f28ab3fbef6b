"""Whether a saga takes what the slots of its schedule give it (L53)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.rules.schedules import Schedule

_SLOT: Final = datetime(2000, 1, 1, tzinfo=UTC)


def check_slots(schedule: Schedule, handlers: Iterable[BoundHandler]) -> None:
    """Raises ConfigurationError where each slot would be a dead letter."""
    handler = next(each for each in handlers if each.name == schedule.handler)
    given = schedule.payload(_SLOT)
    try:
        handler.from_code(given, key=schedule.key(_SLOT), tenant=None)
    except BadMessage as error:
        raise ConfigurationError(
            f"schedule {schedule.name!r}: {handler.name!r} cannot take what a slot gives it, "
            f'{{"schedule": "{schedule.name}", "slot": "2000-01-01T00:00:00Z"}}: {error}; let its payload be '
            "dict[str, str], or a Struct with `schedule: str` and `slot: datetime`, and let `tenant` read nothing else"
        ) from None
