"""What a worker's launcher does for it if it is killed: leave the consumer groups of which it was a member (K15).

The worker writes its memberships into a pipe that only its launcher reads, one whole line after each change.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from importlib import import_module
from os import write
from typing import Final

from idemconsumer import forks
from idemconsumer.settings import Settings

VARIABLE: Final = "IDEMCONSUMER_LAST_WILL"  # the pipe's file descriptor, in a worker's environment
_LEAVING: Final = "idemconsumer.brokers.kafka.leaving"
_MOST: Final = 4096  # bytes that a pipe takes in one piece


class LastWill:
    """The memberships of this process. Without a launcher nothing is written."""

    def __init__(self) -> None:
        self._members: dict[str, str] = {}
        self._descriptor: int | None = None

    def address(self, descriptor: int) -> None:
        self._descriptor = descriptor
        forks.not_inherited(self, lambda _: [descriptor])

    def joined(self, group: str, member: str) -> None:
        self._change({**self._members, group: member})

    def left(self, group: str) -> None:
        self._change({other: member for other, member in self._members.items() if other != group})

    def _change(self, members: dict[str, str]) -> None:
        if members == self._members:
            return
        self._members = members
        line = json.dumps(members).encode() + b"\n"
        if self._descriptor is not None and len(line) <= _MOST:
            with contextlib.suppress(OSError):  # the launcher is gone
                write(self._descriptor, line)


WILL: Final = LastWill()


def memberships(written: bytes) -> Mapping[str, str]:
    """Member ids by group, as the last whole line says."""
    lines = written.rpartition(b"\n")[0].split(b"\n")
    return dict(json.loads(lines[-1])) if lines[-1] else {}


def prepare_to_leave() -> None:
    """Import what `leave_for` takes, which is most of its time."""
    import_module(_LEAVING)


async def leave_for(settings: Settings, written: bytes) -> None:
    """Execute the last will of a worker that has died, as it was written. Raises BrokerUnavailable."""
    if members := memberships(written):
        await import_module(_LEAVING).leave(settings, members)
