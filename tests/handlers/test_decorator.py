"""The decorator: what it refuses at import, what it plans, what it makes of each message."""

from __future__ import annotations

import asyncio
import functools
import gzip
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol, Union, cast

import msgspec
import pytest

from idemconsumer.app.app import App
from idemconsumer.errors import BadMessage, ConfigurationError, HandlerError
from idemconsumer.handlers.arguments import Batch, Duration, Saga, Tx
from idemconsumer.handlers.decorator import Handler, idempotent_handler
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.message.keys import Key
from idemconsumer.message.message import Message, Subscription
from idemconsumer.rules.backoff import Backoff
from tests.support.waiting import PATIENCE

TX = cast(Tx, object())


class Order(msgspec.Struct):
    order_id: str
    qty: int = 1
    shop: str | None = None
    note: str = ""


OLD_STYLE = Union[Order, None]  # noqa: UP007 - typing.Union is another class


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
    async with asyncio.timeout(PATIENCE):
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
class Unstorable:
    """Cannot be stored."""


class Base:
    """Says nothing of what it is stored as."""


@dataclass
class Stored(Base):
    number: int


class Shape(Protocol):
    number: int


@pytest.mark.parametrize(
    "annotation", [Unstorable, list[Unstorable], Unstorable | None, dict[str, tuple[Unstorable, ...]], Path]
)
@pytest.mark.parametrize("mode", [Tx, Saga])
def test_a_result_that_cannot_be_stored_is_refused_at_import(annotation: Any, mode: type) -> None:
    async def returns(order: Order, given: Any) -> Any: ...

    returns.__annotations__ |= {"given": mode, "return": annotation}
    name = "Path" if annotation is Path else "Unstorable"
    assert f"it returns {name}, which cannot be stored as JSON; return a Struct, dataclass" in refusal(returns)


@pytest.mark.parametrize(
    "annotation", [Stored, Base, Shape, Any, object, NoReturn, None, set[int], Awaitable[Unstorable]]
)
def test_a_result_whose_values_decide_is_no_error(annotation: Any) -> None:
    async def returns(order: Order) -> Any: ...

    returns.__annotations__["return"] = annotation
    assert handler(returns).name == "returns"


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
        ("kafka:my orders", "write a topic's name: letters, digits"),
        ("kafka:orders/0", "write a topic's name"),
        ("kafka:..", "write a topic's name"),
        ("kafka:/orders", "regular expression between slashes"),
        ("kafka://", "regular expression between slashes"),
        ("kafka:/orders(/", "is no regular expression (missing )"),
        ("postgres:~due", "reserved"),
        (
            "sqs:https://sqs.eu-west-1.amazonaws.com/1/or ders",
            "is not a queue; write its name, as sqs:orders, its ARN, or its URL without credentials",
        ),
        ("sqs:arn:aws:sqs:eu-west-1:1:orders", "is not a queue"),
        ("sqs:1/orders", "is not a queue"),
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
    assert (options.group_size, options.max_attempts, options.wait) == (None, 5, 10.0)
    assert (options.retain, options.wait, options.timeout) == (1_209_600.0, 10.0, 30.0)
    assert (options.backoff, options.fail_on) == (Backoff(0.5, 2.0, 30.0), ())
    given = bound(
        retain=timedelta(days=1), wait=0, timeout="2m", max_attempts=1, group_size=128,
        backoff="100ms, 2s", fail_on=(OSError, KeyError),
    ).options  # fmt: skip
    assert (given.retain, given.wait, given.timeout) == (86_400.0, 0.0, 120.0)
    assert (given.max_attempts, given.group_size) == (1, 128)
    assert given.backoff == Backoff(0.1, 2.0, 2.0)
    assert given.fail_on == (OSError, KeyError)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("group_size", 0, "write a whole number from 1 to 128"),
        ("group_size", 129, "write a whole number from 1 to 128"),
        ("group_size", True, "write a whole number"),
        ("max_attempts", 0, "write a whole number from 1"),
        ("max_attempts", "5", "write a whole number from 1"),
        ("consumer_group", "", "write a string"),
        ("version", "*", 'is "*", which marks sagas that a person resumed; write e.g. "2"'),
        ("retain", "14", "write a number with its unit"),
        ("retain", 0, "is zero"),
        ("timeout", "0s", "is zero"),
        ("timeout", "21d", "is longer than 20 days"),
        ("lease", "21d", "is longer than 20 days"),
        ("retain", "36501d", "is longer than 100 years"),
        ("timeout", -1, "is not a duration"),
        ("wait", None, "is not a duration"),
        ("backoff", "1s", '"0.5s, 30s"'),
        ("backoff", ("1s", "2s", "3s"), '"0.5s, 30s"'),
        ("backoff", ("2s", "1s"), "first <= cap"),
        ("backoff", ("1s", "soon"), "is not a duration"),
        ("fail_on", ValueError, "fail_on=(ValueError,)"),
        ("fail_on", ("ValueError",), "fail_on=(ValueError,)"),
        ("tenant", "region", "`tenant` 'region': Order has no field 'region'"),
        ("order_by", "region", "`order_by` 'region': Order has no field"),
        ("fingerprint", "quantity", "`fingerprint` 'quantity': Order has no field 'quantity'"),
        ("key", "orderid", "`key` 'orderid': Order has no field 'orderid'; did you mean 'order_id'?"),
        ("key", 5, "`key` is of type int"),
    ],
)
def test_a_wrong_option_is_one_clear_error(option: str, value: Any, says: str) -> None:
    assert says in refusal(**{option: value})


