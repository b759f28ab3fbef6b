"""What makes two messages the same one: key specs, the stored key, fingerprints.

A spec is compiled once, against the payload's type, into a function that reads the key's text out of each
message. All that can be found wrong with a spec is found then. The stored key is SHA-256 over length-prefixed
parts, so that concatenation never makes two different (app, tenant, handler, key) equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import unquote

import msgspec

from idemconsumer.errors import BadMessage, ConfigurationError, HandlerError
from idemconsumer.hashing import HASHING
from idemconsumer.message import digits, forms, paths
from idemconsumer.message.codecs import without_mark
from idemconsumer.message.decoders import is_async, takes
from idemconsumer.message.message import PROPERTIES, Message

MAX_KEY_BYTES = 1_024
"""The longest key, in UTF-8 bytes. A key is an identity; longer ones are a sign that a document was named."""

_SCALARS: Final = frozenset({str, int, bool, type(None)})

_ABSENT = 0xFFFFFFFF  # a length that no part has, so an absent tenant differs from an empty one

# Kafka; AMQP; AMQP where JMS forbids the colon; bridges from HTTP.
CLOUDEVENT_PREFIXES = ("ce_", "cloudEvents:", "cloudEvents_", "ce-")

Kind = Literal["header", "property", "message_id", "record_key", "cloudevent", "payload", "offset", "all", "first"]
_METHODS: tuple[Kind, ...] = get_args(Kind)
Extract: TypeAlias = Callable[[Message, object], str]
_Read: TypeAlias = Callable[[Message, object], object]


@dataclass(frozen=True, slots=True)
class Key:
    """Where a key comes from, if it is not a path into the payload. Make one with the static methods.

    `kind` is the name of that method; `name` and `specs` are its arguments.
    """

    kind: Kind
    name: str = ""
    specs: tuple[KeySpec, ...] = ()

    @staticmethod
    def header(name: str) -> Key:
        """Use the header `name`. If no header has exactly this name, one that differs in case only is used."""
        return Key("header", name)

    @staticmethod
    def property(name: str) -> Key:
        """Use a property of a RabbitMQ message, e.g. "correlation_id". `message.PROPERTIES` lists the names."""
        return Key("property", name)

    @staticmethod
    def message_id() -> Key:
        """Use the producer's message id, if the broker carries one (RabbitMQ, SQS, the Postgres queue). SQS gives every
        message an id of its own; if the producer gave none, that id detects redeliveries only. This is not the
        deduplication id of a FIFO queue, which counts for five minutes only."""
        return Key("message_id")

    @staticmethod
    def record_key() -> Key:
        """Use the key of a Kafka record, which is text in UTF-8. It identifies a message only if its producer never
        uses it twice. If it identifies an entity, add a field that changes: `Key.all(Key.record_key(), "version")`."""
        return Key("record_key")

    @staticmethod
    def cloudevent() -> Key:
        """Use a CloudEvent's source and id, from headers (binary mode) or from the body (structured mode)."""
        return Key("cloudevent")

    @staticmethod
    def payload() -> Key:
        """Use the SHA-256 of the body: equal bytes are one message. Two bodies that differ only in spacing are two
        messages."""
        return Key("payload")

    @staticmethod
    def offset() -> Key:
        """Use Kafka's topic, partition and offset. This detects redeliveries only: a message that its producer sent
        twice has two offsets.

        Offsets repeat after an unclean election, in a topic that was deleted and created again, and in a log that was
        restored. A new message there conflicts with the earlier one at its offset, or counts as its duplicate if they
        are equal.
        """
        return Key("offset")

    @staticmethod
    def all(*specs: KeySpec) -> Key:
        """Use all of them together, each with its length: ("a", "bc") is not ("ab", "c"). If one is missing, so is the
        key."""
        return Key("all", specs=_some("Key.all", specs))

    @staticmethod
    def first(*specs: KeySpec) -> Key:
        """Use the first that is present. One that is present but invalid is an error; it is not skipped."""
        return Key("first", specs=_some("Key.first", specs))


KeySpec: TypeAlias = str | Key | Callable[[Message], str | None]


def _some(method: str, specs: tuple[KeySpec, ...]) -> tuple[KeySpec, ...]:
    if not specs:
        raise ConfigurationError(f'{method}() has no arguments; write e.g. {method}("order_id", "line")')
    return specs


def describe(spec: KeySpec) -> str:
    """A spec in words, for a person."""
    if isinstance(spec, str):
        return f"payload path {spec!r}"
    if not isinstance(spec, Key):
        return f"function {getattr(spec, '__name__', type(spec).__name__)}"
    inner = ", ".join(describe(part) for part in spec.specs)
    return {
        "header": f"header {spec.name!r}",
        "property": f"property {spec.name!r}",
        "message_id": "message id",
        "record_key": "Kafka record key",
        "cloudevent": "CloudEvent source and id",
        "payload": "hash of the payload",
        "offset": "Kafka offset",
        "all": f"all of ({inner})",
        "first": f"first of ({inner})",
    }[spec.kind]


def uses_offset(spec: KeySpec) -> bool:
    """Whether the key depends on where the message lies in its source."""
    return isinstance(spec, Key) and (spec.kind == "offset" or any(uses_offset(part) for part in spec.specs))


