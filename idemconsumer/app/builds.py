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
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in roots and file is not None:
            with suppress(OSError):
                found.update(name.encode() + b"\0" + Path(file).read_bytes())
    return found.hexdigest()[:_DIGITS]