@pytest.mark.parametrize("options", [{"backoff": "10m, 6h"}, {"max_attempts": 200}], ids=str)
def test_the_pauses_of_a_saga_are_bounded_only_where_they_hold_its_delivery(options: Any) -> None:
    async def book(order: Order, saga: Saga) -> None: ...

    handler(**options)
    handler(book, **options)
    handler(book, settle="finished", backoff=Backoff(1, 2, 60), max_attempts=5)  # it never gets there
    refused = refusal(book, settle="finished", **options)
    assert refused.endswith('or write settle="claimed", which settles the message at its claim')


def test_what_is_taken_from_the_offset_needs_kafka() -> None:
    for options in (
        {"key": Key.first("order_id", Key.offset())},
        {"tenant": Key.offset()},
        {"order_by": "partition"},
    ):
        assert "which 'rabbitmq:b' does not have; " in refusal(reserve, "kafka:a", "rabbitmq:b", **options)
        handler(reserve, "kafka:a", **options)


def test_what_only_one_broker_carries_needs_that_broker() -> None:
    for key, fine, other in (
        (Key.record_key(), "kafka:a", "rabbitmq:b"),
        (Key.all("order_id", Key.property("correlation_id")), "rabbitmq:b", "kafka:a"),
    ):
        assert f"which {other!r} does not have; " in refusal(reserve, fine, other, key=key)
        handler(reserve, fine, key=key)
        handler(reserve, fine, other, key=Key.first(key, "order_id"))


@pytest.mark.parametrize("annotation", [bytes | None, Order | None, OLD_STYLE, Annotated[Order | None, "x"]])
def test_a_tombstone_is_none_where_the_payload_may_be_none(annotation: Any) -> None:
    async def keep(order: object) -> None: ...

    keep.__annotations__["order"] = annotation
    gone = Message("kafka:a", b"", record_key=b"k", tombstone=True)
    plan = idempotent_handler("kafka:a", key=Key.record_key())(keep).plan.bind("shop")
    assert plan.call_for(gone).payload is None
    assert (plan.call_for(gone).key, plan.call_for(gone).claim.fingerprint) == ("k", sha256(b"").digest())


