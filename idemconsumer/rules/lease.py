"""Under what lease a step may begin, as a pure function (L38, L59)."""

from __future__ import annotations

from typing import Final

MARGIN: Final = 0.2  # of the lease: cancelled sagas must have ended before other workers may take them
GOOD: Final = 0.4  # of the lease: less than is left while each renewal succeeds
FRESH: Final = 0.7  # of the lease: a renewal leaves more, unless it took a tenth of the lease


def may_begin(timeout: float, *, left: float, lease: float, renewed: bool) -> bool:
    """Whether a step may begin that may run for `timeout` seconds; if not, the lease is to be renewed first.

    `left`: the seconds after which the sagas are cancelled unless the lease is renewed. `renewed`: a renewal has
    succeeded that began after the step was asked for. A step that no lease covers is renewed for while it runs, and
    begins only just after a renewal: then it is cancelled at the lease's end at the latest, if no other one succeeds.
    """
    if left < GOOD * lease:
        return False
    if timeout <= FRESH * lease:
        return left >= timeout
    return renewed or left >= FRESH * lease
