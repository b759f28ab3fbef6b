"""What a worker's launcher does for it if it is killed: leave the consumer groups of which it was a member (K15)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from idemconsumer.settings import Settings

_LEAVING: Final = "idemconsumer.brokers.kafka.membership"


def prepare_to_leave() -> None:
    """Import what `leave_for` takes, which is most of its time."""
    import_module(_LEAVING)


async def leave_for(settings: Settings, members: Mapping[str, str]) -> None:
    """Leave for a worker that has died. `members`: its ids by group. Raises BrokerUnavailable."""
    await import_module(_LEAVING).leave(settings, members)
