"""What a worker has to do now, and what of it waits for a time: for callers that wait until the worker is quiet."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from idemconsumer.worker.feed import Feed
from idemconsumer.worker.lanes import Lanes


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """`busy`: whether anything runs, or can be fetched. `resting`: how many deliveries wait in this process for their
    next attempt; `due`: when the first of them may run, on the loop's clock. `rivals`: the keys of deliveries that wait
    because another worker holds their key."""

    busy: bool
    resting: int = 0
    due: float | None = None
    rivals: Collection[bytes] = ()


async def standing(lanes: Lanes | None, feeds: Sequence[Feed]) -> WorkerStanding:
    """The state as of now. The servers of the feeds are queried first."""
    idle = [await feed.idle() for feed in feeds]
    if lanes is None or not idle:
        return WorkerStanding(busy=True)
    now, resting, dues, rivals = asyncio.get_running_loop().time(), 0, list[float](), dict[bytes, None]()
    waiting = 0
    for of in lanes.all:
        strands = of.strands
        aside, due = strands.resting
        resting, waiting = resting + aside, waiting + len(strands.rivals)
        rivals |= dict.fromkeys(held.key for held in strands.rivals if not held.running)
        if due is not None:
            dues.append(due)
    due = min(dues, default=None)
    busy = not all(idle) or lanes.in_hand.in_flight > resting + waiting or (due is not None and due <= now)
    return WorkerStanding(busy, resting, due, rivals)
