"""Accepted messages that go to their handler's own broker: the message as sent, and as the handler sees it (H46)."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from idemconsumer.brokers.adapters import destination
from idemconsumer.engine import decoding as reading
from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.handlers.handler import NO_HEADERS, OURS, BoundHandler, Call, HandlerPlan
from idemconsumer.handlers.options import RAW_BYTES
from idemconsumer.message import codecs
from idemconsumer.message.keys import Key, KeySpec, describe
from idemconsumer.message.message import Message
from idemconsumer.message.origin import ACCEPTED, TOKEN_BYTES
from idemconsumer.message.queues import GROUP, TOKEN
from idemconsumer.message.reply_address import MESSAGE_ID
from idemconsumer.message.sources import consumes
from idemconsumer.stores.acceptance import SentAccepted

_GIVEN: Final = frozenset({"header", "message_id", "record_key", "first"})


def check_via(plan: HandlerPlan, via: str) -> None:
    """Raise ConfigurationError if the handler does not consume that destination, or if the key, tenant or fingerprint
    that it will read there cannot be known before: it could then run another message than the one that was accepted."""
    scheme, name = destination(via)
    sources = plan.sources
    routed = scheme == "rabbitmq" and "/" in name and any(each.startswith("rabbitmq:") for each in sources)
    if scheme == "memory" or not (routed or any(consumes(each, via) for each in sources)):
        instead = "write one of them except memory:, or a RabbitMQ exchange and routing key that lead to one of them"
        raise _cannot(plan, via, f"its sources are {', '.join(sources)}", instead)
    if plan.unwrap is not None:
        raise _cannot(plan, via, "it takes messages in an `envelope`", "leave `via` out")
    key = "write a path into the payload, Key.header(…), or Key.first(…) of these"
    if (unknown := _unknown(plan.key_spec, scheme, name)) is not None:
        raise _cannot(plan, via, f"its `key` is {unknown}, which is not known before it is sent", key)
    tenant = plan.tenant_spec
    if tenant is not None and not _of_content(tenant):
        raise _cannot(plan, via, f"its `tenant` is {describe(tenant)}, which cannot be sent along", key)
    compared = plan.fingerprint_spec
    if compared is not None and compared != RAW_BYTES and not _of_content(compared, whole=True):
        what = f"its `fingerprint` is {describe(compared)}, which is not known before it is sent"
        raise _cannot(plan, via, what, "name fields of the payload or headers, or leave it out")


def _cannot(plan: HandlerPlan, via: str, problem: str, instead: str) -> ConfigurationError:
    return ConfigurationError(f"handler {plan.name!r} cannot accept by {via!r}: {problem}; {instead}")


def _unknown(spec: KeySpec, scheme: str, name: str) -> str | None:
    """The part of a key rule, in words, that cannot be set to a given key before sending; None if all can."""
    if isinstance(spec, str):
        return None
    if not isinstance(spec, Key) or spec.kind not in _GIVEN:
        return describe(spec)
    if spec.kind == "first":
        return next((found for part in spec.specs if (found := _unknown(part, scheme, name))), None)
    # A FIFO queue drops a message whose id was sent within the last five minutes, even by another tenant.
    lacks = scheme == "kafka" or name.endswith(".fifo") if spec.kind == "message_id" else scheme != "kafka"
    return describe(spec) if spec.kind != "header" and lacks else None


def _of_content(spec: KeySpec, *, whole: bool = False) -> bool:
    """Whether a rule reads only payload and headers. `whole`: several of these, or the whole payload, too."""
    if isinstance(spec, str):
        return True
    if not isinstance(spec, Key):
        return False
    if spec.kind == "first" or (whole and spec.kind == "all"):
        return all(_of_content(part, whole=whole) for part in spec.specs)
    return spec.kind == "header" or (whole and spec.kind == "payload")


async def to_send(
    bound: BoundHandler,
    via: str,
    payload: object,
    *,
    key: str,
    tenant: str | None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> tuple[Call, SentAccepted]:
    """The call that the handler will make of the message, and what to send. `via` must have been checked.

    Raises BadMessage if the handler could not take the message, or would find another key or tenant in it, and
    TypeError for a payload that is not JSON.
    """
    plan, (scheme, name) = bound.plan, destination(via)
    encoded, token = codecs.encode(payload, "payload", "give"), secrets.token_bytes(TOKEN_BYTES)
    ours = dict.fromkeys(_headers(plan.key_spec), key)
    if plan.tenant_spec is not None and tenant is not None:
        ours |= dict.fromkeys(_headers(plan.tenant_spec), tenant)
    dropped = {*OURS, MESSAGE_ID, *map(str.lower, ours)}
    passed = {each: value for each, value in headers.items() if each.lower() not in dropped}
    passed |= ours | {ACCEPTED: token.hex()}
    arrives = next((each for each in plan.sources if consumes(each, via)), None)
    source = via if arrives else next(each for each in plan.sources if each.startswith("rabbitmq:"))
    message = Message(source, b"null" if encoded is None else encoded.body, passed)
    named = "message_id" in _kinds(plan.key_spec)
    if named:
        message = replace(message, message_id=key)
    call = await reading.read(bound, _ordered(message, scheme, name, key))
    if "record_key" not in _kinds(plan.key_spec) and isinstance(call.order, str) and call.order != key:
        call = await reading.read(bound, _ordered(message, scheme, name, call.order))
    _check(bound, call, key, tenant)
    if scheme == "kafka":
        return _without_token(call), SentAccepted(via, (call.arrived.record_key or b"").decode(), token)
    return _without_token(call), SentAccepted(via, key if named else None, token)


def _ordered(message: Message, scheme: str, name: str, order: str) -> Message:
    """The message as it will arrive: in Kafka under this record key, from a FIFO queue in this group."""
    if scheme == "kafka":
        return replace(message, record_key=order.encode(), order_hint=order)
    if scheme != "sqs" or not name.endswith(".fifo"):
        return message
    group = message.headers.get(GROUP) or (
        order if TOKEN.fullmatch(order) else hashlib.sha256(order.encode()).hexdigest()
    )
    return replace(message, headers={**message.headers, GROUP: group}, order_hint=group)


def _check(bound: BoundHandler, call: Call, key: str, tenant: str | None) -> None:
    if call.key != key:
        raise BadMessage(
            "key_differs", f"by {bound.key_rule} its handler would find a different key from the given one"
        )
    if call.tenant != tenant:
        spec = bound.plan.tenant_spec
        rule = "it has no `tenant` rule" if spec is None else describe(spec)
        raise BadMessage("tenant_differs", f"its handler would find a different tenant from the given one: {rule}")


def _without_token(call: Call) -> Call:
    """The call without its token: accepting creates the record, and consumes no token."""
    call.claim = msgspec.structs.replace(call.claim, token=None)
    return call


def _headers(spec: KeySpec) -> list[str]:
    """The names of the headers that carry a given key or tenant."""
    if not isinstance(spec, Key):
        return []
    return [spec.name] if spec.kind == "header" else [name for part in spec.specs for name in _headers(part)]


def _kinds(spec: KeySpec) -> set[str]:
    if not isinstance(spec, Key):
        return set()
    return {spec.kind}.union(*map(_kinds, spec.specs))
