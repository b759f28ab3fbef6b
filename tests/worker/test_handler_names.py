"""A handler is what its name says, whatever its function is called (L68)."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer import App, Saga, Signalled, Tx
from idemconsumer.admin.dead_letters import Which
from idemconsumer.admin.redrives import Redrives
from idemconsumer.rules.values import OutcomeKind, State
from idemconsumer.settings import Settings
from tests.support.workers import SCHEMA, Bench, Item, Running, note


class Service:
    """One deployment: `pay` takes messages; `book` is a saga that starts the saga `ride`, and waits for a word. Their
    functions are called so, and by a word behind that; `named`: the handlers keep their names."""

    def __init__(self, renamed: str = "", *, named: bool = False) -> None:
        self.app = App("shop")
        self.fails: list[Exception] = []

        def handler(source: str, **options: Any) -> Any:
            def decorated(fn: Any) -> Any:
                given = {"name": fn.__name__} if named else {}
                fn.__name__ += renamed
                return self.app.idempotent_handler(source, key="id", **given, **options)(fn)

            return decorated

        @handler("postgres:pays", backoff="1h, 1h", max_attempts=2)
        async def pay(item: Item, tx: Tx) -> str:
            await note(tx, item)
            if self.fails:
                raise self.fails.pop()
            return f"paid {item.id}"

        @handler("postgres:rides")
        async def ride(item: Item, saga: Saga) -> str:
            await saga.tx("ridden", note, item)
            return item.id

        @handler("postgres:books")
        async def book(item: Item, saga: Saga) -> str:
            child = await saga.start("ride", ride, Item(f"ride of {item.id}"))
            word = await saga.wait("word")
            rode = await saga.result("rode", child)
            return f"{word}, {rode}"

        self.pay, self.ride, self.book = pay, ride, book


@pytest.fixture(autouse=True)
def configured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)


def fall_due(bench: Bench) -> None:
    """The hours until then."""
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")


async def asleep(running: Running, bench: Bench) -> None:
    await running.until(
        lambda: (
            bench.do("select count(*) from idemconsumer.saga where worker is null and signals is not null") == [(1,)]
        )
    )


async def test_its_messages_are_the_same_beside_workers_that_have_its_function_from_before(bench: Bench) -> None:
    old, new = Service(), Service("_now", named=True)
    async with bench.running(old.app) as before:
        bench.enqueue("pays", Item("a"))
        await before.until_count(applied=1)
        async with bench.running(new.app) as after:
            bench.enqueue("pays", *[Item(key) for key in "abcabc"])
            await after.until(lambda: sum(sum(each.worker.counts.values()) for each in (before, after)) == 7)
    bench.enqueue("pays", *[Item(key) for key in "abcd"])
    async with bench.running(new.app) as after:
        await after.until_count(duplicate=3, applied=1)
        result = await new.app.result(new.pay, key="a")
    assert (result.kind, result.result) == (OutcomeKind.DUPLICATE, b'"paid a"')
    await new.app.close()
    assert sorted(bench.effects()) == ["a", "b", "c", "d"]


async def test_what_waits_for_it_is_run_by_its_function_of_another_name(bench: Bench) -> None:
    """A saga that sleeps, its child that has not begun, an attempt that is stored, and a dead letter."""
    old, new = Service(), Service("_now", named=True)
    old.fails = [ValueError(), ValueError("dead"), ValueError("dead")]
    async with bench.running(old.app, handlers="pay,book") as running:
        bench.enqueue("pays", Item("dies"))
        await running.until_count(retrying=1)
        fall_due(bench)
        await running.until_count(dead=1)
        bench.enqueue("pays", Item("waits"))
        await running.until_count(retrying=2)
        await old.app.start(old.book, Item("k"), key="k")
        await asleep(running, bench)
    await old.app.close()
    assert bench.effects() == []

    async with bench.running(new.app) as running:
        await running.until(lambda: bench.effects() == ["ride of k"])
        assert await new.app.signal(new.book, key="k", name="word", payload="hello") is Signalled.STORED
        result = await new.app.result(new.book, key="k", wait="20s")
        assert (result.state, result.result) == (State.COMPLETED, b'"hello, ride of k"')
        fall_due(bench)
        await Redrives(bench.dsn, SCHEMA).redrive(Which(handler="pay"), by="ann", run="r")
        await running.until(lambda: sorted(bench.effects()) == ["dies", "ride of k", "waits"])
    await new.app.close()
    states = bench.do(
        "select distinct name, state from idemconsumer.record join idemconsumer.scope s on s.id = scope_id"
    )
    assert sorted(states) == [("shop/-/book", 3), ("shop/-/pay", 3), ("shop/-/ride", 3)]


async def test_under_another_name_each_key_is_new(bench: Bench) -> None:
    for service in (Service(), Service("_now")):
        bench.enqueue("pays", Item("a"))
        async with bench.running(service.app) as running:
            await running.until_count(applied=1)
    assert bench.effects() == ["a", "a"]


def test_a_schedule_is_known_by_the_name_of_its_handler() -> None:
    app = App("shop")

    @app.every("0 3 * * *")
    @app.idempotent_handler("kafka:reports", key="slot", name="report")
    async def nightly(order: dict[str, Any], saga: Saga) -> None: ...

    assert [each.name for each in app.schedules(app.bound_handlers(Settings()))] == ["report"]
