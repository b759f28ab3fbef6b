"""The build: an identifier of a process's code, which differs between workers before and after a deployment (L29)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from idemconsumer.handlers.decorator import Handler

_DIGITS: Final = 12


def build_of(handlers: Iterable[Handler[..., Any]]) -> str:
    """A hash of the source of the modules that define these handlers, and of all loaded modules of their packages.

    Not guaranteed: that nothing else has changed, or that another process has loaded the same modules.
    """
    roots = {handler.__module__.partition(".")[0] for handler in handlers}
    found = sha256()
    loaded = sys.modules.copy()  # in one step, since another thread may import a module meanwhile
    for name in sorted(loaded):
        if name.partition(".")[0] in roots and (file := getattr(loaded[name], "__file__", None)) is not None:
            with suppress(OSError):
                found.update(name.encode() + b"\0" + Path(file).read_bytes())
    return found.hexdigest()[:_DIGITS]
