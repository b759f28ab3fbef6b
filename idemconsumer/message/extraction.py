"""Reads a key spec out of messages: compiled once, against the payload's type.

Every mistake in a spec that can be detected is detected at that point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, get_args

import msgspec

from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.message import forms, paths
from idemconsumer.message.codecs import without_mark
from idemconsumer.message.decoders import is_async, takes
from idemconsumer.message.keys import Key, KeySpec, Kind, describe, fingerprint, joined
from idemconsumer.message.message import PROPERTIES, Message

MAX_KEY_BYTES = 1_024
"""The longest key, in UTF-8 bytes. A longer one suggests that a whole document was named instead of an identity."""

# Kafka; AMQP; AMQP where JMS forbids the colon; bridges from HTTP.
CLOUDEVENT_PREFIXES = ("ce_", "cloudEvents:", "cloudEvents_", "ce-")

_METHODS: tuple[Kind, ...] = get_args(Kind)
Extract: TypeAlias = Callable[[Message, object], str]
_Read: TypeAlias = Callable[[Message, object], object]


def compile_key(spec: KeySpec, payload_type: Any, *, handler: str, option: str = "key") -> Extract:
    """Compile a spec into a function that reads the text from a message and its payload.

    Raises HandlerError for a path that the payload's type does not have, or for anything that is not a spec. The
    returned function raises only BadMessage: `key_missing` for an absent, null or empty value, `key_invalid` for a
    value that is not a scalar or cannot be stored as text.
    """
    read = _reader(spec, payload_type, handler, option)
    what = f"{option} ({describe(spec)})"

    def extract(message: Message, payload: object) -> str:
        value = read(message, payload)
        # Most keys are short ASCII text: one test replaces all checks.
        if type(value) is str and 0 < len(value) <= MAX_KEY_BYTES and value.isascii() and "\0" not in value:
            return value
        return as_text(value, what)

    return extract


def compile_fingerprint(spec: KeySpec, payload_type: Any, *, handler: str) -> Callable[[Message, object], bytes | None]:
    """Compile what must not change between messages of one key. Unlike a key it may be of any type. The function
    returns None if nothing of it is present, so that there is nothing to compare (R41)."""
    specs = spec.specs if isinstance(spec, Key) and spec.kind == "all" else (spec,)
    reads = [_reader(part, payload_type, handler, "fingerprint") for part in specs]

    def take(message: Message, payload: object) -> bytes | None:
        found = [read(message, payload) for read in reads]
        try:
            return None if _nothing(found) else fingerprint(forms.encode(forms.form(found)))
        except Exception as error:  # noqa: BLE001 - a payload type of the user's may raise anything
            raise _invalid("fingerprint", f"cannot be encoded ({type(error).__name__})") from None

    return take


def _nothing(value: object) -> bool:
    """Whether a value is absent, or an expression's list or object of absent values."""
    if isinstance(value, list | dict):
        return all(map(_nothing, value.values() if isinstance(value, dict) else value))
    return _missing(value)


def _reader(spec: KeySpec, payload_type: Any, handler: str, option: str) -> _Read:
    if isinstance(spec, str):
        return paths.compile_path(spec, payload_type, handler=handler, option=option)
    if isinstance(spec, Key):
        match spec.kind:
            case "header":
                named: object = spec.name
                if not isinstance(named, str) or not named.strip():
                    raise HandlerError(handler, f"`{option}` is Key.header({named!r})", 'name it: Key.header("Id")')
                return _header(spec.name, f"{option} ({describe(spec)})")
            case "property":
                return _property(spec.name, handler, option)
            case "message_id":
                return lambda message, _: message.message_id
            case "record_key":
                return _record_key(f"{option} ({describe(spec)})")
            case "cloudevent":
                return lambda message, _: _cloudevent(message)
            case "payload":
                return lambda message, _: fingerprint(message.body).hex()
            case "offset":
                return lambda message, _: message.position
            case "all":
                parts = [compile_key(part, payload_type, handler=handler, option=option) for part in spec.specs]
                return lambda message, payload: joined([part(message, payload) for part in parts])
            case "first":
                return _first([_reader(part, payload_type, handler, option) for part in spec.specs])
    given: object = spec  # what was actually passed
    if (method := next((m for m in _METHODS if given is getattr(Key, m)), None)) is not None:
        raise HandlerError(handler, f"`{option}` is Key.{method} itself, not called", f"write Key.{method}(…)")
    if callable(given) and not is_async(given):
        if not takes(given, 1):
            raise HandlerError(
                handler,
                f"`{option}` is {describe(spec)}, which cannot be called with one argument",
                "write a function of the Message: `lambda message: …`",
            )
        return _called(spec, f"{option} ({describe(spec)})")
    raise HandlerError(
        handler,
        f"`{option}` is {'an async function' if callable(given) else f'of type {type(given).__name__}'}",
        'write a path into the payload ("order_id"), one of Key.header("…"), Key.property("…"), Key.message_id(), '
        "Key.record_key(), Key.cloudevent(), Key.payload(), Key.offset(), Key.all(…), Key.first(…), a function of the "
        "Message",
    )


