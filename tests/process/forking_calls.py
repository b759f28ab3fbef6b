"""A process that has used an app, and forks: `python -m tests.process.forking_calls LOOP QUEUE`.

As Celery's and gunicorn's prefork do it: some code of the parent made a call, and the children make the same ones.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from typing import Any

import pytest
import uvloop

from idemconsumer import App, ConfigurationError, Message, Saga, Step, Tx
from tests.support.pids import connected
from tests.support.waiting import PATIENCE

LOOP, QUEUE = sys.argv[1:]
DESTINATIONS = [f"{scheme}:{QUEUE}" for scheme in ("kafka", "rabbitmq", "sqs", "postgres")]
app = App("forks")


@app.idempotent_handler("memory:orders", key="id")
async def order(order: dict[str, Any], tx: Tx) -> int:
    await tx.execute("insert into witness (id) values (%s)", (order["id"],))
    return os.getpid()


@app.idempotent_handler("memory:rides", key="id", lease="20s")
async def ride(ride: dict[str, Any], saga: Saga) -> int:
    return await saga.call("charged", charge)


@app.idempotent_handler("postgres:later", key="id")
async def later(order: dict[str, Any], tx: Tx) -> None: ...


async def charge(step: Step) -> int:
    return os.getpid()


@app.idempotent_handler("memory:forking", key="id")
async def forking(order: dict[str, Any], tx: Tx) -> int:
    return fork()


@app.idempotent_handler("memory:forking-rides", key="id", lease="20s")
async def forking_ride(ride: dict[str, Any], saga: Saga) -> int:
    return await saga.call("forked", fork_in_a_step)


async def fork_in_a_step(step: Step) -> int:
    return fork()


def fork() -> int:
    if (pid := os.fork()) == 0:
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def call_what_forks() -> None:
    for source in ("memory:forking", "memory:forking-rides"):
        outcome = await app.process(Message(source, b'{"id": "forks"}'))
        assert outcome.result == b"7", (source, outcome)


async def call(name: str) -> None:
    async with asyncio.timeout(PATIENCE):
        body = json.dumps({"id": name}).encode()
        for source, handler in (("memory:orders", order), ("memory:rides", ride)):
            outcome = await app.process(Message(source, body))
            assert (str(outcome.kind), outcome.result) == ("applied", b"%d" % os.getpid()), (source, outcome)
            assert (await app.result(handler, key=name)).result == outcome.result
        assert await app.signal(ride, key=name, name="go") == "ended"
        await app.start(ride, {"id": f"{name}-later"}, key=f"{name}-later")
        assert (await app.accept(later, {"id": name}, key=name)).new
        assert str((await app.accepted(later, key=name)).progress) == "pending"
        for destination in DESTINATIONS:
            await app.publish(destination, {"id": name})


def main() -> None:
    loop = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[LOOP]()
    loop.run_until_complete(call("before"))
    assert len(connected()) >= 5, connected()
    children = []
    for number in range(2):
        if (pid := os.fork()) == 0:
            assert not connected(), connected()
            if number == 0:
                with pytest.raises(ConfigurationError, match=r"asyncio\.run"):
                    loop.run_until_complete(call("not in this loop"))
            asyncio.run(call(f"child {number}"))
            gc.collect()
            if LOOP == "uvloop":  # it crashes when an interpreter ends that was forked beside an open loop of it
                os._exit(0)
            sys.exit(0)  # with all that an interpreter does at its end
        children.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert ends == [0, 0], ends
    loop.run_until_complete(call("after"))
    loop.run_until_complete(call_what_forks())
    loop.run_until_complete(app.close())
    loop.close()


if __name__ == "__main__":
    main()
