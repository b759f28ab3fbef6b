"""The messages that a session has received and not yet deleted or returned. Pure: arrivals in, deletions out.

A message may arrive again while an earlier arrival of it is still in flight (its visibility ran out, or a standard
queue delivered it twice). Only its latest receipt handle is sure to delete it: with an older one the service may report
success and delete nothing. So messages are identified by their id, and the handle is looked up when it is used.

The messages of a FIFO group are deleted only as a finished prefix (A5). Deleting the third while the second is returned
would deliver the second after the third.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    handle: str
    group: str | None
    until: float
    arrivals: int = 1  # in flight, neither finished nor returned
    finished: bool = False
    due: bool = False  # passed on for deletion
    lapsed: bool = False  # visible to others again


class Received:
    """The messages of one session. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, message: str) -> bool:
        return message in self._entries

    def arrive(self, message: str, handle: str, group: str | None, until: float) -> None:
        """Record an arrival that is invisible to others `until` then. `group` is given in FIFO queues."""
        entry = self._entries.get(message)
        if entry is None:
            self._entries[message] = _Entry(handle, group, until)
            if group is not None:
                self._groups.setdefault(group, {})[message] = None
        else:
            entry.handle, entry.until, entry.lapsed = handle, until, False
            entry.arrivals += 1

    def finish(self, messages: Iterable[str]) -> list[str]:
        """Mark messages as finished; returns those to delete now, in order. Messages that are not held are ignored."""
        due: list[str] = []
        for message in messages:
            entry = self._entries.get(message)
            if entry is None or entry.arrivals == 0:
                continue
            entry.arrivals -= 1
            entry.finished = True
            due += [message] if entry.group is None else self._prefix(entry.group)
        fresh = [message for message in dict.fromkeys(due) if not self._entries[message].due]
        for message in fresh:
            self._entries[message].due = True
        return fresh

    def _prefix(self, group: str) -> list[str]:
        prefix: list[str] = []
        for message in self._groups[group]:
            if not self._entries[message].finished:
                break
            prefix.append(message)
        return prefix

    def handles(self, messages: Iterable[str]) -> dict[str, str]:
        """The latest handle of each message."""
        return {message: self._entries[message].handle for message in messages if message in self._entries}

    def deleted(self, used: Mapping[str, str]) -> list[str]:
        """Record a deletion that was tried with these handles, successfully or not; returns what to delete again.

        A message that arrived in between has a newer handle: the deletion may have done nothing.
        """
        again: list[str] = []
        for message, handle in used.items():
            if (entry := self._entries.get(message)) is None:
                continue
            if entry.arrivals:
                entry.finished = entry.due = False
            elif entry.handle != handle:
                again.append(message)
            else:
                self._drop(message)
        return again

    def give_back(self, messages: Iterable[str]) -> list[str]:
        """Return messages that never started; returns those that can be made visible. A finished message stays
        finished."""
        given: list[str] = []
        for message in messages:
            if (entry := self._entries.get(message)) is None or entry.arrivals == 0:
                continue
            entry.arrivals -= 1
            if entry.arrivals == 0 and not entry.finished:
                given.append(message)
        return given

    def forget(self, messages: Iterable[str]) -> None:
        """Forget messages that were returned to the broker."""
        for message in messages:
            if message in self._entries:
                self._drop(message)

    def rest(self) -> list[str]:
        """All messages, in the order of arrival."""
        return list(self._entries)

    def expiring(self, before: float) -> list[str]:
        """The messages that become visible to others before that time."""
        return [message for message, entry in self._entries.items() if entry.until < before and not entry.lapsed]

    def extended(self, used: Mapping[str, str], refused: Collection[str], until: float) -> None:
        """Record the answer to an extension with these handles.

        A message that the broker refused is delivered again, here or elsewhere. A message that arrived in between has a
        newer handle, which the answer does not cover.
        """
        for message, handle in used.items():
            if (entry := self._entries.get(message)) is None or entry.handle != handle:
                continue
            if message in refused:
                entry.lapsed = True
            else:
                entry.until = until

    def _drop(self, message: str) -> None:
        group = self._entries.pop(message).group
        if group is not None:
            del self._groups[group][message]
            if not self._groups[group]:
                del self._groups[group]
