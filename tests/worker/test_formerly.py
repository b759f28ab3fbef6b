"""A handler that was renamed is the one that it was: its keys, its queues and its sagas stay its own (L68, L69)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemconsumer import App, ConfigurationError, Saga, Signalled, Tx
from idemconsumer.admin.dead_letters import Which
from idemconsumer.admin.redrives import Redrives
from idemconsumer.admin.sagas import SagaAdmin
from idemconsumer.cli.inspect import findings
from idemconsumer.rules.values import OutcomeKind, State
from tests.support.workers import SCHEMA, Bench, Item, Running, note

Formerly = Callable[[str], Any]


class Service:
    """One deployment: `pay` takes messages; `book` is a saga that starts the saga `ride`, and waits for a word. All are
    called so, and by a word behind that."""

    def __init__(self, renamed: str = "", formerly: Formerly | None = None, app: str = "shop") -> None:
        self.app = App(app)
        self.fails: list[Exception] = []

        def called(name: str, **more: Any) -> Any:
            former = {} if formerly is None else {"formerly": formerly(name)}
            return {"key": "id", "name": name + renamed, **former, **more}

        put_off = {"retry": "scheduled", "backoff": "1h, 1h", "max_attempts": 2}

        @self.app.idempotent_handler("postgres:pays", **called("pay", **put_off))
        async def pay(item: Item, tx: Tx) -> str:
            await note(tx, item)
            if self.fails:
                raise self.fails.pop()
            return f"paid {item.id}"

        @self.app.idempotent_handler("postgres:rides", **called("ride"))
        async def ride(item: Item, saga: Saga) -> str:
            await saga.tx("ridden", note, item)
            return item.id

        @self.app.idempotent_handler("postgres:books", **called("book"))
        async def book(item: Item, saga: Saga) -> str:
            child = await saga.start("ride", ride, Item(f"ride of {item.id}"))
            word = await saga.wait("word")
            rode = await saga.result("rode", child)
            return f"{word}, {rode}"

        self.pay, self.ride, self.book = pay, ride, book


@pytest.fixture(autouse=True)
def configured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)


def same(name: str) -> str:
    return name


def of_app(name: str) -> str:
    return f"shop/{name}"


def fall_due(bench: Bench) -> None:
    """The hours until then."""
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")


async def asleep(running: Running, bench: Bench, sagas: int = 1) -> None:
    await running.until(
        lambda: (
            bench.do("select count(*) from idemconsumer.saga where worker is null and signals is not null")
            == [(sagas,)]
        )
    )


renamed = pytest.mark.parametrize(("formerly", "app"), [(same, "shop"), (of_app, "store")])


@renamed
async def test_its_messages_are_the_same_beside_workers_that_know_its_former_name(
    bench: Bench, formerly: Formerly, app: str
) -> None:
    old, new = Service(), Service("_now", formerly, app)
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


@renamed
async def test_what_waits_for_it_is_found_and_run_under_its_new_name(
    bench: Bench, formerly: Formerly, app: str
) -> None:
    """A saga that sleeps, its child that has not begun, an attempt that is stored, and a dead letter."""
    old, new = Service(), Service("_now", formerly, app)
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


async def test_it_is_asked_told_and_ended_under_its_new_name(bench: Bench) -> None:
    old, new = Service(), Service("_now", same)
    async with bench.running(old.app, handlers="book") as running:
        await old.app.start(old.book, Item("k"), key="k")
        await asleep(running, bench)
    assert [each.text async for each in findings(new.app, bench.settings()) if "sagas of" in each.subject] == []
    status = await new.app.saga(new.book, key="k")
    assert status is not None
    assert await new.app.signal(new.book, key="other", name="word") is Signalled.EARLY
    await new.app.cancel(new.book, key="k")
    async with bench.running(new.app):
        assert (await new.app.result(new.book, key="k", wait="20s")).state is State.FAILED
    await new.app.close()
    await old.app.close()


# ---------------------------------------------------------------------------------- renamed before there was formerly=
async def test_what_began_under_a_name_that_is_not_the_first_is_found_and_run_as_that(bench: Bench) -> None:
    """It had been renamed, and has recorded messages since: these go on to be the ones that count (L69)."""
    old, since = Service(), Service("_now")
    new = Service("_now", lambda name: (f"{name}_now", name))
    for sagas, key in enumerate(("moved", "old"), 1):
        async with bench.running(old.app, handlers="book") as running:
            await old.app.start(old.book, Item(key), key=key)
            await asleep(running, bench, sagas)
        if key == "moved":
            assert await SagaAdmin(bench.dsn, SCHEMA).move(("shop", "book"), ("shop", "book_now"), by="ann") == (1, 0)
    async with bench.running(since.app) as running:
        bench.enqueue("pays", Item("a"))
        await since.app.start(since.book, Item("new"), key="new")
        await running.until_count(applied=2)
        await asleep(running, bench, 3)
    async with bench.running(new.app) as running:
        bench.enqueue("pays", Item("a"))
        await running.until_count(duplicate=1)
        for key in ("old", "moved", "new"):
            assert await new.app.signal(new.book, key=key, name="word", payload=key) is Signalled.STORED
            result = await new.app.result(new.book, key=key, wait="20s")
            assert result.result == f'"{key}, ride of {key}"'.encode()
    for each in (old, since, new):
        await each.app.close()
    assert sorted(bench.effects()) == ["a", "ride of moved", "ride of new", "ride of old"]


@pytest.mark.parametrize(
    ("formerly", "write"),
    [("pay", r'formerly=\("pay_now", "pay"\)'), (("pay", "paid"), r'formerly=\("pay_now", "pay", "paid"\)')],
)
async def test_a_worker_that_would_forget_what_was_recorded_last_does_not_begin(
    bench: Bench, formerly: Any, write: str
) -> None:
    for each in (Service(), Service("_now")):
        async with bench.running(each.app, handlers=each.pay.name) as running:
            bench.enqueue("pays", Item("a"))
            await running.until_count(applied=1)
    new = Service("_now", lambda name: formerly if name == "pay" else name)
    with pytest.raises(ConfigurationError, match=f"recorded as shop/pay_now when it last ran, .* first, {write}"):
        await bench.until_empty(new.app)
    bench.do("delete from idemconsumer.record where changed_at = (select max(changed_at) from idemconsumer.record)")
    await bench.until_empty(new.app)
