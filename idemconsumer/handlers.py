"""The decorator, and the plan it makes of a function: what to decode, what identifies, what to inject.

All that can be known from the function is looked at once, at import; a few calls are left for each message.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper, wraps
from types import MappingProxyType
from typing import (
    Any,
    Final,
    Generic,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

from idemconsumer._batch import Items
from idemconsumer._options import Backoff, Duration, Options, Resolved, check_known, parse_duration, resolve
from idemconsumer._signature import Signature, read_signature
from idemconsumer.errors import BadMessage, ConfigurationError, HandlerError, HandlerFault
from idemconsumer.message import codecs, keys
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message, Subscription
from idemconsumer.ports.handler import Saga, Tx
from idemconsumer.ports.store import Claim
from idemconsumer.settings import Settings

__all__ = [
    "Backoff",
    "BoundHandler",
    "Call",
    "Decorate",
    "Duration",
    "Handler",
    "HandlerPlan",
    "Options",
    "Resolved",
    "asks_for_key",
    "idempotent_handler",
    "parse_duration",
]

P = ParamSpec("P")
R = TypeVar("R")

SCHEMES = ("kafka", "rabbitmq", "sqs", "postgres", "memory")
_DEFAULT_MAX_BYTES = Settings().max_message_bytes
_NO_RESOURCES: Final[Mapping[type, object]] = MappingProxyType({})
TENANT: Final = "idemconsumer-tenant"  # header of a saga begun from code

OrderOf: TypeAlias = Callable[[Message, object, str], str | bytes]
FingerprintOf: TypeAlias = Callable[[Message, object], bytes | None]


# ---------------------------------------------------------------------------------------- what a user holds
class Handler(Generic[P, R]):
    """A decorated function. Calling it runs the bare function: no claim, no transaction, for unit tests."""

    def __init__(self, function: Callable[P, Any], plan: HandlerPlan) -> None:
        update_wrapper(self, function)
        self._function = function
        self.plan = plan

    @property
    def name(self) -> str:
        return self.plan.name

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: Any = self._function(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        return result  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Handler {self.plan.name!r} of {', '.join(self.plan.sources)}>"


class Decorate(Protocol):
    """The type of `idempotent_handler(…)`: it takes the function and gives its Handler."""

    @overload
    def __call__(self, fn: Callable[P, Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Handler[P, R]: ...


def asks_for_key(decorator: Callable[P, R]) -> Callable[P, R]:
    """Raise ConfigurationError where Python's TypeError would not say what to write."""

    @wraps(decorator)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        given = [each for each in args if isinstance(each, str)]
        if not given or "key" not in options:
            what = "no key is given" if given else "no source is given"
            raise ConfigurationError(
                f'@idempotent_handler: {what}; write @idempotent_handler("{given[0] if given else "kafka:orders"}", '
                'key="order_id"), where key says what identifies a message'
            )
        return decorator(*args, **options)

    return checked


@asks_for_key
def idempotent_handler(source: str, *sources: str, key: KeySpec, **options: Unpack[Options]) -> Decorate:
    """Make a function the handler of one or more sources.

    These are `kafka:topic`, `rabbitmq:queue`, `sqs:queue` or `postgres:queue`.

    The first parameter is the payload, decoded by its annotation; `Tx`, `Message` and the app's resources are
    injected by type, in any order. Within `<app>/<tenant>/<name>` the function's effects through Tx are applied once
    for each key.
    A plain function runs in a thread, without Tx; what it does is not part of any transaction. A function whose first
    parameter is a `Batch` of payloads is called once for all new messages of a group. A function that asks for `Saga`
    instead of Tx runs step by step, and is resumed at its last recovery point.
    Raises HandlerError, when the function is decorated, for whatever can be seen to be wrong by then.
    """

    def decorate(fn: Callable[..., Any], /) -> Handler[Any, Any]:
        return Handler(fn, _plan(fn, (source, *sources), key, options))

    return decorate


