"""From a function and its options to a plan. Every visible mistake is refused here, at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.handlers.handler import FingerprintOf, HandlerPlan, OrderOf, StrandOf
from idemconsumer.handlers.options import RAW_BYTES, Options, Resolved, check_known, check_pauses, resolve
from idemconsumer.handlers.signature import Signature, read_signature, returned
from idemconsumer.message import codecs, extraction, keys, models
from idemconsumer.message.decoders import DecodeHook, hooked, is_async, takes
from idemconsumer.message.envelopes import ENVELOPES, Unwrap, unwrapper
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message
from idemconsumer.message.paths import ByAttribute
from idemconsumer.message.sources import REMOTE, BadSource, consumes, split_source


def plan_handler(fn: Callable[..., Any], sources: tuple[str, ...], key: KeySpec, given: Options) -> HandlerPlan:
    name = _name(fn, given)
    check_known(name, given)
    options = resolve(name, given)
    _check_sources(name, sources)
    signature = read_signature(name, fn)
    if signature.needs_saga:
        check_pauses(name, options)
    _check_reply(name, sources, options, leased=signature.needs_saga)
    if (to := options.dead_letter_to) is not None and any(consumes(source, to) for source in sources):
        raise HandlerError(
            name,
            f"`dead_letter_to` is {to!r}, which it consumes itself, so its dead letters would come back to it",
            "name another destination; `idemconsumer dead redrive` runs dead letters again",
        )
    if (unstored := codecs.unencodable(returned(fn))) is not None:
        raise HandlerError(
            name,
            f"it returns {unstored}, which cannot be stored as JSON",
            "return a Struct, dataclass, dict, list, str, number, bytes or None, and annotate that",
        )
    if (lost := models.lost(returned(fn))) is not None:
        field, _, instead = lost.partition("; ")
        raise HandlerError(name, f"what it returns cannot be read back: {field}", instead)
    payload_type = signature.payload_type
    takes_none, hook = codecs.takes_none(payload_type), _hook(name, given)
    decode = _decoder(name, payload_type, hooked=hook is not None)
    if decode is None:
        payload_type = ByAttribute
    tenant = given.get("tenant")
    for option, spec in (("key", key), ("tenant", tenant), ("order_by", given.get("order_by"))):
        if spec is not None:
            _check_sources_have(name, sources, option, spec)
    return HandlerPlan(
        name=name,
        sources=sources,
        options=options,
        key_spec=key,
        tenant_spec=tenant,
        signature=signature,
        reconcile=_reconcile(name, signature, options, given.get("reconcile")),
        decode=decode,
        takes_none=takes_none,
        hook=hook,
        hook_waits=is_async(given.get("decode")),
        strand=_strand(given, leased=signature.needs_saga),
        unwrap=_unwrap(name, given),
        key=extraction.compile_key(key, payload_type, handler=name),
        tenant=None if tenant is None else extraction.compile_key(tenant, payload_type, handler=name, option="tenant"),
        order=_order(name, sources, payload_type, given, leased=signature.needs_saga),
        fingerprint=_fingerprint(name, payload_type, given, hooked=hook is not None),
        fingerprint_spec=given.get("fingerprint"),
        unsure_paths=_unsure_paths(key, given, payload_type),
    )


def _unsure_paths(key: KeySpec, given: Options, payload_type: Any) -> list[str]:
    specs: list[Any] = [key, given.get("tenant"), given.get("order_by"), given.get("fingerprint")]
    named = [spec for spec in specs if spec not in ("partition", RAW_BYTES)]
    return [] if payload_type is ByAttribute else keys.unsure_paths(named, payload_type)


def _decoder(name: str, payload_type: Any, *, hooked: bool) -> codecs.Decode | None:
    """The decoder for JSON. None: only `decode=` can make such a payload."""
    try:
        return codecs.decoder(payload_type)
    except TypeError as error:
        if hooked:
            return None
        problem, _, instead = str(error).partition("; ")
        raise HandlerError(
            name,
            f"the payload type cannot be decoded: {problem}",
            instead or "use a Struct, dataclass, TypedDict, dict or bytes, or give decode= a function that makes it",
        ) from None


def _hook(name: str, given: Options) -> DecodeHook | None:
    hook: Any = given.get("decode")
    if hook is None:
        return None
    if not callable(hook):
        raise HandlerError(
            name,
            f"`decode` is {hook!r}",
            "write a function of the body and the Message, plain or async, that returns the payload",
        )
    if not takes(hook, 2):
        raise HandlerError(
            name,
            f"`decode` is {getattr(hook, '__name__', type(hook).__name__)}, which cannot be called with two arguments",
            "write a function of the body and the Message: `def decode(body: bytes, message: Message)`",
        )
    return hook if is_async(hook) else hooked(hook)


def _unwrap(name: str, given: Options) -> Unwrap | None:
    envelope = given.get("envelope")
    if envelope is None:
        return None
    if envelope not in ENVELOPES:
        choices = " or ".join(f'"{each}"' for each in ENVELOPES)
        raise HandlerError(name, f"`envelope` is {envelope!r}", f"write {choices}")
    return unwrapper(envelope)


def _reconcile(name: str, handler: Signature, options: Resolved, fn: Callable[..., Any] | None) -> Signature | None:
    if fn is None:
        return None
    if not handler.needs_saga and options.max_age is None:
        raise HandlerError(
            name,
            "`reconcile` is only for sagas, and for handlers with `max_age`",
            "remove it: if a worker is lost, its transaction is rolled back; or take saga: Saga",
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


def _check_sources_have(handler: str, sources: tuple[str, ...], option: str, spec: KeySpec) -> None:
    other = "use Key.message_id() or a field of the payload"
    needed = keys.needed(spec)
    if keys.uses_offset(spec):
        _only(handler, sources, "kafka", f"`{option}` uses Key.offset()", other)
    if "record_key" in needed:
        _only(handler, sources, "kafka", f"`{option}` uses Key.record_key()", f"{other}, or Key.first(…) with another")
    if "property" in needed:
        _only(
            handler, sources, "rabbitmq", f"`{option}` uses Key.property(…)", f"{other}, or Key.first(…) with another"
        )


def _only(handler: str, sources: tuple[str, ...], scheme: str, problem: str, instead: str) -> None:
    for source in sources:
        if source.partition(":")[0] not in (scheme, "memory"):  # in tests, memory: stands for any scheme
            raise HandlerError(handler, f"{problem}, which {source!r} does not have", instead)


def _check_reply(handler: str, sources: tuple[str, ...], options: Resolved, *, leased: bool) -> None:
    if options.reply is None:
        return
    if leased and options.settle != "finished":
        raise HandlerError(
            handler,
            "it has `reply`, but its delivery is settled before the saga ends",
            'write settle="finished", which keeps the request until its end; or publish the answer in a step',
        )
    if not any(source.partition(":")[0] in (*REMOTE, "memory") for source in sources):
        raise HandlerError(
            handler,
            f"`reply` is set, and no message of {', '.join(sources)} can ask for an answer",
            "remove it, and publish the answer: app.publish(…, tx=tx) to a postgres: queue",
        )


def _order(handler: str, sources: tuple[str, ...], payload_type: Any, given: Options, *, leased: bool) -> OrderOf:
    if "order_by" not in given and leased:  # L39: by default a saga has no order
        return lambda _, __: None
    if "order_by" not in given:
        return lambda message, _: message.order_hint
    order_by = given["order_by"]
    if order_by is None:
        return lambda _, __: None
    if order_by == "partition":
        _only(
            handler, sources, "kafka", '`order_by` is "partition"', "name the entity whose messages must stay in order"
        )
        return lambda message, _: _partition(message) or None
    extract = extraction.compile_key(order_by, payload_type, handler=handler, option="order_by")

    def by_entity(message: Message, payload: object) -> str | bytes | None:
        try:
            return extract(message, payload)
        except BadMessage as error:
            if error.reason != "key_missing":
                raise
            return None  # a message without an entity has no message that it must stay behind

    return by_entity


def _strand(given: Options, *, leased: bool) -> StrandOf:
    """The strand that keeps the order of arrival until a message's order is known: `order_by` may need the payload."""
    if given.get("order_by") is not None:
        return lambda message: (message.source, message.partition)
    if "order_by" in given or leased:
        return lambda _: None
    return lambda message: None if message.order_hint is None else (message.source, message.order_hint)


