"""What a worker says of its end, for the last line of a launcher that gives up. It is in the worker's own log too."""

from __future__ import annotations

import contextlib
import os
from typing import Final

from idemconsumer import forks
from idemconsumer.redaction import error_text

VARIABLE: Final = "IDEMCONSUMER_LAST_WORDS"  # the pipe's file descriptor, in a worker's environment
_MOST: Final = 300  # characters


class LastWords:
    """Those of this process. Without a launcher nothing is written."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def address(self, descriptor: int) -> None:
        self._descriptor = descriptor
        forks.not_inherited(self, lambda _: [descriptor])

    def say(self, text: str) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, " ".join(text.split())[:_MOST].encode() + b"\n")

    def of(self, error: BaseException) -> None:
        self.say(f"{type(error).__name__}: {error_text(error)}")


LAST_WORDS: Final = LastWords()


def read(descriptor: int) -> str:
    """What a worker that has ended said last, or nothing. The descriptor does not block."""
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, 65_536).decode(errors="replace").strip().rpartition("\n")[2]
    return ""
