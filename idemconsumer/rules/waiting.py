"""When a saga's run ends because nothing but waits is left of it, as a pure function (L41)."""

from __future__ import annotations

import math
from typing import Final

GRACE: Final = 0.1  # seconds in which a handler that does not wait itself may ask for more


def stays(*, steps: bool, branches: bool, main: bool, quiet: float, patience: float) -> float:
    """For how many seconds a run with open waits goes on, after `quiet` seconds in which no step began or ended.

    `steps`: one is in flight; its end is awaited, since to cut it off would repeat it. `branches`: one is between two
    steps, or is about to begin one, for which it has `patience` (L35); else it would have to wait for what it does not
    depend on. `main`: the handler's own task does not wait itself: it awaits its branches, as far as can be seen.
    """
    if steps:
        return math.inf
    if branches:
        return max(0.0, patience - quiet)
    return max(0.0, GRACE - quiet) if main else 0.0
