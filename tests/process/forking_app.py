"""What test_forks.py runs in a worker: handlers that fork, each in its way."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from idemconsumer import App, Message, Tx

NOTES = Path(os.environ["FORK_NOTES"])
app = App("forks")


@dataclass
class Work:
    id: str
    how: str = ""


def ended(pid: int) -> str:
    """How a child has ended, or that it has not."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "lives"


async def in_a_task() -> str:
    if (pid := os.fork()) == 0:
        sys.exit(7)
    return ended(pid)


async def forked(how: str) -> str | None:
    match how:
        case "task":
            return await asyncio.create_task(in_a_task())
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


def nothing() -> int:
    return os.getpid()


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
                children = [pool.submit(nothing), pool.submit(nothing)]
                its = [await asyncio.wrap_future(each) for each in children]
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
    if (pid := os.fork()) == 0:
        if work.how == "exit":
            sys.exit(7)
        return None
    return ended(pid)
