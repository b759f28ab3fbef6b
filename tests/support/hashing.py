"""Processes that hash in different ways, one after the other in this one (R38, R39)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from idemconsumer.hashing import HASHING, Hashing

SECRET, OTHER = "s" * 32, "o" * 32


def begin(listed: str | None = None) -> None:
    """Another process, with these `key_secrets`."""
    go_on(Hashing())
    HASHING.obey(listed)


def go_on(process: Hashing) -> None:
    """Hash as that one does."""
    vars(HASHING).update(vars(process))


def left() -> Hashing:
    """How this process hashes, to go on with later."""
    process = Hashing()
    vars(process).update(vars(HASHING))
    return process


@contextmanager
def restored() -> Iterator[None]:
    """As a process that has just begun; and as before at the end."""
    before = left()
    begin()
    yield
    go_on(before)
