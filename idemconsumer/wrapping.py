"""The data key with which a schema hashes, wrapped by a secret for storage (R39).

Encrypt-then-MAC from HMAC-SHA256 alone. The data key is as long as one HMAC, so the HMAC of a random nonce serves as
its pad. Pad and tag have separate keys, each derived from the secret.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from secrets import token_bytes
from typing import Final

_LENGTH: Final = 32  # bytes, the size of one HMAC-SHA256
_NONCE: Final = 16


def new_key() -> bytes:
    """A random data key."""
    return token_bytes(_LENGTH)


def wrap(secret: bytes, key: bytes) -> bytes:
    """The wrapped key: 80 bytes, different at each call. The secret must not be guessable."""
    nonce = token_bytes(_NONCE)
    hidden = _padded(secret, nonce, key)
    return nonce + hidden + _tag(secret, nonce + hidden)


def unwrap(secret: bytes, wrapped: bytes) -> bytes | None:
    """The key; None if another secret has wrapped it, or if it was changed."""
    sealed, tag = wrapped[:-_LENGTH], wrapped[-_LENGTH:]
    if len(wrapped) != _NONCE + 2 * _LENGTH or not hmac.compare_digest(_tag(secret, sealed), tag):
        return None
    return _padded(secret, sealed[:_NONCE], sealed[_NONCE:])


def _padded(secret: bytes, nonce: bytes, text: bytes) -> bytes:
    pad = hmac.digest(_derived(secret, b"pad"), nonce, sha256)
    return bytes(one ^ other for one, other in zip(text, pad, strict=True))


def _tag(secret: bytes, sealed: bytes) -> bytes:
    return hmac.digest(_derived(secret, b"tag"), sealed, sha256)


def _derived(secret: bytes, what: bytes) -> bytes:
    return hmac.digest(secret, b"idemconsumer data key: " + what, sha256)
