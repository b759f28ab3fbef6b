"""PENDING records that wait for one message from their handler's own broker, which its claim takes (H46)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Final, TypeVar

from idemconsumer.ports.store import Claim
from idemconsumer.rules.values import Mark, Record, State

TAKE_ACCEPTED: Final = "take_accepted"

T = TypeVar("T")


def taking(claims: Sequence[Claim]) -> tuple[str, dict[str, Any]] | None:
    """The statement that makes room for those with a token; what it returns is awaited. None: there are none."""
    accepted = [claim for claim in claims if claim.token is not None and not claim.pending]
    if not accepted:
        return None
    return TAKE_ACCEPTED, {
        "keys": [claim.key for claim in accepted],
        "tokens": [claim.token for claim in accepted],
        "fingerprints": [claim.fingerprint for claim in accepted],
        "canonicals": [claim.canonical for claim in accepted],
    }


def in_hand(key: bytes, found: T | Record | Mark, awaited: Container[bytes]) -> T | Record | Mark:
    """What a claim has found. A record that waits for this very message and is PENDING still is locked by somebody: to
    take the message for its duplicate would lose it."""
    return Mark.BUSY if key in awaited and isinstance(found, Record) and found.state is State.PENDING else found