@pytest.mark.parametrize("annotation", [bytes, Order, Any, dict[str, None]])
def test_a_tombstone_is_a_dead_letter_elsewhere(annotation: Any) -> None:
    async def keep(order: object) -> None: ...

    keep.__annotations__["order"] = annotation
    plan = idempotent_handler("kafka:a", key=Key.record_key())(keep).plan.bind("shop")
    with pytest.raises(BadMessage, match="tombstone: the record has no value, and the payload's type has no"):
        plan.call_for(Message("kafka:a", b"", record_key=b"k", tombstone=True))


def test_bytes_or_none_are_the_body() -> None:
    async def keep(body: bytes | None) -> None: ...

    plan = idempotent_handler("kafka:a", key=Key.payload())(keep).plan.bind("shop")
    assert plan.call_for(Message("kafka:a", b"\xff")).payload == b"\xff"


# ------------------------------------------------------------------------------------------------- fingerprints
def compared(body: bytes, fn: Callable[..., Any] = reserve, **options: Any) -> tuple[bytes | None, bytes | None]:
    claim = bound(fn, **options).call_for(Message("kafka:orders", body, message_id="m")).claim
    return claim.fingerprint, claim.canonical


def test_a_payload_is_compared_by_its_bytes_and_by_its_value() -> None:
    async def take(body: bytes) -> None: ...

    one, other = b'{"order_id":"a","qty":2,"new":1}', b'{"new": 1, "qty": 2, "order_id": "a"}'
    assert compared(one) == (sha256(one).digest(), keys.canonical(other))
    assert compared(one, fingerprint="raw bytes") == (sha256(one).digest(), None)
    assert compared(one, take, key=Key.message_id()) == (sha256(one).digest(), None)
    made = keys.canonical(b'{"order_id":"a"}')
    assert compared(one, decode=lambda body, message: Order("a")) == (sha256(one).digest(), made)
    assert compared(one, decode=lambda body, message: Order("a"), fingerprint="raw bytes")[1] is None
    assert compared(one, fingerprint=None) == (None, None)
    assert compared(one, fingerprint="qty") == compared(other, fingerprint="qty")
    assert compared(one, fingerprint="qty")[1] is None


def test_what_decode_makes_is_compared_and_not_how_it_was_sent() -> None:
    """R26: the same value, compressed a second later or with its fields in another order, is the same message."""

    def unzipped(body: bytes, message: Message) -> Order:
        return msgspec.json.decode(gzip.decompress(body), type=Order)

    texts = [b'{"order_id":"a","qty":2}', b'{"qty": 2, "order_id": "a"}', b'{"order_id":"a","qty":3}']
    bodies = [gzip.compress(text, mtime=second) for second, text in enumerate(texts)]
    one, same, other = (compared(body, decode=unzipped) for body in bodies)
    assert one[0] != same[0]
    assert one[1] == same[1] != other[1]

    class Opaque:
        pass

    async def anything(order: Any, tx: Tx) -> None: ...

    assert compared(b"x", anything, key=Key.message_id(), decode=lambda body, message: Opaque())[1] is None


def test_in_an_envelope_the_inside_is_compared_and_the_bytes_that_arrived() -> None:
    one, other = notification(order_id="a", qty=2), notification(qty=2, order_id="a")
    inner = b'{"order_id":"a","qty":2}'
    assert compared(one, envelope="sns") == (sha256(one).digest(), keys.canonical(inner))
    assert compared(other, envelope="sns") == (sha256(other).digest(), keys.canonical(inner))
    assert compared(one, envelope="sns", fingerprint="raw bytes") == (sha256(one).digest(), sha256(inner).digest()[:16])


# ------------------------------------------------------------------------------------------ envelope and decoder
def notification(**payload: Any) -> bytes:
    inner = msgspec.json.encode(payload).decode()
    return msgspec.json.encode({"Type": "Notification", "MessageId": "n-1", "Message": inner})


