"""Messages that arrive at a steady pace, at half of what the consumer could take: how long each one takes.

A message's time is counted from when it was due to arrive, even if this process was late to notice, up to its known
commit.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections import deque
from typing import Any

import msgspec

from benchmarks._child import serve
from benchmarks._loads import Load
from benchmarks._loop import run
from benchmarks.rivals.store import HANDLERS, Hand, Ours, app, open_subjects
from idemconsumer import Message
from idemconsumer._work import Work

_TICK = 0.0005  # seconds between two looks at what has arrived; the same for everybody


class Stream:
    """Bodies with the times at which they are due, put into one of the lanes when they are."""

    def __init__(self, load: Load, rate: float, lanes: int) -> None:
        self.lanes: list[deque[tuple[float, bytes]]] = [deque() for _ in range(lanes)]
        self.woken = [asyncio.Event() for _ in range(lanes)]
        self.over = False
        self.times: list[float] = []
        self._load = load
        self._rate = rate

    async def arrive(self) -> None:
        loop, chance = asyncio.get_running_loop(), random.Random(0)
        due = loop.time()
        for body in self._load.bodies():
            due += chance.expovariate(self._rate)
            while loop.time() < due:
                await asyncio.sleep(_TICK)
            lane = zlib.crc32(body) % len(self.lanes)
            self.lanes[lane].append((due, body))
            self.woken[lane].set()
        self.over = True
        for event in self.woken:
            event.set()

    async def waiting(self, lane: int) -> bool:
        """Wait for something in that lane; False when nothing comes any more."""
        while not self.lanes[lane] and not self.over:
            self.woken[lane].clear()
            await self.woken[lane].wait()
        return bool(self.lanes[lane])

    def take(self, lane: int, most: int) -> list[tuple[float, bytes]]:
        return [self.lanes[lane].popleft() for _ in range(min(most, len(self.lanes[lane])))]

    def done(self, taken: list[tuple[float, bytes]]) -> None:
        now = asyncio.get_running_loop().time()
        self.times.extend(now - due for due, _ in taken)


async def by_hand(subject: Hand, stream: Stream, lane: int) -> None:
    while await stream.waiting(lane):
        taken = stream.take(lane, 1)
        await subject.apply(subject.connections[lane], json.loads(taken[0][1]))
        stream.done(taken)


async def ours(subject: Ours, stream: Stream, lane: int) -> None:
    name = f"plain-{subject.group}"
    handler = HANDLERS[name].plan.bind(app.name)
    while await stream.waiting(lane):
        taken = stream.take(lane, subject.engine.group_size(handler))
        works = [Work.of(handler, Message(f"memory:{name}", body)) for _, body in taken]
        while works:
            works = works[len(await subject.engine.run(works)) :]
        stream.done(taken)


async def main() -> None:
    async with open_subjects() as subjects:

        async def answer(question: dict[str, Any]) -> Any:
            if question.get("close"):
                return await subjects.close()
            subject = await subjects.get(question["dsn"], question["name"], question["lanes"])
            stream = Stream(msgspec.convert(question["load"], Load), question["rate"], question["lanes"])
            async with asyncio.TaskGroup() as group:
                group.create_task(stream.arrive())
                for lane in range(question["lanes"]):
                    if isinstance(subject, Ours):
                        group.create_task(ours(subject, stream, lane))
                    elif isinstance(subject, Hand):
                        group.create_task(by_hand(subject, stream, lane))
            times = sorted(stream.times)
            return [times[int(len(times) * share)] for share in (0.5, 0.99)]

        await serve(answer)


if __name__ == "__main__":
    run(main())
