"""Leaves the consumer groups of a worker that was killed; its launcher does so on its behalf (K15)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from idemconsumer.settings import Settings

_LEAVING: Final = "idemconsumer.brokers.kafka.membership"


def prepare_to_leave() -> None:
    """Import what `leave_for` needs, which takes most of its time."""
    import_module(_LEAVING)


async def leave_for(settings: Settings, members: Mapping[str, str]) -> None:
    """Leave the groups of a worker that has died. `members`: its member ids by group. Raises BrokerUnavailable."""
    await import_module(_LEAVING).leave(settings, members)
