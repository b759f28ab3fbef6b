"""What is stored of a step's arguments, so that a replay with different ones is detected (L73)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from idemconsumer.message import keys

SIZE: Final = 8  # bytes for each argument
OPAQUE: Final = bytes(SIZE)
"""Stands for an argument that is not compared, because it has no comparable form, such as a client."""


def digest(args: Iterable[object], opaque: Iterable[object] = ()) -> bytes:
    """The beginning of a hash for each argument, the same for equal values.

    The order of a set and the notation of a number do not count. Fields that have their default are left out, so that a
    class may get new fields. Of a secret only its presence counts. `opaque`: objects that are not compared either.
    """
    kept = set(map(id, opaque))
    return b"".join([OPAQUE if id(each) in kept else _digest(each) for each in args])


def _digest(value: object) -> bytes:
    canonical = keys.canonical_value(value, secrets=True)
    return OPAQUE if canonical is None else canonical[:SIZE]
