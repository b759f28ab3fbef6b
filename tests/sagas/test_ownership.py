"""Whose a saga is: of one app, under the key it was stored with, and of nobody else while somebody here has it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Literal, cast

import pytest

from idemconsumer import Message, OutcomeKind, Saga, idempotent_handler
from idemconsumer.brokers.due_sagas import DueSagasSession
from idemconsumer.engine.dead_letter import dead_letter
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.ports.broker import Delivery, Epoch, Session
from idemconsumer.ports.observer import NullObserver
from idemconsumer.settings import Settings
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.worker.in_flight import InHand
from idemconsumer.worker.lanes import Lanes
from tests.support.sagas import Bench, FreeLanes, Station, due_sagas, order, put, saga
from tests.support.waiting import PATIENCE


async def book(order: dict[str, Any], saga: Saga) -> str:
    await saga.tx("a", put, "a")
    return "done"


async def begin(station: Station, handler: BoundHandler, message: Message | None = None) -> LeasedSaga:
    call = Work.of(handler, message or order()).call
    assert call is not None
    holding = await station.leases.begin(call.claim, message or order(), handler.name, None)
    assert isinstance(holding, LeasedSaga)
    return holding


def of(app: str, **options: Any) -> BoundHandler:
    given: dict[str, Any] = {"name": "book", "key": "id", **options}
    return idempotent_handler("memory:orders", **given)(book).plan.bind(app)


async def source(station: Station, held: Callable[[], list[bytes]]) -> DueSagasSession:
    return await due_sagas(station, FreeLanes(4, held))


# ----------------------------------------------------------------------------------------------------------------- apps
@pytest.mark.parametrize("app", ["bakery", "sho", "shop2", "shop/-", "%"])
async def test_a_saga_is_never_taken_by_another_app_with_a_handler_of_the_same_name(
    bench: Bench, one: Station, two: Station, app: str
) -> None:
    await begin(one, of("shop"))
    bench.expire(one)
    assert await two.take(of(app)) is None
    assert await two.take(of("shop")) is not None


async def test_sagas_of_all_tenants_of_the_app_are_taken(bench: Bench, one: Station, two: Station) -> None:
    tenants = of("of/all", tenant="tenant")
    for tenant in ("-", "a/b", "%"):
        await begin(one, tenants, Message("memory:orders", b'{"id": "k", "tenant": "%s"}' % tenant.encode()))
    bench.expire(one)
    assert len(await two.leases.take("of/all", ["book"], 9)) == 3


# ------------------------------------------------------------------------------------------------------------------ key
def lanes(station: Station) -> Lanes:
    return Lanes(InHand(Engine(station.store), NullObserver()), [of("shop")], Settings(concurrency=2))


@pytest.mark.parametrize("rule", ["another", "missing"])
async def test_what_is_held_has_the_key_that_it_is_stored_under_whatever_the_key_rule_is_now(
    bench: Bench, one: Station, two: Station, rule: Literal["another", "missing"]
) -> None:
    """The process did not know it as what it held, and took it from itself until it was `killed_worker`."""
    numbers = itertools.count()
    changed = of("shop", key=(lambda message: f"not {next(numbers)}") if rule == "another" else "ref")
    await begin(one, of("shop"))
    bench.expire(one)
    hands = lanes(two)
    session = await source(two, lambda: hands.keys)
    (taken,) = await session.fetch()
    work = Work.of(changed, taken.message, leased=taken.handle)
    hands.dispatch(work, taken, session)
    assert hands.keys == [work.key] == [taken.handle.key]
    assert dead_letter(work, "unknown_effect", "", 1).scope == "shop/-/book"
    assert await session.fetch() == []
    outcome = await two.run(work)
    assert outcome.kind is (OutcomeKind.APPLIED if rule == "another" else OutcomeKind.DEAD)
    hands.in_hand.forget([hands.of("book").strands.clear()[0]])
    assert (hands.keys, hands.in_hand.in_flight) == ([], 0)


async def test_the_same_message_under_another_fingerprint_rule_is_no_conflict_once_it_is_held(
    bench: Bench, one: Station, two: Station
) -> None:
    await begin(one, of("shop"))
    bench.expire(one)
    holding = await two.take(of("shop"))
    assert holding is not None
    call = Work.of(of("shop", fingerprint="id"), holding.message, leased=holding).call
    assert call is not None
    assert (call.claim.key, call.claim.fingerprint) == (holding.key, None)


# --------------------------------------------------------------------------------------------------------- in our hands
@pytest.mark.parametrize("seam", ["look_for_sagas_alone", "take_sagas"])
async def test_a_saga_that_begins_while_the_source_looks_is_not_taken_from_its_own_run(
    bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch, seam: str
) -> None:
    """What was in hand was read before the statement ran. It then counted as stale, and its reconcile was asked."""
    hands: list[bytes] = []
    pool = one.store.pool

    def meanwhile(send: Callable[..., Awaitable[list[tuple[Any, ...]]]]) -> Callable[..., Any]:
        async def sent(name: str, params: dict[str, Any], **more: Any) -> list[tuple[Any, ...]]:
            if name == seam and not hands:
                call = Work.of(saga(book), order()).call
                assert call is not None
                hands.append(call.claim.key)  # a delivery is in hand before it is claimed
                await begin(one, saga(book))
            return await send(name, params, **more)

        return sent

    due = await begin(one, saga(book), order("due"))
    await one.leases.release(due, 0.0, None, count=False)
    monkeypatch.setattr(pool, "read", meanwhile(pool.read))
    monkeypatch.setattr(pool, "alone", meanwhile(pool.alone))
    session = await source(one, lambda: [*hands, due.key])
    assert [delivery.handle.key for delivery in await session.fetch()] == [due.key]
    assert len(hands) == 1
    assert await session.fetch() == []


async def test_what_is_ours_and_in_nobodys_hands_is_gone_on_with_at_the_cost_of_no_attempt(
    bench: Bench, one: Station, two: Station
) -> None:
    """The answer to a take was lost; or a release failed."""
    await begin(one, saga(book))
    bench.expire(one)
    lost = await two.take(saga(book))
    assert lost is not None
    session = await source(two, list)
    (again,) = await session.fetch()
    assert again.handle.token > lost.token
    assert (again.handle.attempt, again.handle.stale) == (lost.attempt, True), "of the lost worker it is to be told"
    whats = [row[0] for row in bench.run("select what from idemconsumer.history order by id")]
    assert whats == ["lost", "taken", "taken"]


async def test_what_is_ours_was_not_left_by_a_lost_worker(bench: Bench, one: Station) -> None:
    begun = await begin(one, saga(book))
    (delivery,) = await (await source(one, list)).fetch()
    assert (delivery.handle.attempt, delivery.handle.stale) == (begun.attempt, False)


async def test_what_was_seen_unheld_is_not_taken_once_it_has_another_token(bench: Bench, one: Station) -> None:
    holding = await begin(one, saga(book))
    seen = await one.leases.own()
    assert seen == [(holding.key, holding.token)]
    assert await one.leases.retake(holding.key, holding.token) is not None
    assert await one.leases.take("shop", ["book"], 1, unheld=seen) == []


async def test_without_a_source_the_next_call_goes_on_with_what_was_left(bench: Bench, one: Station) -> None:
    async def told() -> None:
        return

    running, go = asyncio.Event(), asyncio.Event()

    async def waits(order: dict[str, Any], saga: Saga) -> str:
        running.set()
        await go.wait()
        return "done"

    await begin(one, saga(waits))
    assert (await one.deliver(saga(waits))).kind is OutcomeKind.BUSY, "its source would go on with it"
    first = asyncio.create_task(one.engine.run(Work.of(saga(waits), order()), told, unfed=True))
    await running.wait()
    async with asyncio.timeout(PATIENCE):
        second = await one.engine.run(Work.of(saga(waits), order()), told, unfed=True)
    assert second.kind is OutcomeKind.BUSY, "another call has it"
    go.set()
    assert (await first).kind is OutcomeKind.APPLIED


async def test_a_message_that_nobody_holds_has_the_key_of_its_rule(one: Station) -> None:
    hands = lanes(one)
    work = Work.of(saga(book), order())
    hands.dispatch(work, Delivery(work.message, Epoch()), cast(Session, None))
    unreadable = Work.of(saga(book), Message("memory:orders", b"{"))
    hands.dispatch(unreadable, Delivery(unreadable.message, Epoch()), cast(Session, None))
    assert hands.keys == [work.key]