def test_payload_and_key_are_taken_out_of_the_envelope() -> None:
    arrived = Message("kafka:orders", notification(order_id="a", qty=2))
    call = bound(envelope="sns").call_for(arrived)
    assert (call.key, call.payload) == ("a", Order("a", 2))
    assert call.arrived.body == b'{"order_id":"a","qty":2}'
    assert bound(envelope="sns", key=Key.message_id()).call_for(arrived).key == "n-1"
    assert bound(envelope="sns", key=Key.payload()).call_for(arrived).key == sha256(call.arrived.body).hexdigest()
    with pytest.raises(BadMessage, match="not an SNS notification"):
        bound(envelope="sns").call_for(Message("kafka:orders", b'{"order_id": "a"}'))


class Opaque:
    """As another library makes them."""

    def __init__(self, order_id: str) -> None:
        self.order = {"id": order_id}
        self.lines = [self.order]


async def take_opaque(order: Opaque, tx: Tx) -> None: ...


def test_a_decoder_of_ones_own_makes_the_payload() -> None:
    def decode(body: bytes, message: Message) -> Opaque:
        return Opaque(f"{body.decode()} of {message.position}")

    def key_of(key: str) -> str:
        plan = bound(take_opaque, key=key, decode=decode, fingerprint="order.id")
        return plan.call_for(Message("kafka:orders", b"x", position="t-0-1")).key

    assert key_of("order.id") == "x of t-0-1"
    assert key_of("lines[0].id") == "x of t-0-1"
    for missing in ("order.no", "no.id", "lines[1].id", "lines[0].no"):
        with pytest.raises(BadMessage, match="key_missing"):
            key_of(missing)
    assert "is more than a path" in refusal(take_opaque, key="lines[*].id", decode=decode)
    assert "give decode= a function" in refusal(take_opaque)
    assert 'name what duplicates have in common, e.g. fingerprint="order.id"' in refusal(
        take_opaque, key="order.id", decode=decode
    )

    def as_dict(body: bytes, message: Message) -> dict[str, str]:
        return {"order_id": body.decode()}

    async def take_dict(order: dict[str, str], tx: Tx) -> None: ...

    assert bound(take_dict, decode=as_dict).call_for(Message("kafka:orders", b"x")).key == "x"


@pytest.mark.parametrize("error", [ValueError("s3cret"), SystemExit("s3cret"), RecursionError()], ids=repr)
def test_what_a_decoder_raises_makes_the_message_undecodable(error: BaseException) -> None:
    def decode(body: bytes, message: Message) -> Order:
        raise error

    with pytest.raises(BadMessage) as caught:
        bound(decode=decode).call_for(Message("kafka:orders", b"x"))
    assert caught.value.reason == "undecodable"
    assert type(error).__name__ in caught.value.detail
    assert "s3cret" not in str(caught.value)


def test_a_decoder_that_returns_a_coroutine_is_told_so_and_no_handler_is_given_it() -> None:
    async def later(body: bytes) -> Order:
        return Order("a")

    with pytest.raises(BadMessage, match="undecodable: decode= returned a coroutine, as an async function does"):
        bound(decode=lambda body, message: later(body)).call_for(Message("kafka:orders", b"x"))


class Later:
    async def __call__(self, *given: object) -> Order:
        return Order("a")


@pytest.mark.parametrize("decode", [Later(), functools.partial(Later.__call__, Later())], ids=["object", "partial"])
async def test_an_async_decoder_makes_the_payload_once_it_is_awaited(decode: Any) -> None:
    handler = bound(decode=decode)
    message = Message("kafka:orders", b"x")
    assert handler.waits_for(message)
    assert (await handler.read(message)).payload == Order("a")
    tombstone = Message("kafka:orders", b"", tombstone=True)
    assert not handler.waits_for(tombstone)
    assert not handler.waits_for(Message("postgres:~shop/reserve", b'{"order_id": "a"}', message_id="k"))


def test_a_decoder_may_say_itself_what_is_bad() -> None:
    def decode(body: bytes, message: Message) -> Order:
        raise BadMessage("schema_unknown", "schema 7 is not in the registry")

    with pytest.raises(BadMessage, match="schema_unknown: schema 7 is not in the registry"):
        bound(decode=decode).call_for(Message("kafka:orders", b"x"))


