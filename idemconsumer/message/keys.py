"""The identity of a message: key specs, the stored key, fingerprints.

`extraction.py` reads the key's text out of each message. The stored key is SHA-256 over length-prefixed parts, so that
concatenation never makes two different (app, tenant, handler, key) equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import unquote

import msgspec

from idemconsumer.errors import ConfigurationError
from idemconsumer.hashing import HASHING
from idemconsumer.message import digits, forms, paths
from idemconsumer.message.codecs import without_mark
from idemconsumer.message.message import Message

_SCALARS: Final = frozenset({str, int, bool, type(None)})

_ABSENT = 0xFFFFFFFF  # a length that no part has, so an absent tenant differs from an empty one

Kind = Literal["header", "property", "message_id", "record_key", "cloudevent", "payload", "offset", "all", "first"]


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
        """Use the producer's message id, if the broker carries one (RabbitMQ, SQS, the Postgres queue).

        SQS gives every message an id of its own; if the producer gave none, that id detects redeliveries only. This is
        not the deduplication id of a FIFO queue, which counts for five minutes only.
        """
        return Key("message_id")

    @staticmethod
    def record_key() -> Key:
        """Use the key of a Kafka record, as UTF-8 text. It identifies a message only if its producer never uses it
        twice. If it identifies an entity, add a field that changes: `Key.all(Key.record_key(), "version")`."""
        return Key("record_key")

    @staticmethod
    def cloudevent() -> Key:
        """Use a CloudEvent's source and id, from headers (binary mode) or from the body (structured mode)."""
        return Key("cloudevent")

    @staticmethod
    def payload() -> Key:
        """Use the SHA-256 of the body: messages with equal bytes are the same message. Two bodies that differ only in
        spacing are two messages."""
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
        """Use all of these together, each with its length: ("a", "bc") differs from ("ab", "c"). If one is missing, the
        key is missing."""
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
    """Whether the key depends on the position of the message in its source."""
    return isinstance(spec, Key) and (spec.kind == "offset" or any(uses_offset(part) for part in spec.specs))


def needed(spec: KeySpec) -> frozenset[Kind]:
    """What every message must have for this key. Alternatives of `Key.first` are not included, since each may be
    missing."""
    if not isinstance(spec, Key):
        return frozenset()
    if spec.kind == "all":
        return frozenset().union(*map(needed, spec.specs))
    return frozenset({spec.kind})


def unsure_paths(specs: Iterable[object], payload_type: Any) -> list[str]:
    """The paths in these specs for which the payload's type does not show that a value is there (R41)."""
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
    """`app/tenant/handler`, within which a key is unique; `-` stands for no tenant. Two different scopes never get the
    same name: `%` and `/` are percent-encoded, and so is a tenant whose name is `-`."""
    middle = "-" if tenant is None else "%2D" if tenant == "-" else _escape(tenant)
    return f"{_escape(app)}/{middle}/{_escape(handler)}"


def parts_of(scope: str) -> tuple[str, str | None, str]:
    """App, tenant and handler, as `scope_name` was given them."""
    app, tenant, handler = scope.split("/")
    return unquote(app), None if tenant == "-" else unquote(tenant), unquote(handler)


def tenant_of(scope: str) -> str | None:
    """The tenant that `scope_name` was given."""
    return parts_of(scope)[1]


def scopes_of(app: str) -> str:
    """The prefix of all scope names of an app, and of no other app."""
    return f"{_escape(app)}/"


def _escape(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")


def joined(parts: Sequence[str]) -> str:
    """Several texts as one, so that different lists of texts never give the same result."""
    return "".join(f"{len(part)}:{part}" for part in parts)


def fingerprint(body: bytes) -> bytes:
    """The hash of what was sent: SHA-256, or HMAC-SHA256 with the secret (R38)."""
    return HASHING.digest(b"payload", body)


def canonical(body: bytes) -> bytes | None:
    """The first 16 bytes of the hash of the JSON value. None for a body that is not JSON. It does not depend on the
    order of fields, on spaces, on escapes in texts or on the notation of numbers."""
    try:
        return shortened(forms.encode(digits.decode(without_mark(body))))
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def canonical_value(payload: object, *, secrets: bool = False) -> bytes | None:
    """As `canonical`, for any value. None if a part of it has no form for comparison.

    If that part was left out, one of two values that differ only there would be a duplicate of the other. `secrets` are
    left out all the same, where that does no harm.
    """
    if isinstance(payload, bytes):
        return shortened(payload)
    try:
        if type(payload) in _SCALARS:  # their JSON has only one form
            return shortened(forms.encode(payload))
        return canonical(forms.encode(forms.form(payload, secrets=secrets)))
    except Exception:  # noqa: BLE001 - a value's own code runs while it is compared
        return None


def shortened(payload: bytes) -> bytes:
    """A second fingerprint beside that of the body. It is stored with each record, so it is half as long."""
    return fingerprint(payload)[:16]
