"""Which code a process runs: what tells workers before a deployment from those after it (L29)."""

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
    """A hash of the source of the modules that these handlers are in, and of all that are loaded from their packages.

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
