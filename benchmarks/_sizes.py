"""How a benchmark names the size of our groups: "adaptive", or a number."""

from __future__ import annotations

from idemconsumer._options import Options, Resolved

ADAPTIVE = Resolved().group_size != 1  # whether a handler that names no size gets one that follows its time
SIZE = "adaptive" if ADAPTIVE else "32"
OURS = f"group {SIZE}"


def sized(group: str) -> Options:
    return {} if group == "adaptive" else {"group_size": int(group)}
