"""The consumers of the store path, in a process of their own and without a broker.

`group …` is the engine, the others are what people write (`applying`). All take the same bodies, decode them,
and write the same business data, on as many connections as there are lanes.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import Any

import msgspec
import psycopg

from benchmarks._child import resident, serve
from benchmarks._loads import Load
from benchmarks._loop import run
from benchmarks._sizes import SIZE, WAITING, sized
from benchmarks.rivals.applying import (
    AUTOCOMMIT,
    HANDS,
    INSERT,
    READ,
    TAKE,
    Apply,
    Connection,
    applying,
    effects,
    statement,
)
from idemconsumer import App, Handler, Message, OutcomeKind, Reject, Tx
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.options import Options
from idemconsumer.stores.joined import PostgresStore

PIPELINED = "one pipeline"
_PIPELINED = 128  # messages in a transaction, as many as in the largest group of ours

app = App("bench")


class Refused(Exception):
    """The first attempt is to fail."""


# --------------------------------------------------------------------------------------------------------------- ours
async def plain(payment: dict[str, Any], tx: Tx) -> None:
    await tx.execute(*statement(payment))


async def result(payment: dict[str, Any], tx: Tx) -> dict[str, str]:
    await tx.execute(*statement(payment))
    return {"applied": payment["id"]}


async def two(payment: dict[str, Any], tx: Tx) -> None:
    await tx.execute(INSERT, (payment["id"], payment["amount"]))
    await tx.execute(TAKE, (payment["sku"],))


async def read(payment: dict[str, Any], tx: Tx) -> None:
    qty = await (await tx.execute(READ, (payment["sku"],), into=int)).first()
    if qty is not None and qty > 0:
        await tx.execute(INSERT, (payment["id"], payment["amount"]))


async def trouble(payment: dict[str, Any], tx: Tx, message: Message) -> None:
    await tx.execute(*statement(payment))
    match payment.get("trouble"):
        case "reject":
            raise Reject("refused")
        case "once" if message.attempt == 1:
            raise Refused


def made(fn: Any, group: str) -> Handler[..., Any]:
    name = f"{fn.__name__}-{group}"
    options: Options = {"name": name, "backoff": "1ms, 1ms", **sized(group)}
    return app.idempotent_handler(f"memory:{name}", key="id", **options)(fn)


HANDLERS = {
    handler.name: handler
    for handler in (
        *(made(plain, group) for group in ("1", "32", "128", SIZE, WAITING)),
        made(result, SIZE),
        *(made(fn, group) for fn in (two, read) for group in (SIZE, WAITING)),
        made(trouble, SIZE),
    )
}


class Ours:
    """Kept over several loads, so that what the engine has learned of the rows stays learned."""

    def __init__(self, store: PostgresStore, lanes: int, group: str) -> None:
        self.engine = Engine(store, lanes=lanes)
        self.group = group
        self._lanes = lanes

    async def consume(self, kind: str, bodies: Iterator[bytes]) -> None:
        name = f"{kind}-{self.group}"
        handler = HANDLERS[name].plan.bind(app.name)
        lanes: list[deque[Work]] = [deque() for _ in range(self._lanes)]

        async def lane(waiting: deque[Work]) -> None:
            while True:
                size = self.engine.group_size(handler)
                while len(waiting) < size and (body := next(bodies, None)) is not None:
                    work = Work.of(handler, Message(f"memory:{name}", body))
                    work.eager = self.group == WAITING
                    lanes[zlib.crc32(work.key) % self._lanes].append(work)  # a key has one lane, as in a worker
                if not waiting:
                    return
                group = [waiting.popleft() for _ in range(min(size, len(waiting)))]
                outcomes = await self.engine.run(group)
                back = group[len(outcomes) :]
                if outcomes[-1].kind in (OutcomeKind.RETRYING, OutcomeKind.BUSY):
                    back.insert(0, group[len(outcomes) - 1])
                    await asyncio.sleep(outcomes[-1].due)
                waiting.extendleft(reversed(back))

        await asyncio.gather(*map(lane, lanes))


# ------------------------------------------------------------------------------------------------------------ by hand
class Hand:
    """One connection a lane, and each takes the next message when it is done with its last."""

    def __init__(self, connections: Sequence[Connection], apply: Apply) -> None:
        self.connections = connections
        self.apply = apply

    async def consume(self, kind: str, bodies: Iterator[bytes]) -> None:
        async def lane(connection: Connection) -> None:
            for body in bodies:
                await self.apply(connection, json.loads(body))

        await asyncio.gather(*map(lane, self.connections))


class Pipelined:
    """The limit: groups of a lane's most, none of it claimed, and all of a group in one psycopg pipeline."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = connections

    async def consume(self, kind: str, bodies: Iterator[bytes]) -> None:
        async def lane(connection: Connection) -> None:
            while group := list(islice(bodies, _PIPELINED)):
                async with connection.pipeline():
                    for body in group:
                        await effects(connection, json.loads(body))
                    await connection.commit()

        await asyncio.gather(*map(lane, self.connections))


# ---------------------------------------------------------------------------------------------------------- the child
class Subjects:
    """Opened when they are asked for first, so that connecting and preparing is not measured."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._open: dict[tuple[str, str, int], Ours | Hand | Pipelined] = {}

    async def get(self, dsn: str, name: str, lanes: int) -> Ours | Hand | Pipelined:
        if (dsn, name, lanes) not in self._open:
            self._open[dsn, name, lanes] = await self._make(dsn, name, lanes)
        return self._open[dsn, name, lanes]

    async def _make(self, dsn: str, name: str, lanes: int) -> Ours | Hand | Pipelined:
        if name in HANDS or name == PIPELINED:
            connections = [
                await psycopg.AsyncConnection.connect(dsn, autocommit=name == AUTOCOMMIT) for _ in range(lanes)
            ]
            for connection in connections:
                await self._stack.enter_async_context(connection)
            return Pipelined(connections) if name == PIPELINED else Hand(connections, applying(name, dsn))
        store = await PostgresStore.open(dsn, "idemconsumer", connections=lanes, longest_run=30.0)
        self._stack.push_async_callback(store.close)
        return Ours(store, lanes, name.removeprefix("group "))

    async def close(self) -> None:
        await self._stack.aclose()
        self._open.clear()


@asynccontextmanager
async def open_subjects() -> AsyncIterator[Subjects]:
    subjects = Subjects()
    try:
        yield subjects
    finally:
        await subjects.close()


class Counted:
    """An iterator that knows how many it gave."""

    def __init__(self, bodies: Iterator[bytes]) -> None:
        self.count = 0
        self._bodies = bodies

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        body = next(self._bodies)
        self.count += 1
        return body


async def main() -> None:
    async with open_subjects() as subjects:

        async def answer(question: dict[str, Any]) -> Any:
            if question.get("close"):
                return await subjects.close()
            subject = await subjects.get(question["dsn"], question["name"], question["lanes"])
            load = msgspec.convert(question["load"], Load)
            counted = Counted(load.bodies())
            started = time.perf_counter()
            await subject.consume(load.handler, counted)
            return {"seconds": time.perf_counter() - started, "count": counted.count, "resident": resident(os.getpid())}

        await serve(answer)


if __name__ == "__main__":
    run(main())
