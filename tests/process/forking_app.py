"""What test_forks.py runs in a worker: handlers that fork, each in its way."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from idemconsumer import App, Message, Tx
from tests.support.pids import ended

NOTES = Path(os.environ["FORK_NOTES"])
app = App("forks")


@dataclass
class Work:
    id: str
    how: str = ""


def fork(how: str) -> str | None:
    """How the child has ended, which comes back from here."""
    if (pid := os.fork()) == 0:
        if how == "exit":
            sys.exit(7)
        return None
    return ended(pid)


async def in_a_task() -> str | None:
    return fork("exit")


async def in_threads() -> str:
    """Of the loop's pool, of one in which something waits behind it, and of none."""
    run = asyncio.get_running_loop().run_in_executor
    with ThreadPoolExecutor(1) as pool:
        in_pool = run(pool, fork, "return"), run(pool, fork, "exit"), run(pool, note, "what waits there")
        ends = [await asyncio.to_thread(fork, "exit"), *(await asyncio.gather(*in_pool))[:2]]
    for how in ("return", "exit"):
        thread = Thread(target=lambda how: ends.append(fork(how)), args=[how])
        thread.start()
        await asyncio.to_thread(thread.join)
    return " ".join(map(str, ends))


async def forked(how: str) -> str | None:
    match how:
        case "task":
            return await asyncio.create_task(in_a_task())
        case "threads":
            return await in_threads()
        case "calls":
            child = multiprocessing.get_context("fork").Process(target=call_from_a_child)
            child.start()
            return ended(child.pid or 0)
        case "signal":
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60.0])
            child.start()
            child.terminate()
            return ended(child.pid or 0)
    sleeping = asyncio.create_task(asyncio.sleep(3.0))
    await asyncio.sleep(0)  # it has begun: what begins in a child finds no running loop
    if (pid := os.fork()) == 0:
        if how == "exit":
            sys.exit(7)
        if how == "await":
            NOTES.with_suffix(".forked").touch()
            await sleeping  # meanwhile the child would do what goes on beside it
        return None
    sleeping.cancel()
    return ended(pid)


async def call() -> None:
    await app.publish("postgres:elsewhere", {"id": "from a child"})
    body = json.dumps({"id": "from a child"}).encode()
    outcome = await app.process(Message(os.environ["FORK_SOURCE"], body))
    assert str(outcome.kind) == "applied"
    assert str((await app.result(work, key="from a child")).kind) == "duplicate"


def call_from_a_child() -> None:
    asyncio.run(call())


def note(line: str) -> None:
    with NOTES.open("a") as notes:
        notes.write(f"{line}\n")


def nothing() -> None:
    return


@app.idempotent_handler(os.environ["FORK_SOURCE"], key="id", timeout="50s", group_size=1)
async def work(work: Work, tx: Tx) -> str | None:
    await tx.execute("insert into witness (id) values (%s)", (work.id,))
    match work.how:
        case "":
            return None
        case "slow":  # beside one that forks
            NOTES.with_suffix(".slow").touch()
            while not NOTES.with_suffix(".forked").exists():
                await asyncio.sleep(1.0)
            note(work.id)
            return None
        case "pool":
            if not NOTES.exists():
                pool = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
                await asyncio.gather(*(asyncio.wrap_future(pool.submit(nothing)) for _ in range(2)))
                its = [child.pid for child in multiprocessing.active_children()]  # one may have done it all
                NOTES.with_suffix(".new").write_text(json.dumps({"worker": os.getpid(), "children": its}))
                NOTES.with_suffix(".new").rename(NOTES)
                await asyncio.sleep(3600.0)
            return None
        case "await":
            while not NOTES.with_suffix(".slow").exists():
                await asyncio.sleep(0.01)
    return await forked(work.how)


@app.idempotent_handler(os.environ["FORK_SOURCE"] + "-sync", key="id")
def work_in_a_thread(work: Work) -> str | None:
    return fork(work.how)