def test_what_is_begun_from_code_is_in_no_envelope_and_is_json() -> None:
    async def book(order: Order, saga: Saga) -> None: ...

    async def book_opaque(order: Opaque, saga: Saga) -> None: ...

    begun = Message("postgres:~shop/book", b'{"order_id": "a"}', message_id="k")
    assert bound(book, envelope="sns").call_for(begun).payload == Order("a")
    assert bound(book, decode=lambda body, message: Order("no")).call_for(begun).payload == Order("a")
    given: Any = {"fingerprint": "order.id", "decode": lambda body, message: Opaque("no")}
    other = bound(book_opaque, key="order.id", **given)
    with pytest.raises(BadMessage, match="cannot be started from code"):
        other.call_for(msgspec.structs.replace(begun, source="postgres:~shop/book_opaque"))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("envelope", "soap", '`envelope` is \'soap\'; write "sns" or "eventbridge" or "cloudevents"'),
        ("decode", "avro", "`decode` is 'avro'; write a function of the body and the Message, plain or async"),
        ("key", Later(), "`key` is an async function"),
        ("decode", lambda body: body, "`decode` is <lambda>, which cannot be called with two arguments"),
        ("tenant", lambda: "a", "`tenant` is function <lambda>, which cannot be called with one argument"),
        ("key", Key.first(cast(Any, lambda message, payload: "a")), "write a function of the Message"),
    ],
)
def test_an_envelope_or_a_function_that_is_none_is_an_error_at_import(option: str, value: Any, says: str) -> None:
    assert says in refusal(**{option: value})


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


