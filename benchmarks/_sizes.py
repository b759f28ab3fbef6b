"""How a benchmark names the size of our groups: a number, or "adaptive", which is what a handler gets by default."""

from __future__ import annotations

from idemconsumer.handlers.options import Options

SIZE = "adaptive"
OURS = f"group {SIZE}"


WAITING = "waiting"  # adaptive, and each statement is waited for


def sized(group: str) -> Options:
    return {} if group in (SIZE, WAITING) else {"group_size": int(group)}