# --------------------------------------------------------------------------------------- what the app holds
@dataclass(frozen=True, slots=True, eq=False)
class HandlerPlan:
    """All that is known of a handler without its app."""

    name: str
    sources: tuple[str, ...]
    options: Resolved
    key_rule: str
    signature: Signature
    reconcile: Signature | None
    decode: codecs.Decode
    key: keys.Extract
    tenant: keys.Extract | None
    order: OrderOf
    fingerprint: FingerprintOf

    def bind(
        self,
        app: str,
        *,
        max_message_bytes: int = _DEFAULT_MAX_BYTES,
        resources: Mapping[type, object] = _NO_RESOURCES,
    ) -> BoundHandler:
        """This handler as part of `app`, whose name is part of every key. `resources` is read at each call."""
        return BoundHandler(self, app, max_message_bytes, resources)

    @property
    def resources(self) -> tuple[tuple[str, type], ...]:
        """Parameters, its own and those of its reconcile, that only resources can fill, with their types."""
        return (*self.signature.resources, *(() if self.reconcile is None else self.reconcile.resources))


@dataclass(slots=True, eq=False)
class Call:
    """One message, ready to run: decoded and keyed. `order` is what the lane is chosen by."""

    arrived: Message
    payload: object
    key: str
    tenant: str | None
    claim: Claim
    order: str | bytes

    def message(self, attempt: int) -> Message:
        """As a handler sees it. Made when one asks, since few do."""
        return msgspec.structs.replace(self.arrived, key=self.key, tenant=self.tenant, attempt=attempt)


class BoundHandler:
    """A handler of an app: turns messages into calls, and runs them."""

    __slots__ = (
        "_max_bytes",
        "_plan",
        "app",
        "batch",
        "leased",
        "made",
        "name",
        "needs_tx",
        "options",
        "own_source",
        "reconciles",
        "subscriptions",
    )  # fmt: skip

    def __init__(self, plan: HandlerPlan, app: str, max_message_bytes: int, resources: Mapping[type, object]) -> None:
        self._plan = plan
        self.made = resources
        self.app = app
        self._max_bytes = max_message_bytes
        self.name = plan.name
        self.options = plan.options
        self.needs_tx = plan.signature.needs_tx
        self.leased = plan.signature.needs_saga
        self.batch = plan.signature.batch
        self.reconciles = plan.reconcile is not None
        group = plan.options.consumer_group or app
        self.subscriptions = tuple(Subscription(source, plan.name, group) for source in plan.sources)
        # A queue in Postgres: what its own broker would soon drop, and sagas begun from code.
        self.own_source = f"postgres:~{app}/{plan.name}"

    @property
    def resources(self) -> tuple[tuple[str, type], ...]:
        """Parameters that only resources can fill, with their types."""
        return self._plan.resources

    @property
    def key_rule(self) -> str:
        """Where the key comes from, in words."""
        return self._plan.key_rule

    def call_for(self, message: Message) -> Call:
        """Decode and key a message. Raises only BadMessage; one above the size limit is not even parsed."""
        plan = self._plan
        if len(message.body) > self._max_bytes:
            raise BadMessage("oversized", f"{len(message.body):,} bytes, at most {self._max_bytes:,} are allowed")
        payload = plan.decode(message.body)
        key, tenant = self._identity(message, payload)
        claim = Claim(
            keys.digest(self.app, tenant, self.name, key),
            keys.scope_name(self.app, tenant, self.name),
            plan.fingerprint(message, payload),
            plan.options.retain,
        )
        order = plan.order(message, payload, key)
        return Call(message, payload, key, tenant, claim, order)

    def _identity(self, message: Message, payload: object) -> tuple[str, str | None]:
        plan = self._plan
        ours = message.source == self.own_source and message.message_id is not None
        key = (_message_id if ours else plan.key)(message, payload)  # begun from code, which gave the key
        if ours and (given := message.headers.get(TENANT)) is not None:
            return key, str(given)
        return key, None if plan.tenant is None else plan.tenant(message, payload)

    def run(self, call: Call, tx: Tx | Saga | None, attempt: int) -> Awaitable[object]:
        """Run the function; what it raises is raised. Cancelling ends an async function at its next await; a
        plain one goes on in its thread to its end, unheard."""
        return self._invoke(self._plan.signature, call, tx, attempt)

    async def run_batch(self, items: Items, tx: Tx | None) -> None:
        """`run` for a function that takes a batch; what becomes of each item is then told by `items`."""
        try:
            returned = await self._plan.signature.invoke(items, tx, items.message(0), self.made)
        finally:
            items.close()
        if returned is not None:
            raise HandlerFault(
                f"the handler of a batch returned a {type(returned).__name__}, and nobody can say whose result it is; "
                "give each item its own with batch.result(i, value), and return nothing"
            )

    async def reconcile(self, call: Call, tx: Tx, attempt: int) -> object:
        """Ask whether a saga is done already. Only where `reconciles`."""
        assert self._plan.reconcile is not None
        return await self._invoke(self._plan.reconcile, call, tx, attempt)

    def _invoke(self, signature: Signature, call: Call, tx: Tx | Saga | None, attempt: int) -> Awaitable[object]:
        message = call.message(attempt) if signature.needs_message else call.arrived
        return signature.invoke(call.payload, tx, message, self.made)


