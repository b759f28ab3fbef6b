"""Before what was accepted is rejected by `max_age` its handler's reconcile is asked, by one sweeper (H47)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from idemconsumer import (
    App,
    Done,
    Message,
    NotDone,
    Progress,
    Reject,
    Result,
    Retry,
    Saga,
    StoreUnavailable,
    Tx,
    Unknown,
)
from idemconsumer.ports.observer import Point
from idemconsumer.rules.values import State
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.overdue import Overdue, asking, take_overdue
from idemconsumer.stores.pool import Pool
from idemconsumer.worker.deadlines import Deadlines
from tests.support.inside import give_settings, pool_of
from tests.support.waiting import PATIENCE
from tests.support.workers import SCHEMA, Bench, Item, note

NOT_IN_TIME = (Progress.FAILED, 504, "not_in_time")


class Shop:
    """Everything it accepts is too late at once; its reconcile does what `answer` says."""

    def __init__(self) -> None:
        self.app = App("shop", publishes=())
        self.asked: list[str] = []
        self.answer: Callable[[Item, Tx, Message], Any] = lambda item, tx, message: NotDone()
        options: Any = {"max_age": 1e-6, "reconcile": self.reconcile, "max_attempts": 3, "backoff": "1h, 1h"}

        @self.app.idempotent_handler("memory:q", key="id", **options)
        async def pay(item: Item, tx: Tx) -> None:
            await note(tx, item)

        @self.app.idempotent_handler("memory:rides", key="id", **options | {"backoff": "20s, 20s"})
        async def ride(item: Item, saga: Saga) -> None: ...

        self.pay, self.ride = pay, ride

    async def reconcile(self, item: Item, tx: Tx, message: Message) -> Any:
        self.asked.append(f"{message.tenant}/{message.key}/{item.id}")
        answer = self.answer(item, tx, message)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def found(self, key: str = "k", kind: str = "pay") -> tuple[Progress, int | None, str | None]:
        found = await self.app.accepted(getattr(self, kind), key=key, tenant="t")
        return found.progress, found.status, found.reason


@pytest.fixture
async def shop(bench: Bench) -> AsyncIterator[Shop]:
    shop = Shop()
    give_settings(shop.app, bench.settings())
    yield shop
    await shop.app.close()


@pytest.fixture
async def sweepers(bench: Bench, shop: Shop) -> AsyncIterator[list[Deadlines]]:
    store = await PostgresStore.open(bench.dsn, SCHEMA, connections=8, longest_run=30.0)
    handlers = shop.app.bound_handlers(bench.settings())
    yield [Deadlines(store.pool, handlers) for _ in range(4)]
    await store.close()


async def accept(shop: Shop, *keys: str, kind: str = "pay") -> None:
    for key in keys or ("k",):
        await shop.app.accept(getattr(shop, kind), Item("a"), key=key, tenant="t")


def raises(error: Exception) -> Callable[..., Any]:
    def act(*_: object) -> None:
        raise error

    return act


@pytest.mark.parametrize("kind", ["pay", "ride"])
async def test_what_was_done_already_is_done_with_what_the_question_wrote(
    bench: Bench, shop: Shop, sweepers: list[Deadlines], kind: str
) -> None:
    async def done(item: Item, tx: Tx, message: Message) -> Any:
        await note(tx, Item("found"))
        return Done(Result({"id": 1}, 201, [("Location", "/1")]))

    shop.answer = done
    await accept(shop, kind=kind)
    await sweepers[0].ask()
    assert await sweepers[1].ask() is None
    assert (shop.asked, bench.effects()) == (["t/k/a"], ["found"])
    found = await shop.app.accepted(getattr(shop, kind), key="k", tenant="t")
    assert (found.progress, found.status, found.body) == (Progress.DONE, 201, b'{"id":1}')
    worker = await bench.until_empty(shop.app)
    assert worker.counts == {"duplicate": 1}
    assert bench.do("select until, body, headers from idemconsumer.accepted") == [(None, None, None)]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda *_: NotDone(), NOT_IN_TIME),
        (raises(Reject("taken", {"by": "ann"}, status=409)), (Progress.FAILED, 409, "taken")),
    ],
)
async def test_what_was_not_done_is_rejected_and_nothing_of_the_question_stays(
    bench: Bench, shop: Shop, sweepers: list[Deadlines], answer: Callable[..., Any], told: object
) -> None:
    async def asked(item: Item, tx: Tx, message: Message) -> Any:
        await note(tx, Item("found"))
        return answer()

    shop.answer = asked
    await accept(shop)
    await sweepers[0].ask()
    assert await sweepers[0].ask() is None
    assert await shop.found() == told
    await bench.until_empty(shop.app)
    assert (bench.effects(), shop.asked) == ([], ["t/k/a"])


@pytest.mark.parametrize("waits", [lambda *_: Unknown(), raises(Retry(after="1h"))])
async def test_what_may_still_come_waits_longer_and_may_run(
    bench: Bench, shop: Shop, sweepers: list[Deadlines], waits: Callable[..., Any]
) -> None:
    shop.answer = waits
    await accept(shop)
    for _ in range(5):  # more than max_attempts
        bench.do("update idemconsumer.accepted set until = clock_timestamp()")
        await sweepers[0].ask()
        assert await sweepers[0].ask() is None, "not yet"
        assert await shop.found() == (Progress.PENDING, None, None)
        ((seconds,),) = bench.do("select extract(epoch from until - clock_timestamp())::int from idemconsumer.accepted")
        assert 2_600 < seconds <= 3_600
    await bench.until_empty(shop.app)
    assert (bench.effects(), len(shop.asked)) == (["a"], 5)
    bench.do("update idemconsumer.accepted set until = clock_timestamp()")
    await sweepers[0].ask()
    assert len(shop.asked) == 5, "it has ended"
    assert bench.do("select until, body, headers from idemconsumer.accepted") == [(None, None, None)]


async def test_a_question_is_not_asked_again_at_once(bench: Bench, shop: Shop, sweepers: list[Deadlines]) -> None:
    shop.answer = raises(Retry(after=0))
    await accept(shop)
    await sweepers[0].ask()
    assert await sweepers[0].ask() is None
    assert len(shop.asked) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        raises(ValueError("down")),
        raises(StoreUnavailable("of another app")),
        lambda *_: None,
        lambda *_: Done(object()),
    ],
)
async def test_a_question_that_fails_each_time_has_an_end(
    bench: Bench, shop: Shop, sweepers: list[Deadlines], wrong: Callable[..., Any]
) -> None:
    shop.answer = wrong
    await accept(shop)
    for _ in range(3):
        assert await shop.found() == (Progress.PENDING, None, None)
        await sweepers[0].ask()
        bench.do("update idemconsumer.accepted set until = clock_timestamp() where until is not null")
    assert await shop.found() == NOT_IN_TIME
    assert await sweepers[0].ask() is None
    assert len(shop.asked) == 3


async def test_a_question_that_kills_who_asks_has_an_end(bench: Bench, shop: Shop, sweepers: list[Deadlines]) -> None:
    """What was taken, and of which nothing is heard any more, counts; what only a shutdown has cut off does not."""
    await accept(shop)
    inside = asyncio.Event()

    async def slow(item: Item, tx: Tx, message: Message) -> Any:
        inside.set()
        await asyncio.Event().wait()

    shop.answer = slow
    for _ in range(4):  # more than max_attempts
        inside.clear()
        cut_off = asyncio.create_task(sweepers[0].ask())
        async with asyncio.timeout(PATIENCE):
            await inside.wait()
        cut_off.cancel()
        await asyncio.wait([cut_off])
        bench.do("update idemconsumer.accepted set until = clock_timestamp()")
    names = list(sweepers[0]._asked)
    for _ in range(3):
        assert await shop.found() == (Progress.PENDING, None, None)
        assert await take_overdue(pool_of(sweepers[0]), names, 0.0) is not None
    shop.answer = lambda *_: Unknown()
    await sweepers[0].ask()
    assert (await shop.found(), len(shop.asked)) == (NOT_IN_TIME, 4)


async def test_of_many_sweepers_each_is_asked_by_one(bench: Bench, shop: Shop, sweepers: list[Deadlines]) -> None:
    inside, go = asyncio.Event(), asyncio.Event()

    async def slow(item: Item, tx: Tx, message: Message) -> Any:
        inside.set()
        await go.wait()
        return NotDone()

    shop.answer = slow
    await accept(shop)
    first = asyncio.create_task(sweepers[0].ask())
    async with asyncio.timeout(PATIENCE):
        await inside.wait()
    assert [await sweeper.ask() for sweeper in sweepers[1:]] == [None] * 3
    go.set()
    await first
    shop.answer = lambda *_: NotDone()
    await accept(shop, *"abcdef")
    await asyncio.gather(*(sweeper._ask_all() for sweeper in sweepers))
    assert sorted(shop.asked) == sorted(["t/k/a", *(f"t/{key}/a" for key in "abcdef")])
    assert [await shop.found(key) for key in "kabcdef"] == [NOT_IN_TIME] * 7


async def test_a_sweeper_that_dies_is_followed_and_decides_nothing_any_more(
    bench: Bench, shop: Shop, sweepers: list[Deadlines]
) -> None:
    """One dies while it asks. Another one has its answer already when the next has asked, and is late with it."""
    inside, go = asyncio.Event(), asyncio.Event()

    async def slow(item: Item, tx: Tx, message: Message) -> Any:
        inside.set()
        await go.wait()
        return NotDone()

    shop.answer = slow
    await accept(shop)
    dies = asyncio.create_task(sweepers[0].ask())
    async with asyncio.timeout(PATIENCE):
        await inside.wait()
    dies.cancel()
    await asyncio.wait([dies])
    assert await sweepers[1].ask() is None, "as long as it might live"
    ((seconds,),) = bench.do("select extract(epoch from until - clock_timestamp())::int from idemconsumer.accepted")
    assert 50 < seconds <= 60, "its time limit, and some more"

    async def late(item: Item, tx: Tx, message: Message) -> Any:
        bench.do("update idemconsumer.accepted set asked = asked + 1")  # by another one, in the end
        return NotDone()

    for answer, told in ((late, Progress.PENDING), (lambda *_: NotDone(), Progress.FAILED)):
        bench.do("update idemconsumer.accepted set until = clock_timestamp()")
        shop.answer = answer
        await sweepers[1].ask()
        assert (await shop.found())[0] is told


async def test_a_sweeper_that_was_frozen_before_it_asks_leaves_it_to_the_one_that_has_asked(
    bench: Bench, shop: Shop, sweepers: list[Deadlines], monkeypatch: pytest.MonkeyPatch
) -> None:
    def frozen(pool: Pool, taken: Overdue) -> Any:
        bench.do("update idemconsumer.accepted set asked = asked + 1")  # by another one, meanwhile
        return asking(pool, taken)

    monkeypatch.setattr("idemconsumer.worker.deadlines.asking", frozen)
    await accept(shop)
    await sweepers[0].ask()
    assert (shop.asked, await shop.found()) == ([], (Progress.PENDING, None, None))


async def test_what_somebody_has_in_hand_is_not_asked_about_and_does_not_run_while_it_is(
    bench: Bench, shop: Shop, sweepers: list[Deadlines]
) -> None:
    await accept(shop)
    digest = shop.pay.plan.identity("shop").digest("t", "k")
    async with bench.rival(digest) as release:
        await sweepers[0].ask()
        await release()
    assert (shop.asked, await shop.found()) == ([], (Progress.PENDING, None, None))
    bench.do("update idemconsumer.accepted set until = clock_timestamp()")
    inside, go = asyncio.Event(), asyncio.Event()

    async def slow(item: Item, tx: Tx, message: Message) -> Any:
        inside.set()
        await go.wait()
        return Done(None)

    shop.answer = slow
    asking = asyncio.create_task(sweepers[0].ask())
    async with asyncio.timeout(PATIENCE):
        await inside.wait()
    async with bench.running(shop.app) as running:
        await running.until(lambda: running.points.count(Point.DISPATCHED) == 1)
        assert await shop.found() == (Progress.RUNNING, None, None)
        assert bench.effects() == []
        go.set()
        await asking
        await running.until_count(duplicate=1)
    assert (bench.effects(), (await shop.found())[0]) == ([], Progress.DONE)


async def test_what_was_accepted_before_there_was_a_reconcile_is_rejected(
    bench: Bench, shop: Shop, sweepers: list[Deadlines]
) -> None:
    await accept(shop)
    bench.do("update idemconsumer.accepted set body = null, headers = null")
    await sweepers[0].ask()
    assert (shop.asked, await shop.found()) == ([], NOT_IN_TIME)


async def test_a_worker_asks(bench: Bench, shop: Shop) -> None:
    await accept(shop)
    bench.do("update idemconsumer.queue set visible_at = clock_timestamp() + interval '1 hour'")
    async with bench.running(shop.app) as running:
        await running.until(lambda: bench.do("select state from idemconsumer.record") == [(State.FAILED,)])
    assert shop.asked == ["t/k/a"]
