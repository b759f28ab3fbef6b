"""How much a worker takes from a broker: what its lanes can begin soon (D12), within a bound in bytes (D8). Pure.

Theory of operation. A message that is fetched and not begun helps nobody: no other worker can run it, more urgent ones
queue behind it, the broker's time limits count, and it takes memory. But a lane that has to ask the broker after each
group is idle meanwhile. So each lane gets the group that it runs, and a little more: what it can begin within `SOON`,
at most three further groups, at least one message. That follows the handler's measured time.

One lane at a time runs the next messages of an order. For each message that is deeper in its order than that, one more
is fetched, within limits, so that the other lanes get work too. Messages that wait for a rival (another worker that
holds their key) or behind a retry will not begin soon, and do not count at all.

Memory. A source may hold as many bytes as it leaves free: half of the bound while it is the only source, a third if
there are two. So there is always room for a source that begins, and all together never exceed the bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SOON: Final = 0.2  # seconds: many round trips to a broker, and a short wait for an urgent message
ASSUMED: Final = 1024 * 1024  # bytes of a message, until the first one has arrived

_GROUPS: Final = 3  # at most, besides the one that runs
_UNEVEN: Final = (
    3  # times what evenly filled lanes would hold: then 8 lanes of slow handlers are idle a tenth of the time
)
_SIZES: Final = 2_048  # messages after which the size of a large one is forgotten
_MORE, _LESS = 1.5, 0.5  # a smaller change of a prefetch is not made


def per_lane(group: int, seconds: float | None) -> int:
    """How many messages a lane runs and begins soon. `group`: the size of the next group. `seconds`: the time of one
    message, None until it is known."""
    return group + max(1, min(_GROUPS * group, 0 if seconds is None else int(SOON / max(seconds, 1e-6))))


def in_lanes(ready: int, uneven: int) -> int:
    """How many messages all lanes may hold. `ready`: what they run and begin soon. `uneven`: what queues behind that in
    the same orders."""
    return ready + min(uneven, _UNEVEN * ready)


def allowance(bound: int, others: int) -> int:
    """How many bytes a source may hold while all others hold `others`: as many as it leaves free."""
    return max(0, (bound - others) // 2)


def expected_size(known: float | None, sizes: Iterable[int]) -> float:
    """The size in bytes to expect of the next message: that of the largest one, which decays slowly. `known`: the
    expectation so far."""
    for size in sizes:
        known = size if known is None or size > known else known + (size - known) / _SIZES
    return ASSUMED if known is None else known


def may_hold(messages: int, allowed: int, size: float) -> int:
    """How many messages a source may hold: up to `messages`, within `allowed` bytes. At least one, or a message larger
    than the bound would never pass."""
    return max(1, min(messages, int(allowed / max(size, 1.0))))


def may_take(messages: int, held: int, allowed: int, held_bytes: int, size: float) -> int:
    """How many messages a source may take now. It may hold `messages`, and holds `held` of them already."""
    if held == 0:
        return may_hold(messages, allowed, size)
    return max(0, min(messages - held, int((allowed - held_bytes) / max(size, 1.0))))


def at_once(room: int, held: int) -> int:
    """How many of the next `room` messages the lanes can begin at once if the handler is slow. Besides those, the
    source holds `held`. With a slow handler every second message is to begin at once (`per_lane`)."""
    return max(0, (held + room + 1) // 2 - held)


def next_prefetch(now: int, wanted: int, most: int) -> int:
    """The new prefetch: `wanted`, if the change is large enough to be worth it. `most`: what memory allows."""
    return now if now <= most and now * _LESS < wanted < now * _MORE else min(wanted, most)
