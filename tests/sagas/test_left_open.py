"""A loop that ends while the app is open and sagas run: the process ends too, and they are resumed (H15)."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from idemconsumer import App, Message, OutcomeKind, Saga, Step
from idemconsumer.errors import Fenced
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.session import PoolSession
from tests.support.inside import beats, connections_of, heartbeat_of, renewed_earlier
from tests.support.logs import LogCapture
from tests.support.sagas import SCHEMA, Bench
from tests.support.waiting import PATIENCE, until

SAGAS = 16  # twice as many as there are connections


class Shop:
    """Sagas that run until they may end. Their lease outlasts a machine that stands still."""

    def __init__(self) -> None:
        self.app, self.running, self.may_end = App("shop"), 0, False

        @self.app.idempotent_handler("memory:orders", key="id", lease="10m", wait=0)
        async def book(order: dict[str, Any], saga: Saga) -> str:
            return await saga.call("charged", self.charge)

    async def charge(self, step: Step) -> str:
        self.running += 1
        while not self.may_end:
            await asyncio.sleep(0.01)
        return "done"

    def begin(self) -> list[asyncio.Task[Any]]:
        bodies = [json.dumps({"id": n}).encode() for n in range(SAGAS)]
        return [asyncio.create_task(self.app.process(Message("memory:orders", body))) for body in bodies]


@pytest.fixture
def shop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    return Shop()


def runs_to_its_end(main: Any) -> bool:
    returned: list[None] = []
    running = threading.Thread(target=lambda: returned.append(asyncio.run(main)), daemon=True)
    running.start()
    running.join(PATIENCE)
    return bool(returned)


@pytest.mark.parametrize(("closed", "lost"), [(False, False), (True, False), (False, True)])
async def test_a_process_ends_with_sagas_in_flight_and_leaves_them_to_be_resumed(
    shop: Shop, bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, closed: bool, lost: bool
) -> None:
    """The pool, cancelled while it made a connection, went on, and the loop waited for it for ever. Meanwhile the
    heartbeat took one lease after another for sagas that had gone. `lost`: the lease is lost as the loop ends."""
    connect, ending, connecting = PoolSession.connect, False, asyncio.Event()

    async def slow(*given: Any, **more: Any) -> PoolSession:
        if ending:
            connecting.set()
            await asyncio.Event().wait()
        return await connect(*given, **more)

    monkeypatch.setattr(PoolSession, "connect", slow)

    async def main() -> None:
        nonlocal ending
        tasks = shop.begin()
        for task in tasks:  # what is cut off has failed, and nobody asks
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # A machine that stands still costs some of them their connection.
        await until(lambda: 0 < shop.running == SAGAS - sum(task.done() for task in tasks), "all run")
        ending = True
        await connections_of(shop.app).resize(1, 9)  # one more than it may have had
        await connecting.wait()
        if lost:
            renewed_earlier(heartbeat_of(shop.app), 6000.0)
        if closed:
            async with shop.app:
                return

    assert await asyncio.to_thread(runs_to_its_end, main())
    ending, told = (
        False,
        [each["instead"] for each in logged.entries if each["event"].startswith("event loop ended")],
    )
    instead = "write `async with app:` around the code that uses it, or `await app.close()` after it"
    assert told == ([] if closed else [instead])
    assert len(bench.run("select 1 from idemconsumer.worker")) == 1
    bench.run("update idemconsumer.worker set until = clock_timestamp() - interval '1 second'")
    shop.may_end, again = True, Shop()
    again.may_end = True
    async with again.app:

        async def all_are_done() -> bool:
            outcomes = await asyncio.gather(*again.begin(), return_exceptions=True)
            return all(getattr(each, "kind", each) in (OutcomeKind.APPLIED, OutcomeKind.DUPLICATE) for each in outcomes)

        await until(all_are_done, "they are resumed")
    assert bench.run("select 1 from idemconsumer.saga") == []


async def test_a_heartbeat_whose_loop_cancels_its_tasks_ends_and_nothing_begins_under_its_lease(bench: Bench) -> None:
    left_open: list[bool] = []
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=1.0, patience=30.0, left_open=lambda: left_open.append(True))
    mine = asyncio.all_tasks()
    await heartbeat.start(lambda: None)
    for task in asyncio.all_tasks() - mine:
        task.cancel()
    await until(lambda: not beats(heartbeat), "it goes on")
    assert left_open == [True]
    renewed_earlier(heartbeat, 0.7)
    with pytest.raises(Fenced):
        async with asyncio.timeout(PATIENCE / 9):
            await heartbeat.good(10.0)
    assert bench.run("select id from idemconsumer.worker") == [(heartbeat.worker,)]


async def test_a_heartbeat_that_was_stopped_was_not_left_open(bench: Bench) -> None:
    left_open: list[bool] = []
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=1.0, patience=30.0, left_open=lambda: left_open.append(True))
    await heartbeat.start(lambda: None)
    await heartbeat.stop()
    assert left_open == []