def _partition(message: Message) -> str:
    """`topic-partition` of a position `topic-partition-offset`; empty without a position."""
    return message.position.rpartition("-")[0]


def _fingerprint(handler: str, payload_type: Any, given: Options, *, hooked: bool) -> FingerprintOf:
    """The fingerprint of a message (R26). Of a whole message, the bytes as they arrived are compared, and also its
    value: JSON, and what `decode=` makes, in canonical form; anything else in an envelope by its bytes."""
    spec: Any = given.get("fingerprint", _WHOLE_BODY)
    if spec is None:
        return lambda _, __, ___: (None, None)
    if spec is not _WHOLE_BODY and spec != RAW_BYTES:
        take = extraction.compile_fingerprint(spec, payload_type, handler=handler)
        otherwise: Any = RAW_BYTES if payload_type is ByAttribute else _WHOLE_BODY
        whole = _fingerprint(handler, payload_type, {**given, "fingerprint": otherwise}, hooked=hooked)

        def named(arrived: Message, message: Message, payload: object) -> tuple[bytes | None, bytes | None]:
            found = take(message, payload)
            return whole(arrived, message, payload) if found is None else (found, None)

        return named
    if hooked and spec is _WHOLE_BODY:
        if payload_type is ByAttribute:
            raise HandlerError(
                handler,
                "`decode` makes an object of another library, and two such objects cannot be compared",
                'name what duplicates have in common, e.g. fingerprint="order.id"; "raw bytes" compares the body',
            )
        return lambda arrived, _, payload: (keys.fingerprint(arrived.body), keys.canonical_value(payload))
    if spec is _WHOLE_BODY and not codecs.is_bytes(payload_type):
        return lambda arrived, message, _: (keys.fingerprint(arrived.body), keys.canonical(message.body))
    if "envelope" in given:
        return lambda arrived, message, _: (keys.fingerprint(arrived.body), keys.shortened(message.body))
    return lambda arrived, _, __: (keys.fingerprint(arrived.body), None)


_WHOLE_BODY = object()
