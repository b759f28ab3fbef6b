"""What is accepted may go to the handler by its own source: its record waits for that very message (H46)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from idemconsumer import Accepted, App, BadMessage, ConfigurationError, Key, Message, Progress, Saga, Tx
from idemconsumer.admin.stored_keys import Keys
from idemconsumer.app.sending import check_via
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.message.headers import decode_headers
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message as Sent
from idemconsumer.message.origin import ACCEPTED
from idemconsumer.message.reply_address import MESSAGE_ID
from idemconsumer.ports.observer import Point
from idemconsumer.rules.values import OutcomeKind, State
from idemconsumer.stores.joined import PostgresStore
from tests.support.inside import give_settings
from tests.support.relaying import Taking
from tests.support.workers import SCHEMA, Bench, Item, body, connected, note

KAFKA = "127.0.0.1:1"  # an address, so that there is somebody to relay
NEW = Accepted(Progress.PENDING, new=True)
ACCOUNT = Key.header("Account")
IDEMPOTENCY = Key.header("Idempotency-Key")


class Shop:
    """A handler and a saga that do what `act` says."""

    def __init__(self, source: str = "postgres:orders", **options: Any) -> None:
        self.app = App("shop", publishes=())
        self.act: Callable[[Message], object] = lambda message: {"paid": message.key}
        self.seen: list[Message] = []

        @self.app.idempotent_handler(source, key=IDEMPOTENCY, tenant=ACCOUNT, **options)
        async def pay(item: Item, tx: Tx, message: Message) -> object:
            await note(tx, item)
            self.seen.append(message)
            return self.act(message)

        @self.app.idempotent_handler("postgres:rides", key=IDEMPOTENCY, tenant=ACCOUNT)
        async def ride(item: Item, saga: Saga, message: Message) -> object:
            await saga.tx("noted", note, item)
            return self.act(message)

        self.pay, self.ride = pay, ride

    async def accept(
        self, item: str = "a", key: str = "k", tenant: str = "t", via: str = "postgres:orders"
    ) -> Accepted:
        return await self.app.accept(self.pay, Item(item), key=key, tenant=tenant, via=via)

    async def progress(self, key: str = "k", tenant: str = "t") -> Progress:
        return (await self.app.accepted(self.pay, key=key, tenant=tenant)).progress


@pytest.fixture
def taking() -> Taking:
    return Taking()


@pytest.fixture
def bench(bench: Bench, taking: Taking, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return connected(bench, monkeypatch, kafka=taking)


@pytest.fixture
async def shop(bench: Bench) -> AsyncIterator[Shop]:
    shop = Shop()
    give_settings(shop.app, bench.settings())
    yield shop
    await shop.app.close()


def again(bench: Bench, **headers: str) -> None:
    """Publish what was accepted once more, as a relay that was killed does, or whoever may write there."""
    bench.do(
        "insert into idemconsumer.queue (name, body, headers) select name, body,"
        " convert_to((convert_from(headers, 'UTF8')::jsonb || %s::jsonb)::text, 'UTF8') from idemconsumer.queue"
        " order by id limit 1",
        json.dumps(headers),
    )


# ---------------------------------------------------------------------------------------------------------- it goes out
@pytest.mark.parametrize("kind", ["pay", "ride"])
async def test_the_message_that_was_accepted_takes_its_record_once(bench: Bench, shop: Shop, kind: str) -> None:
    handler, via = getattr(shop, kind), {"pay": "postgres:orders", "ride": "postgres:rides"}[kind]
    given: Any = {"key": "k", "tenant": "t", "headers": {"n": "v", ACCEPTED: "00" * 16}, "via": via}
    assert await shop.app.accept(handler, Item("a"), **given) == NEW
    assert await shop.app.accept(handler, Item("a"), **given) == Accepted(Progress.PENDING)
    assert (await shop.app.accept(handler, Item("b"), **given)).conflict
    again(bench)
    assert bench.do("select count(*) from idemconsumer.queue") == [(2,)], "one, and the copy"

    await bench.until_empty(shop.app)
    done = await shop.app.accepted(handler, key="k", tenant="t")
    assert (done.progress, done.body) == (Progress.DONE, b'{"paid":"k"}')
    assert (await shop.app.accept(handler, Item("a"), **given)).progress is Progress.DONE
    assert bench.effects() == ["a"]
    assert bench.do("select count(*) from idemconsumer.queue") == [(0,)]
    assert bench.do("select token from idemconsumer.accepted") == [(None,)]


async def test_it_is_in_the_outbox_with_its_record_and_in_the_order_of_its_entity(bench: Bench, taking: Taking) -> None:
    shop, quiet = Shop("kafka:orders", order_by="entity"), Shop()
    give_settings(shop.app, bench.settings())
    item = Item("a", "customer")
    assert await shop.app.accept(shop.pay, item, key="k", tenant="t", headers={"n": "v"}, via="kafka:orders") == NEW
    assert await shop.app.accept(shop.pay, item, key="k", tenant="t", via="kafka:orders") == Accepted(Progress.PENDING)
    async with bench.running(quiet.app, kafka=KAFKA) as running:
        await running.until(lambda: bench.do("select 1 from idemconsumer.outbox") == [])
    ((name, sent),) = taking.sent
    assert (name, sent.key, sent.body) == ("orders", "customer", b'{"id":"a","entity":"customer"}')
    assert (sent.headers["n"], sent.headers["Account"], sent.headers["Idempotency-Key"]) == ("v", "t", "k")
    assert set(sent.headers) == {"n", "Account", "Idempotency-Key", ACCEPTED, MESSAGE_ID}
    assert await shop.progress() is Progress.PENDING, "until it comes back"
    await shop.app.close()


# -------------------------------------------------------------------------------------------------------------- forged
FORGED = [{}, {ACCEPTED: "00" * 16}, {ACCEPTED: "not hex"}]


def forge(bench: Bench, queue: str, forged: dict[str, str]) -> None:
    """With the same key, tenant and payload."""
    headers = json.dumps({"Account": "t", "Idempotency-Key": "k", "amount": "1000", **forged})
    bench.do("select idemconsumer.publish_bytes(%s, %s, null, %s::jsonb)", queue, body(Item("a")), headers)


@pytest.mark.parametrize("forged", FORGED)
async def test_who_may_write_to_the_source_takes_no_record(bench: Bench, shop: Shop, forged: dict[str, str]) -> None:
    await shop.accept("a")
    bench.do("update idemconsumer.queue set name = 'hidden'")
    forge(bench, "orders", forged)
    worker = await bench.until_empty(shop.app)
    assert (worker.counts, shop.seen, await shop.progress()) == ({"duplicate": 1}, [], Progress.PENDING)
    bench.do("update idemconsumer.queue set name = 'orders'")
    await bench.until_empty(shop.app)
    assert (bench.effects(), await shop.progress()) == (["a"], Progress.DONE)


@pytest.mark.parametrize("forged", FORGED)
async def test_a_forged_one_begins_no_saga(bench: Bench, shop: Shop, forged: dict[str, str]) -> None:
    await shop.app.accept(shop.ride, Item("a"), key="k", tenant="t", via="postgres:rides")
    bench.do("update idemconsumer.queue set name = 'hidden'")
    forge(bench, "rides", forged)
    worker = await bench.until_empty(shop.app)
    assert (worker.counts, bench.effects()) == ({"duplicate": 1}, [])
    bench.do("update idemconsumer.queue set name = 'rides'")
    await bench.until_empty(shop.app)
    assert bench.effects() == ["a"]
    assert (await shop.app.accepted(shop.ride, key="k", tenant="t")).progress is Progress.DONE


@pytest.mark.parametrize("forged", FORGED)
async def test_behind_a_forged_one_in_its_group_it_is_no_duplicate(
    bench: Bench, shop: Shop, forged: dict[str, str]
) -> None:
    await shop.accept("a")
    forge(bench, "orders", forged)
    stored = bench.do("select body, headers from idemconsumer.queue order by id desc")
    store = await PostgresStore.open(bench.dsn, SCHEMA, connections=1, longest_run=30.0)
    bound = next(each for each in shop.app.bound_handlers(bench.settings()) if each.name == "pay")
    group = [Work.of(bound, Sent("postgres:orders", each, decode_headers(headers))) for each, headers in stored]
    engine = Engine(store)
    first, behind = await engine.run(group, defer=True)
    assert (first.kind, behind.kind) == (OutcomeKind.DUPLICATE, OutcomeKind.BUSY)
    assert (await engine.process(group[1])).kind is OutcomeKind.APPLIED
    await store.close()


async def test_the_token_alone_decides_nothing(bench: Bench, shop: Shop) -> None:
    """Who can read it, and sends another payload, or names another key or tenant with it, has sent a message."""
    for tenant in ("one", "two"):
        await shop.accept("a", tenant=tenant)
    bench.do("update idemconsumer.queue set name = 'hidden'")
    again(bench, Account="two")
    again(bench, **{"Idempotency-Key": "other"})
    bench.do(
        "insert into idemconsumer.queue (name, body, headers) select name, %s, headers from idemconsumer.queue"
        " where name = 'hidden' limit 1",
        body(Item("b")),
    )
    bench.do("update idemconsumer.queue set name = 'orders' where id > 2")
    worker = await bench.until_empty(shop.app)
    assert worker.counts == {"duplicate": 1, "applied": 1, "conflict": 1}
    assert [message.key for message in shop.seen] == ["other"]
    assert [await shop.progress(tenant=each) for each in ("one", "two")] == [Progress.PENDING] * 2


async def test_a_copy_waits_while_somebody_has_the_message_in_hand(bench: Bench, shop: Shop) -> None:
    """A duplicate would be settled; and if who has it dies then, nothing is left of it."""
    await shop.accept("a")
    async with bench.rival(shop.pay.plan.identity("shop").digest("t", "k")) as release, bench.running(shop.app) as it:
        await it.until(lambda: it.points.count(Point.DISPATCHED) == 1)
        assert await shop.progress() is Progress.RUNNING
        assert it.worker.counts == {}
        await release()
        await it.until_count(applied=1)
    assert bench.effects() == ["a"]


# -------------------------------------------------------------------------------------------------------- further lives
async def test_what_failed_is_awaited_as_before(bench: Bench) -> None:
    shop, fails = Shop(backoff="1ms, 1ms"), [ValueError("once"), ValueError("twice")]
    give_settings(shop.app, bench.settings())

    def act(message: Message) -> object:
        if fails:
            raise fails.pop()
        return message.attempt

    shop.act = act
    await shop.accept("a")
    again(bench)
    await bench.until_empty(shop.app)
    assert (bench.effects(), await shop.progress()) == (["a"], Progress.DONE)
    await shop.app.close()


async def test_what_waits_for_its_next_attempt_is_not_taken_by_a_copy(bench: Bench) -> None:
    shop = Shop(backoff="1h, 1h")
    give_settings(shop.app, bench.settings())
    shop.act = lambda message: 1 / 0
    await shop.accept("a")
    bench.do("create table kept as select * from idemconsumer.queue")
    await bench.until_empty(shop.app)
    bench.do("insert into idemconsumer.queue (name, body, headers) select name, body, headers from kept")
    worker = await bench.until_empty(shop.app)
    assert (worker.counts, len(shop.seen)) == ({"duplicate": 1}, 1)

    shop.act = lambda message: None
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
    await bench.until_empty(shop.app)
    assert (bench.effects(), await shop.progress()) == (["a"], Progress.DONE)
    await shop.app.close()


async def test_a_copy_that_comes_after_a_kill_costs_what_waits_no_attempt(bench: Bench) -> None:
    """The worker was killed between storing the next attempt and telling the broker: the message comes as a suspect."""
    shop = Shop(backoff="1h, 1h", max_attempts=3)
    give_settings(shop.app, bench.settings())
    shop.act = lambda message: 1 / 0
    await shop.accept("a")
    ((stored, headers),) = bench.do("select body, headers from idemconsumer.queue")
    await bench.until_empty(shop.app)
    assert bench.attempts() == 1

    store = await PostgresStore.open(bench.dsn, SCHEMA, connections=1, longest_run=30.0)
    bound = next(each for each in shop.app.bound_handlers(bench.settings()) if each.name == "pay")
    copy = Work.of(bound, Sent("postgres:orders", stored, decode_headers(headers)), suspect=True)
    assert (await Engine(store).process(copy)).kind is OutcomeKind.DUPLICATE
    assert bench.attempts() == 1
    await store.close()
    await shop.app.close()


async def test_what_was_lost_on_its_way_is_released_by_a_person(bench: Bench, shop: Shop) -> None:
    await shop.accept("a")
    bench.do("create table kept as select * from idemconsumer.queue")
    bench.do("delete from idemconsumer.queue")
    known, key = Keys(bench.dsn, SCHEMA), shop.pay.plan.identity("shop").digest("t", "k")
    detail = await known.explain(key)
    assert detail.awaited == "postgres:orders"
    assert detail.next.startswith("it would run if it is the message that was accepted and sent to postgres:orders")
    with pytest.raises(ConfigurationError, match="its message is stored"):
        await known.forget(key, record=True, by="ann")
    await known.release(key, by="ann")
    assert await shop.progress() is Progress.UNKNOWN

    bench.do("insert into idemconsumer.queue (name, body, headers) select name, body, headers from kept")
    await bench.until_empty(shop.app)
    assert (bench.effects(), await shop.progress()) == (["a"], Progress.DONE), "it comes after all, and runs once"


async def test_what_is_stored_in_a_queue_of_the_handlers_own_is_not_released(bench: Bench, shop: Shop) -> None:
    await shop.app.accept(shop.pay, Item("a"), key="k", tenant="t")
    with pytest.raises(ConfigurationError, match="its message is stored"):
        await Keys(bench.dsn, SCHEMA).release(shop.pay.plan.identity("shop").digest("t", "k"), by="ann")


# -------------------------------------------------------------------------------------------------------------- refused
async def test_a_message_that_names_another_key_or_tenant_is_refused(bench: Bench) -> None:
    app = App("shop")
    give_settings(app, bench.settings())

    @app.idempotent_handler("postgres:orders", key=Key.first("id", IDEMPOTENCY), tenant="entity")
    async def pay(item: Item, tx: Tx) -> None:
        await note(tx, item)

    def accept(key: str, tenant: str | None) -> Any:
        return app.accept(pay, Item("a", "t"), key=key, tenant=tenant, via="postgres:orders")

    with pytest.raises(BadMessage, match=r"key_differs.*first of"):
        await accept("b", "t")
    for tenant in ("other", None):
        with pytest.raises(BadMessage, match=r"tenant_differs.*payload path 'entity'"):
            await accept("a", tenant)
    assert bench.do("select count(*) from idemconsumer.record") == bench.do("select count(*) from idemconsumer.queue")
    assert await accept("a", "t") == NEW
    await bench.until_empty(app)
    assert (await app.accepted(pay, key="a", tenant="t")).progress is Progress.DONE
    await app.close()


@pytest.mark.parametrize(
    ("key", "via", "says"),
    [
        ("id", "kafka:other", "its sources are kafka:orders"),
        ("id", "memory:orders", "its sources are"),
        ("id", "rabbitmq:exchange/key", "its sources are"),
        (Key.offset(), "kafka:orders", "its `key` is Kafka offset, which is not known"),
        (Key.first("id", Key.offset()), "kafka:orders", "its `key` is Kafka offset"),
        (Key.all("id", "entity"), "kafka:orders", "its `key` is all of"),
        (Key.message_id(), "kafka:orders", "its `key` is message id"),
        (Key.cloudevent(), "kafka:orders", "its `key` is CloudEvent"),
        (Key.payload(), "kafka:orders", "its `key` is hash of the payload"),
        (lambda message: message.position, "kafka:orders", "its `key` is function"),
    ],
)
def test_a_key_that_is_not_known_before_is_refused(key: KeySpec, via: str, says: str) -> None:
    app = App("shop")

    @app.idempotent_handler("kafka:orders", key=key)
    async def pay(item: Item, tx: Tx) -> None: ...

    with pytest.raises(ConfigurationError, match="handler 'pay' cannot accept by") as error:
        check_via(pay.plan, via)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("options", "via", "says"),
    [
        ({"tenant": Key.message_id()}, "sqs:orders", "its `tenant` is message id"),
        ({"tenant": lambda message: "t"}, "sqs:orders", "its `tenant` is function"),
        ({"fingerprint": Key.message_id()}, "sqs:orders", "its `fingerprint` is message id"),
        ({"envelope": "sns"}, "sqs:orders", "it takes messages in an `envelope`"),
        ({"key": Key.message_id()}, "sqs:orders.fifo", "its `key` is message id"),
    ],
)
def test_what_cannot_be_sent_along_is_refused(options: dict[str, Any], via: str, says: str) -> None:
    app = App("shop")

    @app.idempotent_handler("sqs:orders", "sqs:orders.fifo", "rabbitmq:q", **{"key": "id"} | options)
    async def pay(item: Item, tx: Tx) -> None: ...

    with pytest.raises(ConfigurationError) as error:
        check_via(pay.plan, via)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("key", "via", "stored", "comes_as"),
    [
        (Key.record_key(), "kafka:orders", "k", Sent("", b"", record_key=b"k")),
        ("id", "kafka:orders", "k", Sent("", b"", record_key=b"k")),
        (Key.message_id(), "rabbitmq:q", "k", Sent("", b"", message_id="k")),
        (Key.message_id(), "sqs:orders", "k", Sent("", b"", message_id="k")),
        ("id", "sqs:orders.fifo", None, Sent("", b"", {"MessageGroupId": "k"})),
        ("id", "rabbitmq:exchange/key", None, Sent("", b"")),
    ],
)
async def test_it_is_sent_as_its_source_orders_and_names_messages(
    bench: Bench, key: KeySpec, via: str, stored: str | None, comes_as: Sent
) -> None:
    app = App("shop")
    give_settings(app, bench.settings())
    sources = [via] if "/" not in via else ["rabbitmq:q"]

    @app.idempotent_handler(*sources, key=key)
    async def pay(item: Item, tx: Tx) -> None: ...

    assert await app.accept(pay, Item("k"), key="k", via=via) == NEW
    ((destination, found, headers),) = bench.do(
        "select destination, key, convert_from(headers, 'UTF8')::jsonb - 'idemconsumer-accepted'"
        " from idemconsumer.outbox"
    )
    assert (destination, found, headers) == (via, stored, comes_as.headers)
    (bound,) = app.bound_handlers(bench.settings())
    arrives = Sent(sources[0], body(Item("k")), comes_as.headers, message_id=comes_as.message_id,
                   record_key=comes_as.record_key)  # fmt: skip
    assert bench.do("select key from idemconsumer.record") == [(bound.call_for(arrives).claim.key,)]
    await app.close()


async def test_what_was_accepted_says_when(bench: Bench, shop: Shop) -> None:
    """H49: by the clock of the database, from the acceptance on to its end."""
    await shop.accept("a")
    pending = await shop.app.accepted(shop.pay, key="k", tenant="t")
    await bench.until_empty(shop.app)
    done = await shop.app.accepted(shop.pay, key="k", tenant="t")
    key = shop.pay.plan.identity("shop").digest("t", "k")
    assert done.progress is Progress.DONE
    assert done.created_at == pending.created_at == (await Keys(bench.dsn, SCHEMA).explain(key)).created_at
    ((accepted, changed, state),) = bench.do(
        "select a.created_at, r.changed_at, r.state from idemconsumer.accepted a join idemconsumer.record r using (key)"
    )
    assert (accepted, State(state)) == (done.created_at, State.COMPLETED)
    assert accepted < changed
