"""How much a worker takes from a broker: what its lanes can begin soon (D12), within a bound in bytes (D8). Pure.

Theory of operation. What a worker has fetched and not begun helps nobody: no other worker can run it, what is more
urgent comes behind it, the broker's time limits count, and memory holds it. But a lane that has to ask the broker after
each group stands still meanwhile. So each lane gets the group that it runs, and a little more: what it can begin
within `SOON`, at most three further groups, at least one message. The handler's time is measured, and follows it.

Of one order a single lane runs what comes next. What lies behind that is made up for, so that the other lanes get
something to do, within limits. What waits for a rival, or behind a retry, is not about to begin, and does not count at
all.

Memory. A source may hold as many bytes as it leaves free: half of the bound while it is alone, a third with a second
one. So there is always something left for a source that begins, and all together never exceed the bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SOON: Final = 0.2  # seconds: many round trips to a broker, and little for whoever waits
ASSUMED: Final = 1024 * 1024  # bytes of a message, until the first one has arrived

_GROUPS: Final = 3  # at most, beside the one that runs
_UNEVEN: Final = (
    3  # times what even lanes would hold: 8 lanes of slow handlers then stand still for a tenth of the time
)
_SIZES: Final = 2_048  # messages over which the size of a large one is forgotten
_MORE, _LESS = 1.5, 0.5  # changes of a prefetch that are worth one


def per_lane(group: int, seconds: float | None) -> int:
    """How many messages a lane runs and begins soon. `group` is the size of the next one, `seconds` the time of one
    message, None until it is known."""
    return group + max(1, min(_GROUPS * group, 0 if seconds is None else int(SOON / max(seconds, 1e-6))))


def in_lanes(ready: int, uneven: int) -> int:
    """How many messages all lanes may hold. `ready` is what they run and begin soon; `uneven` is what lies behind that
    in an order."""
    return ready + min(uneven, _UNEVEN * ready)


def allowance(bound: int, others: int) -> int:
    """The bytes that a source may hold while all others hold so many: as many as it leaves free."""
    return max(0, (bound - others) // 2)


def expected_size(known: float | None, sizes: Iterable[int]) -> float:
    """The size to expect of the next message: of the largest one, which is slowly forgotten. `known` is what was
    expected before."""
    for size in sizes:
        known = size if known is None or size > known else known + (size - known) / _SIZES
    return ASSUMED if known is None else known


def may_hold(messages: int, allowed: int, size: float) -> int:
    """How many messages a source may hold: so many, within `allowed` bytes. One at least, or one that is larger than
    the bound would never pass."""
    return max(1, min(messages, int(allowed / max(size, 1.0))))


def may_take(messages: int, held: int, allowed: int, held_bytes: int, size: float) -> int:
    """How many messages a source may take now, that may hold so many, and holds `held`."""
    if held == 0:
        return may_hold(messages, allowed, size)
    return max(0, min(messages - held, int((allowed - held_bytes) / max(size, 1.0))))


def at_once(room: int, held: int) -> int:
    """How many of those that a source may take besides `held` its lanes can begin at once, if its handler is slow: then
    every second one is to be begun soon (`per_lane`)."""
    return max(0, (held + room + 1) // 2 - held)


def next_prefetch(now: int, wanted: int, most: int) -> int:
    """What the prefetch is to be: `wanted`, if that is worth the change. `most` is what memory allows."""
    return now if now <= most and now * _LESS < wanted < now * _MORE else min(wanted, most)
