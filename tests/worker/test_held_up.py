"""What holds up a handler is said by its worker, in `status` and by `doctor`, until it is over (O34)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import App, Saga, Step, Tx
from idemconsumer.admin.control import Controls
from idemconsumer.admin.doctor import diagnose
from idemconsumer.admin.status import status
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.cli.status_verb import state_of
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds
from tests.support.logs import LogCapture, times
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned
from tests.support.waiting import until
from tests.support.workers import SCHEMA, Bench, Item, Lasting, Running, connected, note


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, steering_pause=0.1, steering_notice_pause=0.05, lock_waits_pause=0.05)
    tuned(monkeypatch, failures_in_a_row=2, next_probe_pause=0.05, failed_probe_pause=0.1)


def held_up(running: Running) -> list[str]:
    states = running.worker._reporting.report().handlers
    return list(states["take"].held_up) if "take" in states else ["not begun"]


async def said(bench: Bench, *words: str) -> str:
    """What `status` says of the handler, once it has all these words; `doctor` has a finding that says the same."""

    async def state() -> str:
        found = await status(bench.dsn, SCHEMA)
        return "".join(state_of(line, found.at) for line in found.handlers if line.handler == "take")

    async def complete() -> bool:
        shown = await state()
        return all(word in shown for word in words)

    await until(complete)
    if words != ("works",):
        texts = [each.text for each in await diagnose(bench.dsn, SCHEMA) if each.subject == "handler shop/take"]
        assert any(all(word in text for word in words) for text in texts), texts
    return await state()


async def test_all_messages_fail(bench: Bench) -> None:
    app, mended = App("shop"), asyncio.Event()

    @app.idempotent_handler("memory:orders", key="id", backoff=("0.1s", "0.1s"))
    async def take(item: Item, tx: Tx) -> None:
        if not mended.is_set():
            raise ZeroDivisionError(item.id)
        await note(tx, item)

    async with bench.running(app) as running:
        await bench.publish("orders", Item("secret"))
        await running.until(lambda: running.worker.counts.get("retrying", 0) > 0)
        assert "fails" not in held_up(running), "one message says nothing of the others"
        await bench.publish("orders", *(Item(f"{n}-secret") for n in range(4)))
        await running.until(lambda: held_up(running) == ["fails"])
        text = await said(
            bench, "all messages fail: ", " runs in a row, the last one with ZeroDivisionError at ", "since"
        )
        assert "test_held_up.py" in text
        assert "secret" not in text, "what an error says may quote the message"
        mended.set()
        await running.until(lambda: held_up(running) == [])
        await said(bench, "works")


async def test_a_function_of_sagas_fails(bench: Bench) -> None:
    app = App("shop")

    async def charge(step: Step) -> None:
        raise OSError("no route")

    @app.idempotent_handler("memory:rides", key="id", max_attempts=9, backoff=("0.1s", "0.1s"))
    async def take(item: Item, saga: Saga) -> None:
        await saga.call("charged", charge)

    async with bench.running(app) as running:
        await bench.publish("rides", *(Item(f"{n}") for n in range(4)))
        await running.until(lambda: held_up(running) == ["fails"])
        await said(bench, "charge fails in all sagas", "OSError at test_held_up.py")


async def test_a_lock_and_who_holds_it(bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture) -> None:
    """Also between two tries, of a group and then of each message, while nothing waits in the database."""
    tuned(monkeypatch, lock_wait_is_long_after=0.3, session_lock_patience=0.8, claim_lock_patience=0.8)
    app, begun, go_on = App("shop"), asyncio.Event(), asyncio.Event()

    @app.idempotent_handler("memory:orders", key="id", group_size=2)
    async def take(item: Item, tx: Tx) -> None:
        if item.id == "before":  # so that the others are a group
            begun.set()
            await go_on.wait()
        else:
            await note(tx, item)

    async with bench.running(app, concurrency=1) as running:
        await bench.publish("orders", Item("before"))
        await begun.wait()
        await bench.publish("orders", Item("a"), Item("b"))
        await running.until(lambda: running.worker._reporting.report().in_hand == 3)
        with psycopg.connect(bench.dsn, application_name="ann's report") as other:
            other.execute("lock table effect in access exclusive mode")
            go_on.set()
            await running.until(lambda: held_up(running) == ["locked"])
            holder = f"pid {other.info.backend_pid} (ann's report, "
            await said(bench, f"waits for a lock, held by {holder}", "idle in transaction after `lock table effect in")
            await running.until(lambda: running.worker.counts.get("retrying", 0) >= 2)
            assert held_up(running) == ["locked"]
        await running.until_count(applied=3)
        await running.until(lambda: held_up(running) == [])
        await said(bench, "works")
    (waits,) = [each for each in logged.entries if each["event"] == "handler waits for a lock"]
    assert waits["held_by"].startswith(holder)
    assert times(logged, "handler no longer waits for a lock") == 1
    assert sorted(bench.effects()) == ["a", "b"]


class Away(Lasting):
    """Cannot be reached while `away`."""

    away = True

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        if self.away:
            raise BrokerUnavailable("nothing listens")
        return await super().open(subscriptions, bounds)


async def test_a_source_that_is_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    app, broker = App("shop"), Away()
    bench = connected(Bench(bench.dsn, broker), monkeypatch)

    @app.idempotent_handler("memory:orders", key="id")
    async def take(item: Item, tx: Tx) -> None:
        await note(tx, item)

    async with bench.running(app) as running:
        await running.until(lambda: held_up(running) == ["source_away"])
        await said(bench, "memory:orders is unreachable")
        broker.away = False
        await running.until(lambda: held_up(running) == [])
        report = running.worker._reporting.report
        assert running.worker._reporting._at_work is not None
        (feed,) = [each for each in running.worker._reporting._at_work[0] if each.name == "memory:orders"]
        session: Any = feed._session
        session.silence = 3.0  # its server has stopped, and its connections stay open (O33)
        assert held_up(running) == ["source_away"]
        assert (report().up["memory:orders"], report().lacking) == (False, ["memory:orders"])
        session.silence = None
        assert held_up(running) == []


async def test_who_has_paused_it(bench: Bench) -> None:
    app = App("shop")

    @app.idempotent_handler("memory:orders", key="id")
    async def take(item: Item, tx: Tx) -> None: ...

    async with bench.running(app) as running:
        await said(bench, "works")
        await Controls(bench.dsn, SCHEMA).pause("shop", "take", by="ann", reason="wrong prices")
        await running.until(lambda: held_up(running) == ["paused"])
        await said(bench, "paused by ann (wrong prices) since")


async def test_a_database_that_is_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Proxy(int(str(conninfo_to_dict(bench.dsn)["port"]))) as proxy:
        behind = Bench(make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port), bench.broker)
        app = App("shop")

        @app.idempotent_handler("memory:orders", "postgres:orders", key="id")
        async def take(item: Item, tx: Tx) -> None: ...

        async with connected(behind, monkeypatch).running(app) as running:
            await running.until(lambda: held_up(running) == [])
            proxy.cut()
            await running.until(lambda: held_up(running) == ["database_away"])
            await proxy.restore()
            await running.until(lambda: held_up(running) == [])
