"""The header of a message that one saga has sent to begin another: which of its starts was the first (L80)."""

from __future__ import annotations

from typing import Final

from idemconsumer.message.message import Message

PARENT: Final = "idemconsumer-parent"


def parent_of(message: Message) -> bytes | None:
    """The stored key of the saga that began this one. Only a message of a handler's own queue says so."""
    given = message.headers.get(PARENT)
    if not isinstance(given, str) or not message.source.startswith("postgres:~"):
        return None
    try:
        return bytes.fromhex(given)
    except ValueError:
        return None
