"""From a function and its options to a plan: every visible mistake is refused here, at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import (
    Any,
)

from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.handlers.handler import FingerprintOf, HandlerPlan, OrderOf
from idemconsumer.handlers.options import Options, check_known, resolve
from idemconsumer.handlers.signature import Signature, read_signature
from idemconsumer.message import codecs, keys
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message
from idemconsumer.message.sources import BadSource, split_source


def plan_handler(fn: Callable[..., Any], sources: tuple[str, ...], key: KeySpec, given: Options) -> HandlerPlan:
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
                "use Key.message_id() or a field of the payload",
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
            "`reconcile` is only for sagas",
            "remove it: a lost worker leaves nothing of a single transaction behind; or take saga: Saga",
        )
    if not callable(fn):
        raise HandlerError(name, f"`reconcile` is {fn!r}", "write an async function of the payload and Tx")
    signature = read_signature(f"{name}, reconcile", fn)
    if signature.needs_saga:
        raise HandlerError(name, "`reconcile` takes Saga", "take Tx: it only reads the tables, and runs no step")
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
        raise HandlerError(default or type(fn).__name__, "it has no name", 'give one: name="reserve_stock"')
    if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
        raise HandlerError(str(name), "`name` is not a printable string", 'write e.g. name="reserve_stock"')
    if name.startswith("~"):
        raise HandlerError(name, 'names that start with "~" are reserved', "choose another")
    return name


def _check_sources(handler: str, sources: tuple[str, ...]) -> None:
    for source in sources:
        try:
            split_source(source)
        except BadSource as error:
            raise HandlerError(handler, error.problem, error.instead) from None
    if len(set(sources)) < len(sources):
        raise HandlerError(handler, f"a source is named twice in {', '.join(sources)}", "name it once")


def _only_kafka(handler: str, sources: tuple[str, ...], problem: str, instead: str) -> None:
    for source in sources:
        if source.partition(":")[0] not in ("kafka", "memory"):  # memory stands in for Kafka in tests
            raise HandlerError(handler, f"{problem}, which {source!r} does not have", instead)


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
    """`topic-partition` of a position `topic-partition-offset`; empty where there is no position."""
    return message.position.rpartition("-")[0]


def _fingerprint(handler: str, payload_type: Any, given: Options) -> FingerprintOf:
    spec = given.get("fingerprint", _WHOLE_BODY)
    if spec is _WHOLE_BODY:
        return lambda message, _: keys.fingerprint(message.body)
    if spec is None:
        return lambda _, __: None
    return keys.compile_fingerprint(spec, payload_type, handler=handler)


_WHOLE_BODY = keys.Key.payload()
