"""Processes with the subjects of the store path, and one measured run of one of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import psycopg

from benchmarks._child import Child, child
from benchmarks._loads import Load
from benchmarks._measure import Subject
from benchmarks._stage import Meter, Stage

LANES = 4


class Crew:
    """`most` processes, of which a run uses as many as it says."""

    def __init__(self, stage: Stage, children: list[Child]) -> None:
        self._stage = stage
        self._children = children
        self.deadlocks: dict[str, list[int]] = {}

    def subject(self, name: str, load: Load, *, lanes: int = LANES, processes: int = 1, warm: float = 0.2) -> Subject:
        """Deliveries a second of `name` in a database of its own, after a warm-up of that share of the load."""

        async def measured(number: int) -> float:
            with self._stage.database() as dsn:
                if load.hot:
                    await fill_stock(dsn, load.hot)
                mark = secrets.token_hex(3)
                before = msgspec.structs.replace(load, prefix=f"w{mark}", count=max(lanes * 40, int(load.count * warm)))
                await self.ask(name, before, dsn, lanes=lanes, processes=processes)
                meter = Meter(dsn)
                await meter.begin()
                answers = await self.ask(
                    name, msgspec.structs.replace(load, prefix=f"m{mark}"), dsn, lanes=lanes, processes=processes
                )
                await self.close()
                self.deadlocks.setdefault(name, []).append((await meter.end())["deadlocks"])
                return float(sum(answer["count"] for answer in answers) / max(answer["seconds"] for answer in answers))

        return measured

    async def ask(self, name: str, load: Load, dsn: str, *, lanes: int = LANES, processes: int = 1) -> list[Any]:
        """Run one load, shared among that many processes, with as many lanes in each as make `lanes` together."""
        return await asyncio.gather(
            *(
                running.ask(
                    dsn=dsn, name=name, lanes=lanes // processes, load=msgspec.to_builtins(load.part(share, processes))
                )
                for share, running in enumerate(self._children[:processes])
            )
        )

    async def close(self) -> None:
        """Let go of all connections."""
        for running in self._children:
            await running.ask(close=True)


@asynccontextmanager
async def crew(stage: Stage, *, processes: int = 1) -> AsyncIterator[Crew]:
    async with AsyncExitStack() as stack:
        children = [await stack.enter_async_context(child("benchmarks.rivals.store")) for _ in range(processes)]
        yield Crew(stage, children)


async def fill_stock(dsn: str, articles: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("insert into stock select n, 1000000 from generate_series(0, %s) n", (articles - 1,))
        await connection.execute("vacuum analyze stock")
