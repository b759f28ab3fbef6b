"""What SQS may do and ElasticMQ does not: the promise holds against a double that does it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from idemconsumer import App, Tx
from idemconsumer.brokers.sqs import sqs_session as sqs_session
from idemconsumer.brokers.sqs.sqs_broker import SqsBroker
from idemconsumer.brokers.sqs.sqs_client import CALLS
from idemconsumer.brokers.sqs.sqs_session import SqsSession
from idemconsumer.errors import BrokerUnavailable, SessionEnded
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.testing.broker_contract import WIDE, arriving, bodies
from idemconsumer.worker.source_findings import source_findings
from tests.support.inside import held_in, keep_nothing_invisible, not_fetched, polls_of
from tests.support.logs import times
from tests.support.servers.elasticmq import CREDENTIALS
from tests.support.servers.sqs_double import BUSY, SqsDouble
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until
from tests.support.workers import Bench, Item, note, prepare


@pytest.fixture
async def double(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqsDouble]:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)
    tuned(monkeypatch, sqs_backoff=(0.01, 0.05))
    async with SqsDouble().serving() as double:
        yield double


@pytest.fixture
def bench(database: str) -> Bench:
    prepare(database)
    return Bench(database)


@asynccontextmanager
async def consuming(double: SqsDouble, name: str = "orders", bounds: Bounds = WIDE) -> AsyncIterator[SqsSession]:
    broker = SqsBroker(Settings(sqs=double.address))
    session = await broker.open([Subscription(f"sqs:{name}", "handler", "group")], bounds)
    try:
        yield session
    finally:
        await session.close()
        await broker.close()


DAYS = 86_400


class Aside(SqsDouble):
    """What is received too often goes to another queue, which may be asked or not."""

    denied = False

    def _GetQueueAttributes(self, asked: Any) -> Any:  # noqa: N802
        name = asked["QueueUrl"].rpartition("/")[2]
        if name == "orders-dead":
            if self.denied:
                raise web.HTTPForbidden(text='{"__type": "com.amazonaws.sqs#AccessDenied", "message": "no"}')
            return {"Attributes": {"MessageRetentionPeriod": str(10 * DAYS)}}
        arn = "arn:aws:sqs:eu-west-1:000000000000:orders-dead"
        policy = {"deadLetterTargetArn": arn, "maxReceiveCount": 50} if name == "orders" else None
        redrive = {} if policy is None else {"RedrivePolicy": json.dumps(policy)}
        return {"Attributes": {"MessageRetentionPeriod": str(4 * DAYS), **redrive}}


@pytest.mark.parametrize(("name", "denied", "days"), [("plain", False, 4), ("orders", False, 14), ("orders", True, 18)])
async def test_what_its_dead_letter_queue_keeps_can_come_again(
    double: SqsDouble, name: str, denied: bool, days: int
) -> None:
    """Where that queue may not be asked, it is as long as any keeps a message."""
    aside = Aside()
    aside.denied = denied
    async with aside.serving():
        broker = SqsBroker(Settings(sqs=aside.address))
        try:
            assert await broker.retention_seconds(Subscription(f"sqs:{name}", "handler", "group")) == days * DAYS
        finally:
            await broker.close()


@pytest.mark.parametrize(
    ("retain", "level", "text"),
    [
        ("7d", "error", 'keeps messages for 14 days, but records are kept for 7 days; write retain="15d"'),
        ("14d", "warning", 'less than a day for messages in flight at the end; write retain="15d"'),
        ("15d", "ok", ""),
    ],
)
async def test_check_counts_what_its_dead_letter_queue_keeps(
    double: SqsDouble, retain: str, level: str, text: str
) -> None:
    app, aside = App("kept"), Aside()

    @app.idempotent_handler("sqs:orders", key="id", retain=retain)
    async def place(order: Item, tx: Tx) -> None: ...

    async with aside.serving():
        settings = Settings(sqs=aside.address)
        broker, (handler,) = SqsBroker(settings), app.bound_handlers(settings)
        try:
            found = await source_findings(handler, Subscription("sqs:orders", handler.name, "group"), broker)
        finally:
            await broker.close()
    said = [each for each in found if "keeps messages" in each.text]
    assert [(each.level, text in each.text) for each in said] == ([] if level == "ok" else [(level, True)])


def shop(name: str = "orders") -> App:
    app = App("shop")

    @app.idempotent_handler(f"sqs:{name}", key="id", group_size=4, max_attempts=20)
    async def place(order: Item, tx: Tx) -> None:
        await note(tx, order)

    return app


def ordered(*ids: str) -> list[str]:
    return [json.dumps({"id": each, "entity": ""}) for each in ids]


# ------------------------------------------------------------------------------------------------------ receipt handles
async def test_a_message_is_deleted_with_its_latest_handle(double: SqsDouble) -> None:
    double.put("twice")
    async with consuming(double) as session:
        first = await arriving(session, 1)
        double.lapse()
        second = await arriving(session, 1)
        await session.settle(first)
        await until(lambda: double.empty)
        await session.settle(second)


async def test_a_stale_handle_is_accepted_and_deletes_nothing_so_the_message_is_deleted_when_it_comes_again(
    double: SqsDouble,
) -> None:
    message = double.put("again")
    async with consuming(double) as session:
        first = await arriving(session, 1)
        double.messages[message].handle = "somebody else's"
        await session.settle(first)
        await until(lambda: double.requests["DeleteMessageBatch"] == 1 and len(held_in(session)) == 0)
        assert not double.empty
        double.lapse()
        await session.settle(await arriving(session, 1))
        await until(lambda: double.empty)


async def test_a_refused_deletion_is_tried_once_more_and_then_left(double: SqsDouble) -> None:
    stubborn, other = double.put("stubborn"), double.put("other")
    double.refuse = lambda operation, message: BUSY if (operation, message) == ("delete", stubborn) else None
    async with consuming(double) as session:
        await session.settle(await arriving(session, 2))
        await until(lambda: double.requests["DeleteMessageBatch"] == 2 and len(held_in(session)) == 0)
        assert list(double.messages) == [stubborn]
        double.lapse()
        (again,) = await arriving(session, 1)
        assert (again.suspect, again.count) == (True, 2)
        double.refuse = lambda operation, message: None
        await session.settle([again])
        await until(lambda: double.empty)
    assert other in double.graveyard


async def test_deletions_go_out_in_tens_when_they_pile_up(double: SqsDouble) -> None:
    for number in range(100):
        double.put(str(number))
    async with consuming(double) as session:
        for delivery in await arriving(session, 100):
            await session.settle([delivery])
        await until(lambda: double.empty)
    assert sum(double.batches) == 100
    assert len(double.batches) <= 11


# ----------------------------------------------------------------------------------------------------------- visibility
async def test_what_is_held_is_extended_until_it_is_settled(double: SqsDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, sqs_visibility=1)
    double.attributes["VisibilityTimeout"] = "1"
    held = [double.put("held") for _ in range(12)]
    settled = double.put("settled")
    async with consuming(double) as session:
        *kept, last = await arriving(session, 13)
        await session.settle([last])
        await until(lambda: all(double.extended[message] >= 3 for message in held))
        assert double.extended[settled] <= 1
        await session.settle(kept)
        await until(lambda: double.empty)


async def test_what_may_not_be_held_any_longer_is_not_asked_for_again(
    double: SqsDouble, monkeypatch: pytest.MonkeyPatch, logged: object
) -> None:
    tuned(monkeypatch, sqs_visibility=1)
    double.attributes["VisibilityTimeout"] = "1"
    old, young = double.put("old"), double.put("young")
    asked: list[str] = []

    def refuse(operation: str, message: str) -> dict[str, object] | None:
        asked.append(message)
        text = "Total VisibilityTimeout for the message is beyond the limit [43200 seconds]"
        return {"SenderFault": True, "Code": "InvalidParameterValue", "Message": text} if message == old else None

    double.refuse = refuse
    async with consuming(double) as session:
        await arriving(session, 2)
        await until(lambda: double.extended[young] >= 3)
        assert asked.count(old) == 1
        double.lapse(old)
        assert bodies(await arriving(session, 1)) == [b"old"]
        double.refuse = lambda operation, message: None
    assert times(logged, "in flight for 12 hours, sqs redelivers it") == 1  # type: ignore[arg-type]


async def test_an_answer_that_comes_late_is_extended_before_it_is_handed_on(
    double: SqsDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, sqs_visibility=1)
    double.attributes["VisibilityTimeout"] = "1"
    keep_nothing_invisible(monkeypatch)
    other = double.put("other")
    async with consuming(double) as session:
        await arriving(session, 1)
        before = double.extended[other]
        double.answers.clear()
        message = double.put("late")
        await until(lambda: double.messages[message].receives == 1)
        await asyncio.sleep(0.6)  # more than half of its visibility
        double.answers.set()
        await arriving(session, 1)
        assert double.extended[message] == 1
        assert double.extended[other] == before, "a receive pays for its own"


async def test_an_answer_in_time_is_handed_on_without_a_request(
    double: SqsDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_nothing_invisible(monkeypatch)
    message = double.put("expiring")
    async with consuming(double) as session:
        await arriving(session, 1)
        held_in(session).extended(held_in(session).handles([message]), [], until=0.0)
        double.put("fresh")
        await arriving(session, 1)
        assert double.requests["ChangeMessageVisibilityBatch"] == 0


async def test_an_extension_that_was_given_up_is_asked_for_again(
    double: SqsDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, sqs_visibility=1)
    double.attributes["VisibilityTimeout"] = "1"
    tuned(monkeypatch, sqs_retries=0)
    message = double.put("held")
    double.throttling["ChangeMessageVisibilityBatch"] = 2 * CALLS
    async with consuming(double) as session:
        await arriving(session, 1)
        await until(lambda: double.extended[message] >= 1)


async def test_a_poll_that_a_drain_meets_ends_by_itself_and_what_it_brings_is_handed_over(double: SqsDouble) -> None:
    """Given back it would count as received."""
    double.answers.clear()
    message = double.put("caught")
    async with consuming(double) as session:
        await until(lambda: double.messages[message].receives == 1)
        stopping = asyncio.create_task(session.stop_fetching())
        done, _ = await asyncio.wait([stopping], timeout=0.3)
        assert not done, "it must wait for its poll"
        double.answers.set()
        assert bodies(await stopping) == [b"caught"]
        assert not double.messages[message].visible
    assert double.messages[message].visible, "it is not settled"
    assert double.requests["ReceiveMessage"] == 1


async def test_a_drain_gives_back_everything_in_batches(double: SqsDouble) -> None:
    for number in range(25):
        double.put(str(number))
    async with consuming(double) as session:
        deliveries = await arriving(session, 25)
        await session.stop_fetching()
        await session.settle(deliveries[:3])
        await session.release(deliveries[3:13])
    assert len(double.messages) == 22
    assert all(stored.visible for stored in double.messages.values())
    assert double.requests["ChangeMessageVisibilityBatch"] <= 4
    assert max(stored.receives for stored in double.messages.values()) == 1, "our own polls took it again"


@pytest.mark.parametrize(("farewell", "unfetched"), [(10**6, 0), (0.05, 1)])
async def test_a_drain_does_not_wait_for_deletions_that_do_not_end(
    double: SqsDouble, monkeypatch: pytest.MonkeyPatch, farewell: float, unfetched: int
) -> None:
    tuned(monkeypatch, sqs_retries=10**6)
    double.put("finished")
    async with consuming(double) as session:
        deliveries = await arriving(session, 1)
        double.throttling["DeleteMessageBatch"] = 10**6
        await session.settle(deliveries)
        for _ in range(unfetched):
            double.put("unfetched")
        await until(lambda: not_fetched(session) == unfetched)
        with monkeypatch.context() as patched:
            tuned(patched, sqs_farewell=farewell)
            async with asyncio.timeout(PATIENCE):
                await session.release(await session.stop_fetching())
        assert [stored.visible for stored in double.messages.values()] == [False, True][: 1 + unfetched]
        double.throttling.clear()


async def test_a_drain_does_not_wait_for_lanes_that_go_on_settling(
    double: SqsDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, sqs_retries=10**6)
    for number in range(100):
        double.put(str(number))
    async with consuming(double) as session:
        deliveries = await arriving(session, 100)
        double.put("unfetched")
        await until(lambda: not_fetched(session) == 1)
        settling: list[asyncio.Task[None]] = []

        def settle(*_: object) -> None:
            if deliveries:
                settling.append(asyncio.create_task(session.settle([deliveries.pop()])))

        double.throttling["DeleteMessageBatch"] = 10**6
        settle()
        stopping = asyncio.create_task(session.stop_fetching())
        await until(lambda: polls_of(session) == 0)
        returning = asyncio.create_task(session.release(await stopping))
        double.refuse = settle  # while any message is deleted or given back, another one is finished
        double.throttling.clear()
        await returning
        assert deliveries


# ----------------------------------------------------------------------------------------------------------- throttling
@pytest.mark.parametrize("operation", ["ReceiveMessage", "DeleteMessageBatch", "ChangeMessageVisibilityBatch"])
async def test_a_throttled_request_is_sent_again_and_said_once(
    double: SqsDouble, operation: str, logged: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, sqs_visibility=1)
    double.attributes["VisibilityTimeout"] = "1"
    message = double.put("slow")
    double.throttling[operation] = 7  # the client itself gives up after three
    async with consuming(double) as session:
        deliveries = await arriving(session, 1)
        if operation == "ChangeMessageVisibilityBatch":
            await until(lambda: double.extended[message] >= 1)
        await session.settle(deliveries)
        await until(lambda: double.empty)
        assert times(logged, "sqs throttles, backing off") == 1  # type: ignore[arg-type]
        assert times(logged, "sqs no longer throttles") == 0  # type: ignore[arg-type]
        tuned(monkeypatch, sqs_calm=0.0)
        await until(lambda: times(logged, "sqs no longer throttles") == 1)  # type: ignore[arg-type]


async def test_a_deletion_that_stays_throttled_is_left_to_redelivery(
    double: SqsDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.put("never")
    tuned(monkeypatch, sqs_retries=1)
    double.throttling["DeleteMessageBatch"] = 10**6
    async with consuming(double) as session:
        await session.settle(await arriving(session, 1))
        await until(lambda: len(held_in(session)) == 0)
        assert not double.empty
        assert double.requests["DeleteMessageBatch"] == 2 * CALLS, "once again, then given up"
        assert not await session.fetch(), "the session lives"


# ----------------------------------------------------------------------------------------------------------------- FIFO
async def test_a_fifo_group_is_deleted_as_a_finished_prefix_only(double: SqsDouble) -> None:
    ids = [double.put(f"{group}{n}", MessageGroupId=group) for n in range(3) for group in "ab"]
    async with consuming(double, "orders.fifo") as session:
        a0, b0, a1, b1, a2, b2 = await arriving(session, 6)
        await session.settle([a0, a2, b1, b2])
        await until(lambda: ids[0] in double.graveyard)
        await session.stop_fetching()
        await session.release([a1, b0])
    assert list(double.graveyard) == [ids[0]]
    assert all(stored.visible for stored in double.messages.values())
    assert a0.message.order_hint == "a"


async def test_the_rest_of_a_fifo_group_is_deleted_when_its_first_is_finished(double: SqsDouble) -> None:
    for n in range(4):
        double.put(str(n), MessageGroupId="g")
    async with consuming(double, "orders.fifo") as session:
        first, *others = await arriving(session, 4)
        await session.settle(others)
        await session.settle([first])
        await until(lambda: double.empty)
        assert list(double.graveyard) == [delivery.handle for delivery in (first, *others)]


# ------------------------------------------------------------------------------------------------------------- sessions
async def test_a_refused_message_of_a_publish_is_not_confirmed(double: SqsDouble) -> None:
    double.refuse = lambda operation, body: BUSY if body == "b" else None
    broker = SqsBroker(Settings(sqs=double.address))
    with pytest.raises(BrokerUnavailable, match=r"1 message.*'orders' were refused: InternalError: try again"):
        await broker.publish("orders", [Outgoing(b"a"), Outgoing(b"b")])
    await broker.close()


async def test_polls_come_and_go_with_the_load(double: SqsDouble) -> None:
    for number in range(400):
        double.put(str(number))
    async with consuming(double, bounds=Bounds(lanes=8, group=32)) as session:
        deliveries: list[Delivery] = []
        most = 0
        while len(deliveries) < 400:
            deliveries += await session.fetch()
            most = max(most, polls_of(session))
        assert 2 <= most <= sqs_session.POLLS
        await session.settle(deliveries)
        await until(lambda: double.empty and polls_of(session) == 1)


async def test_no_more_than_a_few_groups_are_taken_ahead_of_the_other_workers(double: SqsDouble) -> None:
    for number in range(100):
        double.put(str(number))
    share = 16
    async with consuming(double, bounds=Bounds(lanes=2, group=32, share=lambda source: share)) as session:
        held = await arriving(session, 16)
        held += await session.fetch()
        assert len(held) == 16
        share = 256
        assert len(held + await arriving(session, 84)) == 100


async def test_a_lost_session_forgets_what_it_delivered(double: SqsDouble) -> None:
    double.put("forgotten")
    async with consuming(double) as session:
        deliveries = await arriving(session, 1)
        double.refuse = _broken
        with pytest.raises(SessionEnded, match="queue 'orders' cannot be used"):
            await _settling(session, deliveries)
        assert deliveries[0].epoch.ended
        double.refuse = lambda operation, message: None
        await session.settle(deliveries)
    assert not double.empty


@pytest.mark.parametrize("held", [True, False])
async def test_an_answer_that_makes_no_sense_ends_the_session(
    double: SqsDouble, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    tuned(monkeypatch, sqs_visibility=1)
    double.attributes["VisibilityTimeout"] = "1"
    double.put("odd")
    async with consuming(double) as session:
        deliveries = await arriving(session, 1)
        double.refuse = lambda operation, message: {**BUSY, "Id": "none that was asked"}
        with pytest.raises(SessionEnded, match="queue 'orders' cannot be used"):
            async with asyncio.timeout(PATIENCE):
                await _settling(session, [] if held else deliveries)


def _broken(operation: str, message: str) -> None:
    raise RuntimeError("the service answers 500")


async def _settling(session: SqsSession, deliveries: Sequence[Delivery]) -> None:
    await session.settle(deliveries)
    while True:
        await session.fetch()


# --------------------------------------------------------------------------------------- the promise, with real workers
async def test_duplicates_out_of_nothing_are_applied_once(double: SqsDouble, bench: Bench) -> None:
    ids = [f"o{number}" for number in range(60)]
    for body in ordered(*ids):
        double.put(body)
    chance = random.Random(3)
    double.repeat = lambda stored: stored.receives < 4 and chance.random() < 0.5
    async with bench.running(shop(), sqs=double.address) as running:
        await running.until_count(applied=60)
        double.repeat = lambda stored: False
        await running.until(lambda: double.empty)
        double.resurrect()
        await running.until_count(duplicate=60)
        await running.until(lambda: double.empty)
    assert sorted(bench.effects()) == sorted(ids)
    assert running.worker.counts["duplicate"] >= 60


@pytest.mark.parametrize("seed", range(3))
async def test_everything_at_once_loses_nothing_and_applies_nothing_twice(
    double: SqsDouble, bench: Bench, seed: int
) -> None:
    ids = [f"o{number}" for number in range(80)]
    for body in ordered(*ids, *ids[::3]):
        double.put(body)
    chance = random.Random(seed)
    double.repeat = lambda stored: stored.receives < 5 and chance.random() < 0.2
    double.refuse = lambda operation, message: BUSY if chance.random() < 0.3 else None
    double.throttling.update({"ReceiveMessage": 2, "DeleteMessageBatch": 2, "ChangeMessageVisibilityBatch": 2})
    async with bench.running(shop(), sqs=double.address) as running:
        await running.until_count(applied=80)
    double.lapse()  # what the drain could not give back
    double.refuse = lambda operation, message: None
    double.resurrect()
    async with bench.running(shop(), sqs=double.address) as running:
        await running.until(lambda: double.empty)
    assert sorted(bench.effects()) == sorted(ids)
    assert running.worker.counts.get("applied", 0) == 0
