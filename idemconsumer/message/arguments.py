"""What is kept of a step's arguments, so that a replay with others is seen (L73)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from idemconsumer.message import keys

SIZE: Final = 8  # bytes for each argument
OPAQUE: Final = bytes(SIZE)
"""Of an argument that is not compared: nothing says what it is, such as a client."""


def digest(args: Iterable[object], opaque: Iterable[object] = ()) -> bytes:
    """The beginning of a hash for each argument, the same for equal values: whatever the order of a set, or the way a
    number is written. Fields that have their default are left out, so that a class may get another one; of a secret
    only its presence counts. `opaque`: these objects are not compared either."""
    kept = set(map(id, opaque))
    return b"".join([OPAQUE if id(each) in kept else _digest(each) for each in args])


def _digest(value: object) -> bytes:
    canonical = keys.canonical_value(value, secrets=True)
    return OPAQUE if canonical is None else canonical[:SIZE]