def test_whatever_is_raised_while_a_message_is_read_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library too, which nobody has foreseen."""

    def unforeseen(given: object) -> None:
        raise ValueError("s3cret")

    monkeypatch.setattr("idemconsumer.handlers.handler.token_of", unforeseen)
    with pytest.raises(BadMessage) as caught:
        bound().call_for(message())
    assert caught.value.reason == "undecodable"
    assert "ValueError was raised" in caught.value.detail
    assert "s3cret" not in str(caught.value)


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
        ({}, {"position": "orders-3-42"}, None),
        ({}, {"source": "rabbitmq:orders", "position": "orders-3-42"}, None),
        ({"order_by": None}, {"order_hint": b"customer-7", "position": "orders-3-42"}, None),
        ({"order_by": "shop"}, {"order_hint": b"customer-7"}, "eu"),
        ({"order_by": "partition"}, {"order_hint": b"customer-7", "position": "orders-3-42"}, "orders-3"),
        ({"order_by": "partition"}, {"order_hint": b"customer-7"}, None),
    ],
)
def test_order_is_that_of_the_entity_the_record_key_or_the_partition_and_else_there_is_none(
    options: Any, arrived: Any, order: str | bytes | None
) -> None:
    assert bound(**options).call_for(message(b'{"order_id":"a","shop":"eu"}', **arrived)).order == order


def test_a_message_of_no_entity_has_no_order() -> None:
    assert bound(order_by="shop").call_for(message()).order is None


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


def test_an_app_names_destinations_that_can_be() -> None:
    assert App("shop", publishes=["kafka:paid", "rabbitmq:x/y"]).publishes == ("kafka:paid", "rabbitmq:x/y")
    with pytest.raises(ConfigurationError, match="'orders' has no known scheme"):
        App("shop", publishes=["orders"])
    with pytest.raises(ConfigurationError, match=r"is one text; write a list, \['kafka:paid'\]"):
        App("shop", publishes="kafka:paid")


def included(one: tuple[str, str | None], other: tuple[str, str | None]) -> App:
    app = App("shop")
    for name, (source, group) in (("bill", one), ("mail", other)):
        options = {} if group is None else {"consumer_group": group}
        app.idempotent_handler(source, key="order_id", name=name, **options)(reserve)  # type: ignore[arg-type]
    return app


@pytest.mark.parametrize(
    ("source", "other"),
    [
        ("kafka:orders", "kafka:orders"),
        ("kafka:orders.eu", r"kafka:/orders\..*/"),
        (r"kafka:/orders\..*/", "kafka:orders.eu"),
        (r"kafka:/orders\..*/", r"kafka:/orders\..*/"),
    ],
)
def test_a_topic_reaches_one_handler_of_each_group(source: str, other: str) -> None:
    for group in (None, "shop"):
        with pytest.raises(ConfigurationError, match=r"both consume 'kafka:.*consumer_group="):
            included((source, None), (other, group))
    assert list(included((source, None), (other, "mail")).handlers) == ["bill", "mail"]


def test_two_handlers_of_what_has_no_groups_are_refused() -> None:
    for source in ("rabbitmq:orders", "sqs:orders", "postgres:orders", "memory:orders"):
        with pytest.raises(ConfigurationError, match="use one handler, or two apps"):
            included((source, "bill"), (source, "mail"))
    assert included(("kafka:/orders/", None), ("kafka:orders.eu", None)), "a pattern matches whole names"


async def test_of_several_handlers_of_a_topic_the_one_that_is_meant_must_be_given() -> None:
    app = included(("kafka:orders", None), ("kafka:/ord.*/", "mail"))
    with pytest.raises(ConfigurationError, match="'bill' and 'mail' consume 'kafka:orders'; pass handler="):
        await app.process(Message("kafka:orders", b"{}"))


@pytest.mark.parametrize(
    ("destination", "says"),
    [
        ("orders", "has no known scheme; write one of"),
        ("carrier:pigeon", "'carrier:pigeon' has no known scheme; write one of"),
        ("postgres:", 'has no valid name; write "postgres:name"'),
        ("postgres:~parked", "reserved"),
        ("kafka:/orders/", "stands for many topics; publish to one of them"),
        (
            "sqs:https://sqs.eu-west-1.amazonaws.com/1/or ders",
            "is not a queue; write its name, as sqs:orders, its ARN, or its URL without credentials",
        ),
        ("sqs:arn:aws:sqs:eu-west-1:1:orders", "is not a queue"),
        ("sqs:1/orders", "is not a queue"),
    ],
)
async def test_publishing_to_what_is_no_destination_is_refused(destination: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        await App("shop").publish(destination, {})


def test_the_message_of_a_saga_has_no_order_unless_it_is_asked_for() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None: ...

    message = Message("kafka:orders", b'{"id": "k", "account": "a"}', record_key=b"r", order_hint="r")
    plain = idempotent_handler("kafka:orders", key="id")(book).plan.bind("shop")
    ordered = idempotent_handler("kafka:orders", key="id", order_by="account")(book).plan.bind("shop")
    assert (plain.call_for(message).order, ordered.call_for(message).order) == (None, "a")


def test_replies_are_refused_where_there_would_be_none() -> None:
    async def book(order: Order, saga: Saga) -> int:
        return 1

    assert 'write settle="finished"' in refusal(book, reply=True)
    assert bound(book, reply=True, settle="finished").options.reply is not None
    assert "no message of postgres:orders can ask for an answer" in refusal(reserve, "postgres:orders", reply=True)
    assert "no regular expression" in refusal(reply="(")
    assert "`reply` is 1; write True, or what whole addresses must match" in refusal(reply=1)
    assert bound(reply=False).options.reply is None


def test_letters_go_to_one_place_that_is_not_where_they_came_from() -> None:
    assert bound(dead_letter_to="rabbitmq:letters/orders").options.dead_letter_to == "rabbitmq:letters/orders"
    assert "consumes itself" in refusal(reserve, r"kafka:/orders.*/", dead_letter_to="kafka:orders.dlq")
    assert "stands for many topics" in refusal(dead_letter_to="kafka:/dlq.*/")
    assert "no known scheme" in refusal(dead_letter_to="orders.dlq")
