"""Envelopes that a service puts around a producer's payload: Amazon SNS, Amazon EventBridge, CloudEvents.

After unwrapping, the message has the producer's payload as its body, and the envelope's values in its headers, message
id and timestamp. Keys, fingerprint and handler use that; a dead letter keeps the message as it arrived.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from idemconsumer.errors import BadMessage
from idemconsumer.message.codecs import without_mark
from idemconsumer.message.extraction import CLOUDEVENT_PREFIXES
from idemconsumer.message.message import Message

Envelope: TypeAlias = Literal["sns", "eventbridge", "cloudevents"]
ENVELOPES: Final[tuple[Envelope, ...]] = get_args(Envelope)
Unwrap: TypeAlias = Callable[[Message], Message]

_NO_SUCH_JSON: Final = (msgspec.MsgspecError, RecursionError, ValueError)  # of UTF-8 and base64 too


def unwrapper(envelope: Envelope) -> Unwrap:
    """The function that unwraps this envelope. It raises only BadMessage, `undecodable`, for a body without the
    envelope."""
    return {"sns": _sns, "eventbridge": _eventbridge, "cloudevents": _cloudevents}[envelope]


# -------------------------------------------------------------------------------------------------------------- Amazon
class _Attribute(msgspec.Struct):
    Type: str
    Value: str


class _Notification(msgspec.Struct, tag="Notification", tag_field="Type"):
    MessageId: str
    Message: str
    Timestamp: Any = None
    MessageAttributes: dict[str, _Attribute] = {}


_notification = msgspec.json.Decoder(_Notification)


def _sns(message: Message) -> Message:
    try:
        notification = _notification.decode(without_mark(message.body))
        attributes = {name: _attribute(each) for name, each in notification.MessageAttributes.items()}
        body = notification.Message.encode()
    except _NO_SUCH_JSON:
        raise _no_envelope("an SNS notification", "with raw message delivery there is no envelope=") from None
    return msgspec.structs.replace(
        message,
        **_headers(message, attributes),
        body=body,
        message_id=notification.MessageId,
        timestamp=_time(notification.Timestamp) or message.timestamp,
    )


def _attribute(attribute: _Attribute) -> str | bytes:
    if attribute.Type != "Binary":
        return attribute.Value
    value = base64.b64decode(attribute.Value, validate=True)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


class _Event(msgspec.Struct):
    id: str
    source: str
    detail: msgspec.Raw
    detail_type: str = msgspec.field(name="detail-type")
    account: str = ""
    region: str = ""
    time: Any = None


_event = msgspec.json.Decoder(_Event)


def _eventbridge(message: Message) -> Message:
    try:
        event = _event.decode(without_mark(message.body))
    except _NO_SUCH_JSON:
        raise _no_envelope("an EventBridge event", "a target with an input transformer gets no event") from None
    said = {"detail-type": event.detail_type, "source": event.source, "account": event.account, "region": event.region}
    return msgspec.structs.replace(
        message,
        **_headers(message, said),
        body=bytes(event.detail),
        message_id=event.id,
        timestamp=_time(event.time) or message.timestamp,
    )


# --------------------------------------------------------------------------------------------------------- CloudEvents
class _Required(msgspec.Struct):
    specversion: str
    id: str
    source: str
    type: str


_required = msgspec.json.Decoder(_Required)
_attributes = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _cloudevents(message: Message) -> Message:
    """In binary mode the body is the payload already. In structured mode the attributes become `ce_…` headers, as in
    Kafka's binary mode."""
    if any(prefix + "id" in message.headers for prefix in CLOUDEVENT_PREFIXES):
        return message
    try:
        _required.decode(without_mark(message.body))
        found = _attributes.decode(without_mark(message.body))
        body = _data(found)
        attributes = ((name, value) for name, value in found.items() if name not in ("data", "data_base64"))
        # A null attribute is absent (R41).
        said = {f"ce_{name}": _plain(value) for name, value in attributes if bytes(value) != b"null"}
    except _NO_SUCH_JSON:
        raise _no_envelope("a CloudEvent", "it has neither its headers nor its JSON form") from None
    return msgspec.structs.replace(
        message,
        **_headers(message, said),
        body=body,
        timestamp=_time(said.get("ce_time")) or message.timestamp,
    )


def _data(found: dict[str, msgspec.Raw]) -> bytes:
    if "data_base64" in found:
        return base64.b64decode(msgspec.json.decode(found["data_base64"], type=str), validate=True)
    data = bytes(found.get("data", b"null"))
    kind = msgspec.json.decode(found["datacontenttype"], type=str) if "datacontenttype" in found else "application/json"
    is_json = kind.partition(";")[0].strip().lower().endswith(("/json", "+json"))
    return data if is_json or not data.startswith(b'"') else msgspec.json.decode(data, type=str).encode()


def _plain(value: msgspec.Raw) -> str:
    decoded = msgspec.json.decode(value)
    return decoded if isinstance(decoded, str) else bytes(value).decode()


# ---------------------------------------------------------------------------------------------------------------- both
def _time(text: Any) -> datetime | None:
    try:
        return msgspec.convert(text, datetime)
    except _NO_SUCH_JSON:
        return None


def _headers(message: Message, said: Mapping[str, str | bytes]) -> dict[str, Any]:
    """The envelope's values come last, so they win if a header has the same name."""
    every = (*message.all_headers, *said.items())
    headers = dict(every)
    return {"headers": headers, "repeated_headers": every if len(headers) < len(every) else ()}


def _no_envelope(what: str, why: str) -> BadMessage:
    return BadMessage("undecodable", f"the body is not {what}, as envelope= says; {why}")