def needed(spec: KeySpec) -> frozenset[Kind]:
    """What the message must have for this key, whatever it is: an alternative of `Key.first` may be missing."""
    if not isinstance(spec, Key):
        return frozenset()
    if spec.kind == "all":
        return frozenset().union(*map(needed, spec.specs))
    return frozenset({spec.kind})


def unsure_paths(specs: Iterable[object], payload_type: Any) -> list[str]:
    """The paths in these specs of which the payload's type does not show that they are there (R41)."""
    found: list[str] = []
    for spec in specs:
        if isinstance(spec, Key):
            found += unsure_paths(spec.specs, payload_type)
        elif isinstance(spec, str) and not paths.is_sure(spec, payload_type):
            found.append(spec)
    return list(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------ stored identity
def digest(app: str, tenant: str | None, handler: str, key: str) -> bytes:
    """The 32 bytes under which the key is stored (R10, R38)."""
    return HASHING.digest(b"key", _scope_prefix(app, tenant, handler) + _prefixed(key))


@lru_cache(maxsize=1_024)
def _scope_prefix(app: str, tenant: str | None, handler: str) -> bytes:
    return _prefixed(app) + _prefixed(tenant) + _prefixed(handler)


def _prefixed(part: str | None) -> bytes:
    if part is None:
        return _ABSENT.to_bytes(4, "big")
    encoded = part.encode()
    return len(encoded).to_bytes(4, "big") + encoded


@lru_cache(maxsize=1_024)
def scope_name(app: str, tenant: str | None, handler: str) -> str:
    """`app/tenant/handler`, within which a key is unique; `-` stands for no tenant. Two scopes never look
    equal: `%` and `/` are percent-encoded, and so is a tenant whose name is `-`."""
    middle = "-" if tenant is None else "%2D" if tenant == "-" else _escape(tenant)
    return f"{_escape(app)}/{middle}/{_escape(handler)}"


def parts_of(scope: str) -> tuple[str, str | None, str]:
    """App, tenant and handler: what `scope_name` was given."""
    app, tenant, handler = scope.split("/")
    return unquote(app), None if tenant == "-" else unquote(tenant), unquote(handler)


def tenant_of(scope: str) -> str | None:
    """The tenant that `scope_name` was given."""
    return parts_of(scope)[1]


def scopes_of(app: str) -> str:
    """The prefix that all scope names of an app have, and those of no other app."""
    return f"{_escape(app)}/"


def _escape(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")


def fingerprint(body: bytes) -> bytes:
    """The hash of what was sent: SHA-256, or HMAC-SHA256 with the secret (R38)."""
    return HASHING.digest(b"payload", body)


def canonical(body: bytes) -> bytes | None:
    """The first 16 bytes of the hash of the JSON value: the same whatever the order of fields, the spaces between them,
    the escapes in texts and the ways to write a number. None for what is not JSON."""
    try:
        return shortened(forms.encode(digits.decode(without_mark(body))))
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def canonical_value(payload: object, *, secrets: bool = False) -> bytes | None:
    """As `canonical`, of any value. None for what has no form: of two values that differ in what is left out, one would
    be the duplicate of the other. `secrets` are left out all the same, where that does no harm."""
    if isinstance(payload, bytes):
        return shortened(payload)
    try:
        if type(payload) in _SCALARS:  # their JSON has one form
            return shortened(forms.encode(payload))
        return canonical(forms.encode(forms.form(payload, secrets=secrets)))
    except Exception:  # noqa: BLE001 - a value's own code runs while it is compared
        return None


def shortened(payload: bytes) -> bytes:
    """A fingerprint beside that of the body. It is stored with each record, so it is half as long."""
    return fingerprint(payload)[:16]


# ---------------------------------------------------------------------------------------------- compilation
def compile_key(spec: KeySpec, payload_type: Any, *, handler: str, option: str = "key") -> Extract:
    """Compile a spec into a function that reads the text from a message and its payload.

    Raises HandlerError for a path that the payload's type does not have, or anything that is not a spec. What
    it returns raises only BadMessage: `key_missing` for an absent, null or empty value, `key_invalid` for a
    value that is not a scalar or cannot be stored as text.
    """
    read = _reader(spec, payload_type, handler, option)
    what = f"{option} ({describe(spec)})"

    def extract(message: Message, payload: object) -> str:
        value = read(message, payload)
        # Most keys are short ASCII text: one test instead of all checks.
        if type(value) is str and 0 < len(value) <= MAX_KEY_BYTES and value.isascii() and "\0" not in value:
            return value
        return as_text(value, what)

    return extract


def compile_fingerprint(spec: KeySpec, payload_type: Any, *, handler: str) -> Callable[[Message, object], bytes | None]:
    """Compile what must not change between messages of one key. Unlike a key it may be of any type. None: nothing of
    it is there, so that there is nothing to compare (R41)."""
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
    """Absent, or an expression's list or object of what is absent."""
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


def joined(parts: Sequence[str]) -> str:
    """Several texts as one, in which none of them can be mistaken for another."""
    return "".join(f"{len(part)}:{part}" for part in parts)


# -------------------------------------------------------------------------------------------- value -> text
def _missing(value: object) -> bool:
    return value is None or value == "" or value is msgspec.UNSET


def as_text(value: object, what: str) -> str:
    """The text of a value as a key has it. Raises BadMessage as keys do."""
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
