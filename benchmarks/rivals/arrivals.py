"""Messages that arrive at a steady pace, at half of what the consumer could take: how long each one takes.

A message's time is counted from when it was due to arrive, even if this process was late to notice, up to its known
commit. By hand, a free connection takes the next message. Ours go to the lane of their key, as in a worker.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from typing import Any, TypeAlias

import msgspec

from benchmarks._child import serve
from benchmarks._loads import Load
from benchmarks._loop import run
from benchmarks.rivals.applying import Connection
from benchmarks.rivals.store import HANDLERS, Hand, Ours, Pipelined, app, open_subjects
from idemconsumer import Message, OutcomeKind
from idemconsumer.engine.work import Work

_TICK = 0.0005  # seconds between two looks at what has arrived; the same for everybody

Waiting: TypeAlias = "asyncio.Queue[tuple[float, bytes]]"  # when each was due, and its body


async def arrive(load: Load, rate: float, queues: list[Waiting]) -> None:
    """Each message into one of the queues when it is due; returns when all are done."""
    loop, chance = asyncio.get_running_loop(), random.Random(0)
    due = loop.time()
    for body in load.bodies():
        due += chance.expovariate(rate)
        while loop.time() < due:
            await asyncio.sleep(_TICK)
        queues[zlib.crc32(body) % len(queues)].put_nowait((due, body))
    for queue in queues:
        await queue.join()


async def by_hand(subject: Hand, connection: Connection, queue: Waiting, times: list[float]) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due, body = await queue.get()
        await subject.apply(connection, json.loads(body))
        times.append(now() - due)
        queue.task_done()


async def ours(subject: Ours, queue: Waiting, times: list[float]) -> None:
    now = asyncio.get_running_loop().time
    name = f"plain-{subject.group}"
    handler = HANDLERS[name].plan.bind(app.name)
    while True:
        taken = [await queue.get()]
        size = subject.engine.group_size(handler)
        while len(taken) < size and not queue.empty():
            taken.append(queue.get_nowait())
        works = [Work.of(handler, Message(f"memory:{name}", body)) for _, body in taken]
        while works:
            outcomes = await subject.engine.run(works)
            assert all(outcome.kind is OutcomeKind.APPLIED for outcome in outcomes), outcomes
            works = works[len(outcomes) :]
        for due, _ in taken:
            times.append(now() - due)
            queue.task_done()


async def measure(subject: Ours | Hand, load: Load, rate: float, lanes: int) -> list[float]:
    """The time of each message, in order of length."""
    queues: list[Waiting] = [asyncio.Queue() for _ in range(lanes if isinstance(subject, Ours) else 1)]
    times: list[float] = []
    async with asyncio.TaskGroup() as group:
        if isinstance(subject, Ours):
            takers = [group.create_task(ours(subject, queue, times)) for queue in queues]
        else:
            takers = [group.create_task(by_hand(subject, each, queues[0], times)) for each in subject.connections]
        await arrive(load, rate, queues)
        for taker in takers:
            taker.cancel()
    return sorted(times)


async def main() -> None:
    async with open_subjects() as subjects:

        async def answer(question: dict[str, Any]) -> Any:
            if question.get("close"):
                return await subjects.close()
            subject = await subjects.get(question["dsn"], question["name"], question["lanes"])
            assert not isinstance(subject, Pipelined)  # it waits for a group to fill
            load = msgspec.convert(question["load"], Load)
            times = await measure(subject, load, question["rate"], question["lanes"])
            return [times[int(len(times) * share)] for share in (0.5, 0.99)]

        await serve(answer)


if __name__ == "__main__":
    run(main())
