"""PgQueuer with the insert of `bare` in its entrypoint, on as many connections as ours.

Its own connection is one of asyncpg: with psycopg's it applies a tenth of that, since its listener keeps the connection
from its queries.
"""

from __future__ import annotations

import asyncio
import json
import os

import asyncpg
import psycopg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job

from benchmarks._loop import run
from benchmarks.rivals.applying import Connection, bare

DSN = os.environ["BENCH_DSN"]
CONNECTIONS = 8
BATCH = 100  # jobs taken at a time; its default is 10


async def main() -> None:
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await psycopg.AsyncConnection.connect(DSN))
    jobs = PgQueuer(AsyncpgDriver(await asyncpg.connect(DSN)))

    @jobs.entrypoint("payments")
    async def pay(job: Job) -> None:
        connection = await free.get()
        try:
            await bare(connection, json.loads(job.payload or b""))
        finally:
            free.put_nowait(connection)

    await jobs.run(batch_size=BATCH)


if __name__ == "__main__":
    run(main())
