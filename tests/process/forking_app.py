"""What test_forks.py runs in a worker: handlers that fork, each in its way."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from idemconsumer import App, Tx

NOTES = Path(os.environ["FORK_NOTES"])
app = App("forks")


@dataclass
class Work:
    id: str
    how: str = ""


def nothing() -> int:
    return os.getpid()


@app.idempotent_handler(os.environ["FORK_SOURCE"], key="id", timeout="50s", group_size=1)
async def work(work: Work, tx: Tx) -> str | None:
    await tx.execute("insert into witness (id) values (%s)", (work.id,))
    if work.how == "pool" and not NOTES.exists():
        pool = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
        children = [pool.submit(nothing), pool.submit(nothing)]
        its = [await asyncio.wrap_future(each) for each in children]
        NOTES.with_suffix(".new").write_text(json.dumps({"worker": os.getpid(), "children": its}))
        NOTES.with_suffix(".new").rename(NOTES)
        await asyncio.sleep(3600.0)
    return None
