"""procrastinate with the insert of `bare` in its task, eight tasks at a time, on as many connections as ours."""

from __future__ import annotations

import asyncio
import os

import psycopg
from procrastinate import App, PsycopgConnector

from benchmarks._loop import run
from benchmarks.rivals.applying import Connection, bare

DSN = os.environ["BENCH_DSN"]
CONNECTIONS = 8
TASK = "pay"


async def main() -> None:
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await psycopg.AsyncConnection.connect(DSN))
    app = App(connector=PsycopgConnector(conninfo=DSN))

    @app.task(name=TASK)
    async def pay(**payment: object) -> None:
        connection = await free.get()
        try:
            await bare(connection, payment)
        finally:
            free.put_nowait(connection)

    async with app.open_async():
        await app.run_worker_async(concurrency=CONNECTIONS, delete_jobs="successful")


if __name__ == "__main__":
    run(main())
