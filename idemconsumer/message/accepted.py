"""The header of a message that was accepted and goes by its handler's own broker: which record waits for it (H46)."""

from __future__ import annotations

from typing import Final

from idemconsumer.message.message import Message

ACCEPTED: Final = "idemconsumer-accepted"
TOKEN_BYTES: Final = 16


def token_of(message: Message) -> bytes | None:
    """What nobody can guess, and only the message and its record have. None where it has none, or something else under
    that name."""
    given = message.headers.get(ACCEPTED)
    if given is None:
        return None
    try:
        token = bytes.fromhex(given if isinstance(given, str) else given.decode())
    except ValueError:
        return None
    return token if len(token) == TOKEN_BYTES else None
