"""A handler that is paused begins nothing, wherever its messages come from, and loses nothing (O14)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemconsumer import App, ConfigurationError, Saga, Tx
from idemconsumer.brokers.postgres_session import PostgresSession
from idemconsumer.errors import StoreUnavailable
from idemconsumer.stores.leased_saga import DueLook
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.stores.pool import Pool
from tests.support.inside import give_settings, lanes_if_any
from tests.support.logs import LogCapture, entries, times
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE
from tests.support.workers import Bench, Item, Running, note


class Held:
    """An app whose handler `send` waits at a gate, beside one that does not."""

    def __init__(self, source: str) -> None:
        self.app = App("held")
        self.begun: list[str] = []
        self.go = asyncio.Event()

        @self.app.idempotent_handler(source, key="id", name="send")
        async def send(item: Item, tx: Tx) -> None:
            self.begun.append(item.id)
            await note(tx, item)
            await self.go.wait()

        @self.app.idempotent_handler("postgres:others", key="id", name="other")
        async def other(item: Item, tx: Tx) -> None:
            await note(tx, item)


def paused(running: Running) -> bool:
    lanes = lanes_if_any(running.worker)
    return lanes is not None and lanes.paused("send")


@pytest.fixture(autouse=True)
def polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for what was decided comes soon here, where a test does not say otherwise."""
    tuned(monkeypatch, steering_pause=0.5, steering_retry_pause=0.1)


@pytest.mark.parametrize("source", ["postgres:mails", "memory:mails"])
async def test_it_takes_effect_while_messages_flow_and_each_is_run_once(bench: Bench, source: str) -> None:
    held = Held(source)
    items = [Item(f"{number:02}") for number in range(40)]
    async with bench.running(held.app) as running:
        await (
            bench.publish("mails", *items)
            if source.startswith("memory")
            else asyncio.to_thread(bench.enqueue, "mails", *items)
        )
        await running.until(lambda: len(held.begun) == 4)
        assert await held.app.pause("send", reason="wrong prices", by="ann")
        await running.until(lambda: paused(running))
        held.go.set()
        await running.until_count(applied=4)
        if source.startswith("postgres"):  # what was fetched and not begun is free for others, at no cost
            free = "select count(*)::int from idemconsumer.queue where deliveries = 0 and visible_at <= now()"
            await running.until(lambda: bench.do(free) == [(36,)])
        await asyncio.to_thread(bench.enqueue, "others", Item("of another handler"))
        await running.until_count(applied=5)
        assert len(held.begun) == 4
        assert await held.app.resume("send")
        await running.until_count(applied=41)
    assert sorted(bench.effects()) == sorted([*(item.id for item in items), "of another handler"])
    assert bench.attempts() == 0


async def test_a_worker_that_starts_meanwhile_starts_paused_and_says_so(bench: Bench, logged: LogCapture) -> None:
    held = Held("postgres:mails")
    held.go.set()
    bench.enqueue("mails", Item("waits"))
    give_settings(held.app, bench.settings())
    await held.app.pause("send", reason="wrong prices", by="ann")
    async with bench.running(held.app) as first:
        await first.until(lambda: times(logged, "consuming") == 1)
        bench.enqueue("others", Item("other"))
        await first.until_count(applied=1)
    (entry,) = entries(logged, "handler paused")
    assert (entry["handler"], entry["by"], entry["reason"]) == ("send", "ann", "wrong prices")
    async with bench.running(held.app) as second:
        assert not held.begun
        await held.app.resume("send")
        await second.until_count(applied=1)
    assert bench.effects() == ["other", "waits"]


async def test_what_cannot_be_read_changes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    held = Held("postgres:mails")
    held.go.set()
    alone, refused = Pool.alone, list[str]()

    async def refusing(pool: Pool, name: str, params: dict[str, Any], **more: Any) -> Any:
        if name == "register_process" and len(refused) < 2:
            refused.append(name)
            assert not times(logged, "consuming")
            raise StoreUnavailable("away")
        return await alone(pool, name, params, **more)

    monkeypatch.setattr(Pool, "alone", refusing)
    tuned(monkeypatch, steering_retry_pause=0.02)
    give_settings(held.app, bench.settings())
    await held.app.pause("send")
    async with bench.running(held.app) as running:
        await running.until(lambda: times(logged, "consuming") == 1)
        assert len(refused) == 2
        seen_again = "select count(*)::int from idemconsumer.process where seen_at > started_at"
        await running.until(lambda: bench.do(seen_again) == [(1,)])
        asked = 0

        async def away(session: PostgresSession, statement: str, params: Any) -> Any:
            nonlocal asked
            asked += 1
            raise StoreUnavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(PostgresSession, "ask", away)
            tuned(patch, steering_notice_pause=0.02)
            await running.until(lambda: asked >= 1)
            bench.enqueue("mails", Item("waits"))
            await held.app.resume("send")
            seen = asked
            await running.until(lambda: asked >= seen + 3)
            assert paused(running)
        await running.until_count(applied=1)
    assert times(logged, "paused handlers could not be read, using the last known ones") == 1


async def test_its_sagas_are_not_taken_and_go_on_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("held")
    look, looks = PostgresLeases.look, list[DueLook]()

    async def looked(leases: PostgresLeases, *args: Any) -> DueLook:
        looks.append(await look(leases, *args))
        return looks[-1]

    monkeypatch.setattr(PostgresLeases, "look", looked)

    @app.idempotent_handler("postgres:rides", key="id", name="send")
    async def send(item: Item, saga: Saga) -> None:
        await saga.tx("first", note, item)
        await saga.wait("settled", timeout="1h")
        await saga.tx("second", note, item)

    async with bench.running(app) as running:
        bench.enqueue("rides", Item("a"))
        waiting = "select count(*)::int from idemconsumer.saga where worker is null and parked is null"
        await running.until(lambda: bench.do(waiting) == [(1,)])
        await app.pause("send")
        await running.until(lambda: paused(running))
        bench.enqueue("rides", Item("b"))
        await app.signal(send, key="a", name="settled")
        due = "select count(*)::int from idemconsumer.saga where worker is null and due <= now()"
        await running.until(lambda: bench.do(due) == [(1,)])
        seen = len(looks)
        await running.until(lambda: len(looks) >= seen + 2)
        assert (bench.do(due), bench.effects()) == ([(1,)], ["a"])
        assert not any(each.due for each in looks[seen:])  # so nobody looks for it twice a second
        await app.resume("send")
        await running.until(lambda: bench.effects() == ["a", "a", "b"] or bench.effects() == ["a", "b", "a"])


async def test_a_notice_takes_effect_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, steering_pause=3600.0)
    held = Held("memory:mails")
    async with bench.running(held.app) as running:
        seen = "select count(*)::int from idemconsumer.process where seen_at > started_at"
        await running.until(lambda: bench.do(seen) == [(1,)])  # the look at the start is over
        await held.app.pause("send")
        async with asyncio.timeout(PATIENCE):
            await running.until(lambda: paused(running))
        told = "select handlers -> 'send' ->> 'paused' from idemconsumer.process"
        await running.until(lambda: bench.do(told) == [("true",)])  # and others see that it is obeyed


async def test_a_name_that_is_no_handler_is_refused(bench: Bench) -> None:
    held = Held("memory:mails")
    with pytest.raises(ConfigurationError, match="has no handler 'sent'; it has send, other"):
        await held.app.pause("sent")
