"""The decorator: what it refuses at import, what it plans, what it makes of each message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any, cast

import msgspec
import pytest

from idemconsumer.app.app import App
from idemconsumer.errors import BadMessage, ConfigurationError, HandlerError
from idemconsumer.handlers.decorator import Handler, idempotent_handler
from idemconsumer.handlers.durations import Backoff, Duration, parse_duration
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.message.keys import Key
from idemconsumer.message.message import Message, Subscription
from idemconsumer.ports.handler import Batch, Saga, Tx

TX = cast(Tx, object())


class Order(msgspec.Struct):
    order_id: str
    qty: int = 1
    shop: str | None = None
    note: str = ""


async def reserve(order: Order, tx: Tx) -> int:
    return order.qty


def handler(
    fn: Callable[..., Any] = reserve, *sources: str, key: Any = "order_id", **options: Any
) -> Handler[..., Any]:
    return idempotent_handler(*(sources or ("kafka:orders",)), key=key, **options)(fn)


def bound(fn: Callable[..., Any] = reserve, *sources: str, **options: Any) -> BoundHandler:
    return handler(fn, *sources, **options).plan.bind("shop")


def refusal(fn: Callable[..., Any] = reserve, *sources: str, **options: Any) -> str:
    with pytest.raises(HandlerError) as caught:
        handler(fn, *sources, **options)
    text = str(caught.value)
    assert text.startswith(f"handler {caught.value.handler!r}: ")
    assert "; " in text, "it must say what to write instead"
    return text


def message(body: bytes = b'{"order_id":"a","qty":2}', source: str = "kafka:orders", **more: Any) -> Message:
    return Message(source, body, **more)


# ---------------------------------------------------------------------------------------- the bare function
async def test_calling_a_handler_runs_the_bare_function() -> None:
    @idempotent_handler("kafka:orders", key="order_id")
    async def counted(order: Order, tx: Tx) -> int:
        """Counts."""
        return order.qty

    assert await counted(Order("a", 3), TX) == 3
    assert await counted(Order("a", 3), tx=TX) == 3
    assert (counted.name, counted.__name__, counted.__doc__) == ("counted", "counted", "Counts.")  # type: ignore[attr-defined]


async def test_calling_a_plain_handler_runs_it_where_it_is_called() -> None:
    @idempotent_handler("kafka:orders", key="order_id")
    def where(order: Order) -> int:
        return threading.get_ident()

    assert await where(Order("a")) == threading.get_ident()


# ----------------------------------------------------------------------------------------------- signatures
async def test_tx_and_message_are_injected_by_type_in_any_order() -> None:
    async def one(order: Order, m: Message, t: Tx) -> object:
        return order, t, m

    async def other(order: Order, /, t: Tx, *, m: Message) -> object:
        return order, t, m

    for fn in (one, other):
        h = bound(fn)
        call = h.call_for(message())
        assert h.needs_tx
        assert await h.run(call, TX, 1) == (Order("a", 2), TX, call.message(1))


async def test_a_handler_sees_its_key_tenant_and_attempt_in_the_message() -> None:
    async def seen(order: Order, m: Message) -> object:
        return m.key, m.tenant, m.attempt

    h = bound(seen, tenant="shop")
    assert not h.needs_tx
    assert await h.run(h.call_for(message(b'{"order_id":"a","shop":"eu"}')), None, 3) == ("a", "eu", 3)


async def test_a_plain_function_runs_in_a_thread() -> None:
    def where(order: Order, m: Message) -> int:
        return threading.get_ident()

    h = bound(where)
    assert await h.run(h.call_for(message()), None, 1) != threading.get_ident()


async def test_a_plain_function_that_raises_stop_iteration_ends() -> None:
    def empty(order: Order) -> object:
        return next(iter(()))

    h = bound(empty)
    async with asyncio.timeout(5):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await h.run(h.call_for(message()), None, 1)


async def test_an_async_function_wrapped_in_a_plain_one_stays_async() -> None:
    def traced(fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def inner(*args: Any) -> Any:
            return fn(*args)

        return inner

    h = bound(traced(reserve))
    assert await h.run(h.call_for(message()), TX, 1) == 2


async def no_payload() -> None: ...
async def keyword_payload(*, order: Order) -> None: ...
async def bare(order) -> None: ...  # type: ignore[no-untyped-def]
async def bare_second(order: Order, tx) -> None: ...  # type: ignore[no-untyped-def]
async def anything(order: Order, *args: Tx) -> None: ...
async def anything_named(order: Order, **kwargs: Tx) -> None: ...
async def unknown(order: Order, client: dict[str, str]) -> None: ...
async def optional_tx(order: Order, tx: Tx | None) -> None: ...
async def tx_first(tx: Tx, order: Order) -> None: ...
async def message_alone(message: Message) -> None: ...
async def both(order: Order, saga: Saga, tx: Tx) -> None: ...
async def batch_of_a_saga(orders: Batch[Order], saga: Saga) -> None: ...
async def batch_and_message(orders: Batch[Order], tx: Tx, message: Message) -> None: ...
async def batch_of_messages(orders: Batch[Message]) -> None: ...
async def batch_second(order: Order, orders: Batch[Order]) -> None: ...
async def bare_batch_second(order: Order, orders: Batch) -> None: ...  # type: ignore[type-arg]
async def batch_returns(orders: Batch[Order], tx: Tx) -> list[int]: ...  # type: ignore[empty-body]
async def batch_undecodable(orders: Batch[Handler[..., int]]) -> None: ...
def batch_plain_tx(orders: Batch[Order], tx: Tx) -> None: ...
async def unresolved(order: Missing, tx: Tx) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def undecodable(order: Handler[..., int], tx: Tx) -> None: ...
def plain_tx(order: Order, tx: Tx) -> None: ...
def yields(order: Order) -> Iterator[int]:
    yield 1


async def yields_async(order: Order) -> AsyncIterator[int]:
    yield 1


class Service:
    async def method(self, order: Order) -> None: ...


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (no_payload, "it takes no payload; make the payload its first parameter"),
        (keyword_payload, "it takes no payload"),
        (bare, "parameter `order` has no annotation"),
        (bare_second, "parameter `tx` has no annotation"),
        (anything, "*args: 'Tx' accepts anything; name each parameter"),
        (anything_named, "**kwargs: 'Tx' accepts anything"),
        (
            unknown,
            "parameter `client` is of type dict, which cannot be injected; after the payload a handler can take Tx",
        ),
        (optional_tx, "parameter `tx` is of type"),
        (tx_first, "its first parameter `tx` is a Tx; put the payload first"),
        (
            message_alone,
            "its first parameter `message` is a Message; put the payload first: (payload: dict, message",
        ),
        (both, "it takes both Tx and Saga; take Tx for one transaction, or Saga"),
        (batch_of_a_saga, "it takes both Batch and Saga; take one payload with Saga, or Tx with Batch"),
        (batch_and_message, "it takes both Batch and Message; remove Message and call batch.message(i)"),
        (batch_of_messages, "it takes both Batch and Message"),
        (batch_second, "its batch `orders` is not its first parameter; write (orders: Batch[…], …)"),
        (bare_batch_second, "its batch `orders` is not its first parameter"),
        (batch_returns, "it takes a Batch and is declared to return list[int]; declare it `-> None`"),
        (batch_undecodable, "the payload type cannot be decoded"),
        (batch_plain_tx, "cannot use Tx or Saga, which are asynchronous; declare it `async def`"),
        (
            unresolved,
            "the annotation 'Missing' cannot be resolved; define or import it at the top of the module",
        ),
        (undecodable, "the payload type cannot be decoded"),
        (plain_tx, "cannot use Tx or Saga, which are asynchronous; declare it `async def`"),
        (yields, "the function yields; return the result"),
        (yields_async, "the function yields"),
        (Service.method, "parameter `self` has no annotation"),
    ],
)
def test_a_signature_that_cannot_be_called_is_one_clear_error(fn: Callable[..., Any], says: str) -> None:
    text = refusal(fn, key=Key.payload())
    assert f"handler {fn.__name__!r}: " in text
    assert says in text


def test_a_local_class_behind_a_postponed_annotation_is_a_clear_error() -> None:
    class Local(msgspec.Struct):
        order_id: str

    async def uses_local(order: Local) -> None: ...

    assert "the annotation 'Local' cannot be resolved" in refusal(uses_local)


def test_a_return_type_that_only_type_checkers_know_is_no_error() -> None:
    async def returns(order: Order) -> OnlyForCheckers: ...  # type: ignore[name-defined]  # noqa: F821

    assert handler(returns).name == "returns"


# ------------------------------------------------------------------------------------------- names, sources
def test_a_name_is_the_functions_unless_given() -> None:
    assert handler().name == "reserve"
    assert handler(name="reserve_stock").name == "reserve_stock"
    assert "it has no name; give one: name=" in refusal(lambda order: None)
    for wrong in ("", " x", "a\nb", 5):
        assert "`name` is not a printable string" in refusal(name=wrong)
    assert "reserved" in refusal(name="~due")
    assert "decorate a function" in refusal(cast(Any, 5))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("orders", 'has no known scheme; write one of "kafka:name", "rabbitmq:name"'),
        ("kafak:orders", 'has no known scheme; write "kafka:name"'),
        ("kafka", 'has no known scheme; write "kafka:name"'),
        ("kafka:", "has no valid name"),
        ("kafka: orders", "has no valid name"),
        ("postgres:~due", "reserved"),
        (
            "sqs:https://sqs.eu-west-1.amazonaws.com/1/orders",
            "is not a queue name; write the queue's name, e.g. sqs:orders",
        ),
        ("sqs:arn:aws:sqs:eu-west-1:1:orders", "is not a queue name"),
        ("sqs:1/orders", "is not a queue name"),
    ],
)
def test_a_source_that_cannot_be_consumed_is_an_error(source: str, says: str) -> None:
    assert says in refusal(reserve, source)


def test_a_source_is_named_once() -> None:
    assert "named twice" in refusal(reserve, "kafka:a", "kafka:a")


def test_each_source_is_a_subscription_in_the_apps_group_unless_given() -> None:
    assert bound(reserve, "kafka:a", "rabbitmq:b").subscriptions == (
        Subscription("kafka:a", "reserve", "shop"),
        Subscription("rabbitmq:b", "reserve", "shop"),
    )
    assert bound(consumer_group="g").subscriptions[0].group == "g"


def test_the_key_rule_is_told_in_words() -> None:
    assert bound(key=Key.header("Id")).key_rule == "header 'Id'"


# -------------------------------------------------------------------------------------------------- options
def test_an_unknown_option_names_the_nearest_and_all() -> None:
    text = refusal(retian="1d")
    assert "there is no option `retian`; did you mean `retain`? the options are name, group_size," in text


def test_options_are_resolved_to_seconds() -> None:
    options = bound().options
    assert (options.group_size, options.max_attempts, options.on_busy) == (None, 5, "wait")
    assert (options.retain, options.wait, options.timeout) == (1_209_600.0, 10.0, 30.0)
    assert (options.backoff, options.fail_on, options.retry_on) == (Backoff(0.5, 2.0, 30.0), (), None)
    given = bound(
        retain=timedelta(days=1), wait=0, timeout="2m", max_attempts=1, on_busy="defer", group_size=128,
        backoff="100ms, 2s", retry="inline", fail_on=(ValueError,), retry_on=(OSError, KeyError),
    ).options  # fmt: skip
    assert (given.retain, given.wait, given.timeout) == (86_400.0, 0.0, 120.0)
    assert (given.max_attempts, given.on_busy, given.group_size) == (1, "defer", 128)
    assert given.backoff == Backoff(0.1, 2.0, 2.0)
    assert (given.fail_on, given.retry_on) == ((ValueError,), (OSError, KeyError))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("group_size", 0, "write a whole number from 1 to 128"),
        ("group_size", 129, "write a whole number from 1 to 128"),
        ("group_size", True, "write a whole number"),
        ("max_attempts", 0, "write a whole number from 1"),
        ("max_attempts", "5", "write a whole number from 1"),
        ("consumer_group", "", "write a string"),
        ("retain", "14", "write a number with its unit"),
        ("retain", 0, "is zero"),
        ("timeout", "0s", "is zero"),
        ("timeout", -1, "is not a duration"),
        ("wait", None, "is not a duration"),
        ("on_busy", "skip", 'write "wait" or "defer"'),
        ("retry", "scheduled", 'is not available yet; use retry="inline"'),
        ("retry", "later", 'use retry="inline"'),
        ("backoff", "1s", '"0.5s, 30s"'),
        ("backoff", ("1s", "2s", "3s"), '"0.5s, 30s"'),
        ("backoff", ("2s", "1s"), "first <= cap"),
        ("backoff", ("1s", "soon"), "is not a duration"),
        ("backoff", ("10s", "31s"), "stop the handler's lane for more than 30 s; lower `backoff`"),
        (
            "max_attempts",
            40,
            'minutes in all; the limit is 15; lower `backoff` or `max_attempts` (longer pauses need retry="scheduled"',
        ),
        ("fail_on", ValueError, "fail_on=(ValueError,)"),
        ("retry_on", ("ValueError",), "retry_on=(ValueError,)"),
        ("tenant", "region", "`tenant` 'region': Order has no field 'region'"),
        ("order_by", "region", "`order_by` 'region': Order has no field"),
        ("fingerprint", "quantity", "`fingerprint` 'quantity': Order has no field 'quantity'"),
        ("key", "orderid", "`key` 'orderid': Order has no field 'orderid'; did you mean 'order_id'?"),
        ("key", 5, "`key` is of type int"),
    ],
)
def test_a_wrong_option_is_one_clear_error(option: str, value: Any, says: str) -> None:
    assert says in refusal(**{option: value})


def test_a_backoff_may_go_beyond_the_inline_limit_where_it_never_gets_there() -> None:
    assert bound(backoff=Backoff(1, 2, 60), max_attempts=5).options.backoff.cap == 60
    assert "stop the handler's lane" in refusal(backoff=Backoff(1, 2, 60), max_attempts=7)


def test_what_is_taken_from_the_offset_needs_kafka() -> None:
    for options in (
        {"key": Key.first("order_id", Key.offset())},
        {"tenant": Key.offset()},
        {"order_by": "partition"},
    ):
        assert "which 'rabbitmq:b' does not have; " in refusal(reserve, "kafka:a", "rabbitmq:b", **options)
        handler(reserve, "kafka:a", **options)


# --------------------------------------------------------------------------------------- durations, backoff
@pytest.mark.parametrize(
    ("written", "seconds"),
    [("250ms", 0.25), ("10s", 10), (" 1.5 h ", 5_400), ("5m", 300), ("14d", 1_209_600), (0, 0), (1.5, 1.5),
     (timedelta(minutes=1), 60)],
)  # fmt: skip
def test_durations_are_seconds(written: Duration, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written",
    ["", "10", "-1s", "1w", "1s2", "٣s", "9" * 400 + "d", -1, float("nan"), float("inf"), True, None],
)
def test_what_is_no_duration_says_how_to_write_one(written: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a duration; write a number with its unit"):
        parse_duration(written)


def test_a_backoff_grows_to_its_cap_and_jitter_only_shortens_it() -> None:
    backoff = Backoff(0.5, 2.0, 3.0)
    assert [backoff.delay(n, 0.0) for n in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert 2.0 <= backoff.delay(4, 0.999) < 3.0
    assert backoff.longest(5) == 0.5 + 1 + 2 + 3 + 3
    assert backoff.longest(0) == 0


@pytest.mark.parametrize("wrong", [(0, 2, 1), (2, 2, 1), (1, 1, 1), (1, 2, float("inf"))])
def test_a_backoff_that_never_settles_is_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigurationError, match="is not a backoff"):
        Backoff(*wrong)


# ------------------------------------------------------------------------------------------------- messages
def test_a_call_carries_the_claim_of_app_tenant_handler_and_key() -> None:
    call = bound(tenant="shop").call_for(message(b'{"order_id":"a","shop":"eu"}'))
    assert call.claim.key == keys.digest("shop", "eu", "reserve", "a")
    assert call.claim.scope == "shop/eu/reserve"
    assert (call.message(2).key, call.message(2).tenant, call.message(2).attempt) == ("a", "eu", 2)
    assert call.payload == Order("a", shop="eu")
    plain = bound().call_for(message())
    assert plain.claim.key == keys.digest("shop", None, "reserve", "a")


def test_an_oversized_message_is_not_even_parsed() -> None:
    h = handler().plan.bind("shop", max_message_bytes=10)
    with pytest.raises(BadMessage) as caught:
        h.call_for(message(b"\xff" * 11))
    assert caught.value.reason == "oversized"
    with pytest.raises(BadMessage) as caught:
        h.call_for(message(b"\xff" * 10))
    assert caught.value.reason == "undecodable"


@pytest.mark.parametrize(
    ("options", "body", "reason", "says"),
    [
        ({}, b'{"order_id":""}', "key_missing", "key (payload path 'order_id') is missing"),
        ({}, b"{}", "undecodable", "missing required field"),
        ({"tenant": "shop"}, b'{"order_id":"a"}', "key_missing", "tenant (payload path 'shop') is missing"),
        (
            {"order_by": lambda m: 5},
            b'{"order_id":"a"}',
            "key_invalid",
            "order_by (function <lambda>) returned int",
        ),
    ],
)
def test_a_message_without_what_it_needs_is_refused(options: Any, body: bytes, reason: str, says: str) -> None:
    with pytest.raises(BadMessage) as caught:
        bound(**options).call_for(message(body))
    assert caught.value.reason == reason
    assert says in caught.value.detail


def test_the_fingerprint_is_of_the_body_unless_told_otherwise() -> None:
    one, other = message(), message(b'{"order_id":"a","qty":2,"note":"again"}')

    def prints(**options: Any) -> tuple[bytes | None, bytes | None]:
        h = bound(**options)
        return h.call_for(one).claim.fingerprint, h.call_for(other).claim.fingerprint

    assert prints() == (keys.fingerprint(one.body), keys.fingerprint(other.body))
    assert prints(fingerprint=None) == (None, None)
    assert len(set(prints(fingerprint=Key.all("order_id", "qty")))) == 1


@pytest.mark.parametrize(
    ("options", "arrived", "order"),
    [
        ({}, {"order_hint": b"customer-7", "position": "orders-3-42"}, b"customer-7"),
        ({}, {"order_hint": b"", "position": "orders-3-42"}, b""),
        ({}, {"position": "orders-3-42"}, "orders-3"),
        ({}, {}, "a"),
        ({}, {"source": "rabbitmq:orders", "position": "orders-3-42"}, "a"),
        ({"order_by": "shop"}, {"order_hint": b"customer-7"}, "eu"),
        ({"order_by": "partition"}, {"order_hint": b"customer-7", "position": "orders-3-42"}, "orders-3"),
        ({"order_by": "partition"}, {"order_hint": b"customer-7"}, "a"),
    ],
)
def test_a_lane_is_chosen_by_entity_record_key_partition_or_key(options: Any, arrived: Any, order: str | bytes) -> None:
    assert bound(**options).call_for(message(b'{"order_id":"a","shop":"eu"}', **arrived)).order == order


def test_a_message_of_no_entity_is_ordered_by_its_key() -> None:
    assert bound(order_by="shop").call_for(message()).order == "a"


# ------------------------------------------------------------------------------- what people write by mistake
@pytest.mark.parametrize(
    ("key", "says"),
    [
        (Key.message_id, "`key` is Key.message_id itself, not called; write Key.message_id("),
        (Key.first("order_id", cast(Any, Key.offset)), "`key` is Key.offset itself, not called"),
        (Key.header(""), "`key` is Key.header(''); name it"),
    ],
)
def test_a_key_method_that_was_not_called_and_a_header_without_a_name_are_refused(key: Any, says: str) -> None:
    assert says in refusal(key=key)


def test_a_decorator_without_key_or_sources_says_how_it_is_written() -> None:
    app = cast(Any, App("shop"))
    for decorate in (cast(Any, idempotent_handler), app.idempotent_handler):
        with pytest.raises(ConfigurationError, match=r'no key is given; write @idempotent_handler\("kafka:x", key='):
            decorate("kafka:x")
        with pytest.raises(ConfigurationError, match="no source is given; write @idempotent_handler"):
            decorate(reserve)
    with pytest.raises(HandlerError, match="source 5 is not a string; write one of"):
        app.idempotent_handler("kafka:x", 5, key="order_id")(reserve)


def test_an_app_takes_a_name_and_handlers_only() -> None:
    with pytest.raises(ConfigurationError, match=r"app name 5: write a printable string"):
        App(cast(Any, 5))
    with pytest.raises(ConfigurationError, match=r"include\(reserve\) is not given a handler; decorate the function"):
        App("shop").include(cast(Any, reserve))


@pytest.mark.parametrize(
    ("destination", "says"),
    [
        ("orders", "has no known scheme; write one of"),
        ("carrier:pigeon", "'carrier:pigeon' has no known scheme; write one of"),
        ("postgres:", 'has no valid name; write "postgres:name"'),
        ("postgres:~parked", "reserved"),
        (
            "sqs:https://sqs.eu-west-1.amazonaws.com/1/orders",
            "is not a queue name; write the queue's name, e.g. sqs:orders",
        ),
        ("sqs:arn:aws:sqs:eu-west-1:1:orders", "is not a queue name"),
        ("sqs:1/orders", "is not a queue name"),
    ],
)
async def test_publishing_to_what_is_no_destination_is_refused(destination: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        await App("shop").publish(destination, {})