def _header(name: str, what: str) -> _Read:
    folded = name.casefold()

    def read(message: Message, _: object) -> object:
        value = message.headers.get(name)
        if value is None:  # AMQP and HTTP bridges change the case of header names
            value = next((v for k, v in message.headers.items() if k.casefold() == folded), None)
        return decoded(value, what) if isinstance(value, bytes) else value

    return read


def _property(name: str, handler: str, option: str) -> _Read:
    if name not in PROPERTIES:
        raise HandlerError(
            handler,
            f"`{option}` is Key.property({name!r}), and RabbitMQ has no such property",
            f"{paths.nearest(str(name), PROPERTIES)}they are {', '.join(PROPERTIES)}; the message id is "
            "Key.message_id()",
        )
    return lambda message, _: message.properties.get(name)


def _record_key(what: str) -> _Read:
    def read(message: Message, _: object) -> object:
        return None if message.record_key is None else decoded(message.record_key, what)

    return read


def decoded(value: bytes, what: str) -> str:
    """The text of a header or a record key. Raises BadMessage."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _invalid(what, "is not UTF-8; write a function of the Message that makes it text") from None


def _called(function: Callable[[Message], str | None], what: str) -> _Read:
    def read(message: Message, _: object) -> object:
        try:
            value: object = function(message)
        except Exception as error:  # noqa: BLE001 - the user's function; its text may quote the payload
            raise _invalid(what, f"raised {type(error).__name__}") from None
        if value is not None and not isinstance(value, str):
            raise _invalid(what, f"returned {type(value).__name__} instead of str")
        return value

    return read


def _first(reads: Sequence[_Read]) -> _Read:
    def read(message: Message, payload: object) -> object:
        for one in reads:
            try:
                value = one(message, payload)
            except BadMessage as error:
                if error.reason != "key_missing":
                    raise
            else:
                if not _missing(value):
                    return value
        return None

    return read


class _Event(msgspec.Struct):
    specversion: str
    source: str
    id: str


_event_decoder = msgspec.json.Decoder(_Event)


def _cloudevent(message: Message) -> str | None:
    for prefix in CLOUDEVENT_PREFIXES:
        source, event_id = (message.headers.get(prefix + name) for name in ("source", "id"))
        if source is not None or event_id is not None:
            return _pair(source, event_id)
    try:
        event = _event_decoder.decode(without_mark(message.body))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return _pair(event.source, event.id)


def _pair(source: str | bytes | None, event_id: str | bytes | None) -> str | None:
    if not source or not event_id:
        return None
    try:
        return joined([p.decode() if isinstance(p, bytes) else p for p in (source, event_id)])
    except UnicodeDecodeError:
        raise _invalid("CloudEvent source and id", "is not UTF-8") from None


# -------------------------------------------------------------------------------------------- value -> text
def _missing(value: object) -> bool:
    return value is None or value == "" or value is msgspec.UNSET


def as_text(value: object, what: str) -> str:
    """The text of a value as it is used in a key. Raises BadMessage as keys do."""
    if _missing(value):
        raise BadMessage("key_missing", f"{what} is missing")
    text = _scalar(value, what)
    if "\0" in text:
        raise _invalid(what, "contains NUL")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _invalid(what, "contains a lone surrogate, which is not valid Unicode") from None
    if size > MAX_KEY_BYTES:
        raise _invalid(what, f"has {size:,} UTF-8 bytes, at most {MAX_KEY_BYTES:,} are allowed")
    return text


def _scalar(value: object, what: str) -> str:
    if isinstance(value, bool):
        raise _invalid(what, "is a boolean, which can distinguish only two messages")
    if isinstance(value, float) and not math.isfinite(value):
        raise _invalid(what, "is not a finite number")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode()
    if isinstance(value, int | float):
        try:
            return str(value + 0)  # an IntEnum's own text is its name; + 0 gives the number
        except ValueError:  # CPython refuses to print integers of more than 4,300 digits
            raise _invalid(what, "is an integer with thousands of digits") from None
    raise _invalid(what, f"is a {type(value).__name__}, not a scalar")


def _invalid(what: str, problem: str) -> BadMessage:
    return BadMessage("key_invalid", f"{what} {problem}")