# ------------------------------------------------------------------------------------------------- planning
def _plan(fn: Callable[..., Any], sources: tuple[str, ...], key: KeySpec, given: Options) -> HandlerPlan:
    name = _name(fn, given)
    check_known(name, given)
    options = resolve(name, given)
    _check_sources(name, sources)
    signature = read_signature(name, fn)
    payload_type = signature.payload_type
    try:
        decode = codecs.decoder(payload_type)
    except TypeError as error:
        raise HandlerError(
            name,
            f"the payload type cannot be decoded: {error}",
            "use a Struct, dataclass, TypedDict, dict or bytes",
        ) from None
    tenant = given.get("tenant")
    for option, spec in (("key", key), ("tenant", tenant), ("order_by", given.get("order_by"))):
        if spec is not None and keys.uses_offset(spec):
            _only_kafka(
                name,
                sources,
                f"`{option}` uses Key.offset()",
                "take Key.message_id() or a field of the payload",
            )
    return HandlerPlan(
        name=name,
        sources=sources,
        options=options,
        key_rule=keys.describe(key),
        signature=signature,
        reconcile=_reconcile(name, signature, given.get("reconcile")),
        decode=decode,
        key=keys.compile_key(key, payload_type, handler=name),
        tenant=None if tenant is None else keys.compile_key(tenant, payload_type, handler=name, option="tenant"),
        order=_order(name, sources, payload_type, given.get("order_by")),
        fingerprint=_fingerprint(name, payload_type, given),
    )


def _reconcile(name: str, handler: Signature, fn: Callable[..., Any] | None) -> Signature | None:
    if fn is None:
        return None
    if not handler.needs_saga:
        raise HandlerError(
            name,
            "`reconcile` is for sagas, and it is none",
            "leave it out: a lost worker leaves nothing of a single transaction behind; or take saga: Saga",
        )
    if not callable(fn):
        raise HandlerError(name, f"`reconcile` is {fn!r}", "write an async function of the payload and Tx")
    signature = read_signature(f"{name}, reconcile", fn)
    if signature.needs_saga:
        raise HandlerError(name, "`reconcile` asks for Saga", "take Tx: it looks at what is there, and runs no step")
    if signature.batch or signature.payload_type != handler.payload_type:
        types = [getattr(each, "__name__", str(each)) for each in (signature.payload_type, handler.payload_type)]
        taken = f"{'a Batch of ' if signature.batch else ''}{types[0]}"
        raise HandlerError(
            name, f"`reconcile` takes {taken}", f"it gets the handler's payload; annotate it as {types[1]}"
        )
    return signature


