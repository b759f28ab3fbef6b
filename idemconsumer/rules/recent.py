"""Keys that were met lately: a hint for where to check first. Nothing depends on it."""

from __future__ import annotations

from typing import Final

MOST: Final = 10_000  # keys, in about 1 MB


class Recent:
    """The last `most` keys that were added."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._keys: dict[bytes, None] = {}  # the oldest first

    def add(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys
