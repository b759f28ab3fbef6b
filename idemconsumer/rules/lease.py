"""How much of the lease must be left for a step to begin, as a pure function (L38, L59)."""

from __future__ import annotations

from typing import Final

MARGIN: Final = 0.2  # of the lease: cancelled sagas must have ended before other workers may take them
GOOD: Final = 0.4  # of the lease: while each renewal succeeds, more than this is left
FRESH: Final = 0.7  # of the lease: a renewal leaves more than this, unless it took a tenth of the lease


def may_begin(timeout: float, *, left: float, lease: float, renewed: bool) -> bool:
    """Whether a step with this `timeout` may begin; if not, the lease is to be renewed first. All times in seconds.

    `left`: the time until the sagas are cancelled unless the lease is renewed. `renewed`: a renewal that began after
    the step was asked for has succeeded. A step that may outlast the lease depends on renewals while it runs, so it
    begins only just after one: if no further renewal succeeds, it is cancelled at the end of the lease at the latest.
    """
    if left < GOOD * lease:
        return False
    if timeout <= FRESH * lease:
        return left >= timeout
    return renewed or left >= FRESH * lease