def _name(fn: Callable[..., Any], given: Options) -> str:
    default = getattr(fn, "__name__", "")
    name = given.get("name", default)
    if not callable(fn):
        raise HandlerError(str(name), f"{type(fn).__name__} is decorated", "decorate a function")
    if "name" not in given and default in ("", "<lambda>"):
        raise HandlerError(default or type(fn).__name__, "it has no name of its own", 'give one: name="reserve_stock"')
    if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
        raise HandlerError(str(name), "`name` is not a printable text", 'write e.g. name="reserve_stock"')
    if name.startswith("~"):
        raise HandlerError(name, 'names that start with "~" are reserved', "choose another")
    return name


def _check_sources(handler: str, sources: tuple[str, ...]) -> None:
    given: tuple[object, ...] = sources
    if wrong := [source for source in given if not isinstance(source, str)]:
        raise HandlerError(handler, f"source {wrong[0]!r} is not a text", _write_source(""))
    for source in sources:
        scheme, colon, name = source.partition(":")
        if scheme not in SCHEMES or not colon:
            near = difflib.get_close_matches(scheme, SCHEMES, n=1)
            raise HandlerError(
                handler, f"source {source!r} has no known scheme", _write_source(near[0] if near else "")
            )
        if not name or not name.isprintable() or name != name.strip():
            raise HandlerError(handler, f"source {source!r} names no {scheme} source", _write_source(scheme))
        if scheme == "sqs" and ("/" in name or ":" in name):
            raise HandlerError(handler, f"source {source!r} names no queue", "write the queue's name, e.g. sqs:orders")
        if name.startswith("~"):
            raise HandlerError(handler, f'source {source!r}: names that start with "~" are reserved', "choose another")
    if len(set(sources)) < len(sources):
        raise HandlerError(handler, f"a source is named twice in {', '.join(sources)}", "name it once")


def _write_source(scheme: str) -> str:
    return f'write "{scheme}:name"' if scheme else "write one of " + ", ".join(f'"{s}:name"' for s in SCHEMES)


def _only_kafka(handler: str, sources: tuple[str, ...], problem: str, instead: str) -> None:
    for source in sources:
        if source.partition(":")[0] not in ("kafka", "memory"):  # memory stands in for Kafka in tests
            raise HandlerError(handler, f"{problem}, which {source!r} does not have", instead)


# ------------------------------------------------------------------------------------ order and fingerprint
def _order(handler: str, sources: tuple[str, ...], payload_type: Any, order_by: KeySpec | None) -> OrderOf:
    if order_by is None:
        return _broker_order
    if order_by == "partition":
        _only_kafka(handler, sources, '`order_by` is "partition"', "name the entity whose messages must stay in order")
        return lambda message, _, key: _partition(message) or key
    extract = keys.compile_key(order_by, payload_type, handler=handler, option="order_by")

    def by_entity(message: Message, payload: object, key: str) -> str | bytes:
        try:
            return extract(message, payload)
        except BadMessage as error:
            if error.reason != "key_missing":
                raise
            return key  # it belongs to no entity, so there is nothing it must stay behind

    return by_entity


def _broker_order(message: Message, _: object, key: str) -> str | bytes:
    if message.order_hint is not None:
        return message.order_hint
    return (_partition(message) or key) if message.source.startswith("kafka:") else key


def _partition(message: Message) -> str:
    """`topic-partition` of a position `topic-partition-offset`; nothing where there is no position."""
    return message.position.rpartition("-")[0]


def _fingerprint(handler: str, payload_type: Any, given: Options) -> FingerprintOf:
    spec = given.get("fingerprint", _WHOLE_BODY)
    if spec is _WHOLE_BODY:
        return lambda message, _: keys.fingerprint(message.body)
    if spec is None:
        return lambda _, __: None
    return keys.compile_fingerprint(spec, payload_type, handler=handler)


_WHOLE_BODY = keys.Key.payload()
_message_id = keys.compile_key(keys.Key.message_id(), Any, handler="app.start")


def given_key(key: object) -> str:
    """A key that stands in for the handler's key rule. Raises BadMessage for what no rule would give."""
    if key is not None and not isinstance(key, str):
        raise BadMessage("key_invalid", f"key= is of type {type(key).__name__}, not a text")
    return _message_id(Message("", b"", message_id=key), None)
