"""What is accepted now is run later, once, and is told of under its key (H40 to H44)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import AsyncMock

import psycopg
import pytest
from msgspec.structs import replace

from idemconsumer import (
    Accepted,
    App,
    BadMessage,
    ConfigurationError,
    Message,
    Progress,
    Reject,
    Result,
    Saga,
    StoreUnavailable,
    Tx,
)
from idemconsumer.admin.dead_letters import ALL
from idemconsumer.admin.redrives import Redrives
from idemconsumer.errors import CommitUnknown, Contention
from idemconsumer.message import codecs
from idemconsumer.message.origin import ORIGIN, Pending, with_origin
from idemconsumer.ports.broker import Outgoing
from idemconsumer.rules.progress import progress
from idemconsumer.rules.values import State
from idemconsumer.stores import acceptance as storing
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.worker.deadlines import Deadlines
from tests.support.inside import give_settings, inline_of, pool_of
from tests.support.tuning import tuned
from tests.support.workers import SCHEMA, Bench, Item, body, note

PENDING = Accepted(Progress.PENDING)
NEW = Accepted(Progress.PENDING, new=True)


class Shop:
    """A handler and a saga that do what `act` says."""

    def __init__(self, max_age: float = 900.0, **options: Any) -> None:
        self.app = App("shop", publishes=())
        self.act: Callable[[Message], object] = lambda message: {"paid": message.key}
        self.seen: list[Message] = []

        @self.app.idempotent_handler("memory:q", key="id", max_age=max_age, **options)
        async def pay(item: Item, tx: Tx, message: Message) -> object:
            await note(tx, item)
            self.seen.append(message)
            return self.act(message)

        @self.app.idempotent_handler("memory:rides", key="id", max_age=max_age)
        async def ride(item: Item, saga: Saga, message: Message) -> object:
            await saga.tx("noted", note, item)
            return self.act(message)

        self.pay, self.ride = pay, ride

    async def accepted(self, handler: Any, **of: Any) -> Accepted:
        """Without its time, which is another one each time."""
        return replace(await self.app.accepted(handler, **of), created_at=None)

    async def progress(self, key: str = "k", tenant: str | None = None) -> Progress:
        return (await self.app.accepted(self.pay, key=key, tenant=tenant)).progress


@pytest.fixture
async def shop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shop]:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    shop = Shop()
    yield shop
    await shop.app.close()


def counts(bench: Bench) -> tuple[int, int, int]:
    """Messages in queues, records, and dead letters."""
    return tuple(
        bench.do(f"select count(*) from idemconsumer.{table}")[0][0] for table in ("queue", "record", "dead_letter")
    )


# ------------------------------------------------------------------------------------------------- accepted, and run
@pytest.mark.parametrize("kind", ["pay", "ride"])
async def test_it_is_on_record_at_once_and_is_run_once_with_what_was_given(bench: Bench, shop: Shop, kind: str) -> None:
    handler = getattr(shop, kind)
    assert await shop.app.accept(handler, Item("a"), key="k", tenant="t", headers={"n": "v"}) == NEW
    assert counts(bench) == (1, 1, 0)
    assert await shop.accepted(handler, key="k", tenant="t") == PENDING

    await bench.until_empty(shop.app)
    done = Accepted(Progress.DONE, body=b'{"paid":"k"}', content_type="application/json")
    assert await shop.accepted(handler, key="k", tenant="t") == done
    assert await shop.app.accept(handler, Item("a"), key="k", tenant="t") == done
    assert (bench.effects(), counts(bench)) == (["a"], (0, 1, 0))
    if kind == "pay":
        (seen,) = shop.seen
        assert (seen.key, seen.tenant, seen.headers["n"], seen.attempt) == ("k", "t", "v", 1)
        assert ORIGIN not in seen.headers


async def test_a_repeat_stores_nothing_however_far_the_first_one_is(bench: Bench, shop: Shop) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    @shop.app.idempotent_handler("memory:slow", key="id")
    async def slow(item: Item, tx: Tx) -> None:
        begun.set()
        await go.wait()
        await note(tx, item)

    assert await shop.app.accept(slow, Item("a"), key="k") == NEW
    assert await shop.app.accept(slow, b'{"entity": "", "id": "a"}', key="k") == PENDING, "the same value"
    assert counts(bench) == (1, 1, 0)
    async with bench.running(shop.app) as running:
        await running.until(begun.is_set)
        assert await shop.app.accept(slow, Item("a"), key="k") == PENDING
        assert await shop.accepted(slow, key="k") == Accepted(Progress.RUNNING)
        go.set()
        await running.until_count(applied=1)
    assert await shop.app.accept(slow, Item("a"), key="k") == Accepted(Progress.DONE)
    assert (bench.effects(), counts(bench)) == (["a"], (0, 1, 0))


async def test_another_payload_is_a_conflict_and_no_dead_letter(bench: Bench, shop: Shop) -> None:
    await shop.app.accept(shop.pay, Item("a"), key="k")
    for far in (Progress.PENDING, Progress.DONE):
        assert await shop.app.accept(shop.pay, Item("b"), key="k") == Accepted(far, conflict=True), "and no result"
        await bench.until_empty(shop.app)
    assert (bench.effects(), counts(bench)) == (["a"], (0, 1, 0))


async def test_of_many_at_once_one_is_stored(bench: Bench, shop: Shop) -> None:
    calls = [shop.app.accept(shop.pay, Item("a"), key="k") for _ in range(8)]
    assert sorted(await asyncio.gather(*calls), key=lambda each: each.new) == [PENDING] * 7 + [NEW]
    assert counts(bench) == (1, 1, 0)


async def test_another_tenant_finds_nothing(bench: Bench, shop: Shop) -> None:
    await shop.app.accept(shop.pay, Item("a"), key="k", tenant="one")
    assert [await shop.progress(tenant=each) for each in ("one", "two", None)] == [
        Progress.PENDING, Progress.UNKNOWN, Progress.UNKNOWN,
    ]  # fmt: skip
    assert (await shop.app.accept(shop.pay, Item("b"), key="k", tenant="two")).new
    forged = {"idemconsumer-tenant": "one", "Idemconsumer-Origin": "{}"}
    assert (await shop.app.accept(shop.pay, Item("b"), key="k", headers=forged)).new
    assert counts(bench)[:2] == (3, 3)


async def test_what_the_handler_could_not_take_is_refused_at_once(bench: Bench, shop: Shop) -> None:
    with pytest.raises(BadMessage, match="undecodable"):
        await shop.app.accept(shop.pay, b"{", key="k")
    with pytest.raises(BadMessage, match="key_"):
        await shop.app.accept(shop.pay, Item("a"), key="")
    for tenant in ("", "a\0", "\ud800", "a" * 1_025):
        with pytest.raises(BadMessage, match=r"key_.*tenant"):
            await shop.app.accept(shop.pay, Item("a"), key="k", tenant=tenant)
    with pytest.raises(ConfigurationError, match="not a handler of this app"):
        await shop.app.accept(Shop().pay, Item("a"), key="k")
    with pytest.raises(ConfigurationError, match="not a handler of this app"):
        await shop.app.accepted(Shop().pay, key="k")
    assert counts(bench) == (0, 0, 0)


@pytest.mark.parametrize("commits", [True, False])
async def test_in_a_transaction_it_is_accepted_if_and_only_if_that_commits(
    bench: Bench, shop: Shop, commits: bool
) -> None:
    async with await psycopg.AsyncConnection.connect(bench.dsn) as connection:
        assert await shop.app.accept(shop.pay, Item("a"), key="k", tx=connection) == NEW
        assert await shop.app.accept(shop.pay, Item("a"), key="k", tx=connection) == PENDING
        with pytest.raises(StoreUnavailable, match="cannot be claimed now"):  # a second one, elsewhere
            async with await psycopg.AsyncConnection.connect(bench.dsn) as other:
                await shop.app.accept(shop.pay, Item("a"), key="k", tx=other)
        assert counts(bench) == (0, 0, 0)
        await (connection.commit() if commits else connection.rollback())
    assert counts(bench) == ((1, 1, 0) if commits else (0, 0, 0))
    await bench.until_empty(shop.app)
    assert bench.effects() == (["a"] if commits else [])


async def test_a_handler_accepts_in_its_own_transaction(bench: Bench, shop: Shop) -> None:
    fails = [ValueError("once")]

    @shop.app.idempotent_handler("memory:orders", key="id", backoff="1ms, 1ms")
    async def order(item: Item, tx: Tx) -> None:
        await shop.app.accept(shop.pay, item, key=item.id, tx=tx)
        if fails:
            raise fails.pop()

    await bench.publish("orders", Item("a"), Item("a"))
    await bench.until_empty(shop.app)
    await bench.until_empty(shop.app)
    assert (bench.effects(), counts(bench)) == (["a"], (0, 2, 0))


async def test_an_answer_to_commit_that_is_lost_is_no_second_message(
    bench: Bench, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = await inline_of(shop.app)
    accept, lost = inline.accept, [CommitUnknown("lost")]

    async def loses(acceptance: storing.Acceptance) -> object:
        stored = await accept(acceptance)
        if lost:
            raise lost.pop()
        return stored

    monkeypatch.setattr(inline, "accept", loses)
    assert await shop.app.accept(shop.pay, Item("a"), key="k") == PENDING
    assert counts(bench) == (1, 1, 0)


@pytest.mark.parametrize(
    "then",
    [
        StoreUnavailable("away"), Contention("held"), CommitUnknown("lost again"),
        ConfigurationError("the schema is gone"), RuntimeError("of a driver that nobody knows"),
    ],
)  # fmt: skip
async def test_what_may_be_stored_is_never_told_as_not_stored(
    bench: Bench, shop: Shop, monkeypatch: pytest.MonkeyPatch, then: Exception
) -> None:
    """The answer to COMMIT is lost, and then nobody can be asked."""
    tuned(monkeypatch, accepting_patience=0.0)
    inline = await inline_of(shop.app)
    accept, calls = inline.accept, list[int]()

    async def loses(acceptance: storing.Acceptance) -> object:
        calls.append(1)
        if len(calls) > 1:
            raise then
        await accept(acceptance)
        raise CommitUnknown("lost")

    monkeypatch.setattr(inline, "accept", loses)
    with pytest.raises(CommitUnknown):
        await shop.app.accept(shop.pay, Item("a"), key="k")
    assert (len(calls), counts(bench)) == (2, (1, 1, 0))


async def test_a_connection_without_a_transaction_is_refused(bench: Bench, shop: Shop) -> None:
    async with await psycopg.AsyncConnection.connect(bench.dsn, autocommit=True) as connection:
        with pytest.raises(ConfigurationError, match="outside a transaction"):
            await shop.app.accept(shop.pay, Item("a"), key="k", tx=connection)
        assert counts(bench) == (0, 0, 0)
        async with connection.transaction():
            assert await shop.app.accept(shop.pay, Item("a"), key="k", tx=connection) == NEW
    assert counts(bench) == (1, 1, 0)


async def test_a_key_that_a_rival_holds_without_a_record_is_not_told_of(
    bench: Bench, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, accepting_patience=0.0)
    digest = shop.pay.plan.identity("shop").digest(None, "k")
    async with bench.rival(digest) as release:
        with pytest.raises(StoreUnavailable, match="cannot be claimed now"):
            await shop.app.accept(shop.pay, Item("a"), key="k")
        await release()
    assert await shop.app.accept(shop.pay, Item("a"), key="k") == NEW


# ------------------------------------------------------------------------------------------------------------- forged
async def test_a_message_of_somebody_elses_does_not_take_the_record(bench: Bench, shop: Shop) -> None:
    """H41. It has the same key, or even the header that names the record."""
    await shop.app.accept(shop.pay, Item("a"), key="a")
    digest = shop.pay.plan.identity("shop").digest(None, "a")
    forged = with_origin(Message("memory:q", body(Item("other"))), Pending(digest, "shop/-/pay"))
    await bench.broker.publish("q", [Outgoing(body(Item("a"))), Outgoing(forged.body, forged.headers)])
    bench.do("update idemconsumer.queue set name = 'hidden ' || name")
    worker = await bench.until_empty(shop.app)
    assert worker.counts == {"duplicate": 1, "applied": 1}
    assert (bench.effects(), await shop.progress("a")) == (["other"], Progress.PENDING)

    bench.do("update idemconsumer.queue set name = substr(name, 8)")
    await bench.until_empty(shop.app)
    assert (bench.effects(), await shop.progress("a")) == (["other", "a"], Progress.DONE)


# ------------------------------------------------------------------------------------------------------------- states
def test_each_state_is_told(bench: Bench) -> None:
    told = {state: progress(state) for state in State}
    assert progress(None) is Progress.UNKNOWN
    assert progress(State.PENDING, held=True) is Progress.RUNNING
    assert told == {
        State.PENDING: Progress.PENDING, State.PROCESSING: Progress.RUNNING, State.UNDOING: Progress.RUNNING,
        State.COMPLETED: Progress.DONE, State.FAILED: Progress.FAILED, State.DEAD: Progress.DEAD,
    }  # fmt: skip


async def test_what_waits_for_its_next_attempt_is_pending_and_then_dead(bench: Bench) -> None:
    shop = Shop(backoff="1h, 1h", max_attempts=2)
    shop.act = lambda message: 1 / 0
    give_settings(shop.app, bench.settings())
    await shop.app.accept(shop.pay, Item("a"), key="k")
    await bench.until_empty(shop.app)
    assert await shop.app.accept(shop.pay, Item("a"), key="k") == PENDING
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
    await bench.until_empty(shop.app)
    dead = Accepted(Progress.DEAD, reason="attempts_exhausted")
    assert await shop.accepted(shop.pay, key="k") == dead
    assert (await shop.app.accept(shop.pay, Item("a"), key="k")).progress is Progress.DEAD
    assert counts(bench) == (0, 1, 1)
    await shop.app.close()


async def test_what_is_dead_is_redriven_under_its_key_and_for_its_tenant(bench: Bench) -> None:
    shop = Shop(max_attempts=1)
    shop.act = lambda message: 1 / 0
    give_settings(shop.app, bench.settings())
    await shop.app.accept(shop.pay, Item("a"), key="k", tenant="t")
    await bench.until_empty(shop.app)
    assert await shop.progress(tenant="t") is Progress.DEAD

    shop.act = lambda message: None
    await Redrives(bench.dsn, SCHEMA).redrive(ALL, by="ann", run="r")
    assert await shop.progress(tenant="t") is Progress.PENDING
    await bench.until_empty(shop.app)
    assert await shop.progress(tenant="t") is Progress.DONE
    assert [(each.key, each.tenant) for each in shop.seen] == [("k", "t")] * 2
    assert bench.effects() == ["a"]
    await shop.app.close()


@pytest.mark.parametrize("kind", ["pay", "ride"])
async def test_a_rejection_has_its_status(bench: Bench, shop: Shop, kind: str) -> None:
    def act(message: Message) -> None:
        raise Reject("taken", {"by": "ann"}, status=409)

    shop.act, handler = act, getattr(shop, kind)
    await shop.app.accept(handler, Item("a"), key="k")
    await bench.until_empty(shop.app)
    found = await shop.accepted(handler, key="k")
    assert (found.progress, found.status, found.reason) == (Progress.FAILED, 409, "taken")
    assert found.body == b'{"code":"taken","body":{"by":"ann"},"status":409}'
    assert (await shop.app.result(handler, key="k")).status == 409


@pytest.mark.parametrize("kind", ["pay", "ride"])
async def test_a_response_is_given_back_whole(bench: Bench, shop: Shop, kind: str) -> None:
    headers = [("Location", "/orders/1"), ("X", "2"), ("X", "1")]
    shop.act, handler = lambda message: Result({"id": 1}, 201, headers), getattr(shop, kind)
    await shop.app.accept(handler, Item("a"), key="k")
    await bench.until_empty(shop.app)
    assert await shop.accepted(handler, key="k") == Accepted(
        Progress.DONE, status=201, headers=tuple(headers), body=b'{"id":1}', content_type="application/json"
    )


@pytest.mark.parametrize(
    ("response", "stored"),
    [
        (Result(None, 204), (b"", "", 204)),
        (Result(b"\0", content_type="x/y"), (b"\0", "x/y", 200)),
        (Result("a", 303, [("Location", "/")]), (b'"a"', "application/json", 303)),
    ],
)
def test_the_body_of_a_response_is_stored_as_any_result(response: Result, stored: tuple[Any, ...]) -> None:
    result = codecs.encode_result(response)
    assert result is not None
    assert (result.body, result.content_type, result.status) == stored


@pytest.mark.parametrize(
    "response",
    [
        Result(None, 99),
        Result(None, True),
        Result(None, 200, [("a", 1)]),  # type: ignore[list-item]
        Result(object()),
        Result(None, 201, [("Location", "/orders/\u65e5")]),
        Result(None, 201, [("Location", "/orders/1\r\nSet-Cookie: a=b")]),
        Result(None, 201, [("Location", "/orders/1 ")]),
        Result(None, 200, [("a b", "c")]),
        Result(b"a", 200, content_type="text/plain\r\nX: y"),
    ],
)
def test_what_is_no_response_is_a_fault_of_the_handler(response: Result) -> None:
    with pytest.raises(TypeError, match="Result"):
        codecs.encode_result(response)


def test_a_rejection_says_no() -> None:
    with pytest.raises(ValueError, match="write an HTTP error status"):
        Reject("no", status=200)


# ------------------------------------------------------------------------------------------------------------ in time
@pytest.fixture
async def hurried(bench: Bench) -> AsyncIterator[Shop]:
    """Everything it accepts is too old at once."""
    shop = Shop(max_age=1e-6, backoff="1h, 1h")
    give_settings(shop.app, bench.settings())
    yield shop
    await shop.app.close()


@pytest.fixture
async def sweepers(bench: Bench, hurried: Shop) -> AsyncIterator[list[Deadlines]]:
    store = await PostgresStore.open(bench.dsn, SCHEMA, connections=4, longest_run=30.0)
    handlers = hurried.app.bound_handlers(bench.settings())
    yield [Deadlines(store.pool, handlers) for _ in range(4)]
    await store.close()


LATE = Accepted(
    Progress.FAILED,
    status=504,
    body=b'{"code":"not_in_time","body":null,"status":504}',
    content_type="application/json",
    reason="not_in_time",
)


async def test_what_has_not_begun_in_time_is_rejected_once_and_never_runs(
    bench: Bench, hurried: Shop, sweepers: list[Deadlines]
) -> None:
    for key in "ab":
        await hurried.app.accept(hurried.pay, Item(key), key=key)
    swept = await asyncio.gather(*(sweeper.sweep() for sweeper in sweepers))
    assert sum(len(keys or ()) for keys in swept) == 2
    assert await sweepers[0].sweep() is None
    for key in "ab":
        assert await hurried.accepted(hurried.pay, key=key) == LATE
        assert await hurried.app.accept(hurried.pay, Item(key), key=key) == LATE
    worker = await bench.until_empty(hurried.app)
    assert worker.counts == {"duplicate": 2}
    assert (bench.effects(), counts(bench)) == ([], (0, 2, 0))


async def test_a_worker_sweeps(bench: Bench, hurried: Shop) -> None:
    await hurried.app.accept(hurried.pay, Item("a"), key="k")
    bench.do("update idemconsumer.queue set visible_at = clock_timestamp() + interval '1 hour'")
    async with bench.running(hurried.app) as running:
        await running.until(lambda: bench.do("select state from idemconsumer.record") == [(State.FAILED,)])


async def test_what_runs_right_now_is_left_to_its_end(
    bench: Bench, hurried: Shop, sweepers: list[Deadlines], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    @hurried.app.idempotent_handler("memory:slow", key="id", max_age=1e-6)
    async def slow(item: Item, tx: Tx) -> None:
        begun.set()
        await go.wait()
        await note(tx, item)

    sweeper = Deadlines(pool_of(sweepers[0]), hurried.app.bound_handlers(bench.settings()))
    monkeypatch.setattr("idemconsumer.worker.worker.Deadlines.run", AsyncMock())
    await hurried.app.accept(slow, Item("a"), key="k")
    async with bench.running(hurried.app) as running:
        await running.until(begun.is_set)
        async with asyncio.timeout(30):
            assert await sweeper.sweep() == [], "not waited for"
        go.set()
        await running.until_count(applied=1)
    await sweeper.sweep()
    assert await sweeper.sweep() is None, "over"
    assert await hurried.accepted(slow, key="k") == Accepted(Progress.DONE)
    assert bench.effects() == ["a"]


async def test_a_saga_that_has_begun_is_bounded_by_its_own_time(
    bench: Bench, hurried: Shop, sweepers: list[Deadlines]
) -> None:
    await hurried.app.accept(hurried.ride, Item("a"), key="k")
    bench.do("update idemconsumer.record set state = 1")
    assert await sweepers[0].sweep() == []
    assert await sweepers[0].sweep() is None
    assert (await hurried.accepted(hurried.ride, key="k")).progress is Progress.RUNNING
