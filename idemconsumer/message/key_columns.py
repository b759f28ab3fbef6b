"""The key that a handler derives from a message, made of the columns of a table (R31).

A column is read as text, or as bytes. Numbers and UUIDs are written as JSON and Postgres write them, which is how a key
has them: 17 and "17" are one key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from idemconsumer.errors import ConfigurationError
from idemconsumer.message import keys
from idemconsumer.message.keys import Key, KeySpec

Value: TypeAlias = str | bytes | None


@dataclass(frozen=True, slots=True)
class KeyColumns:
    """What the columns have to hold, in their order, and the function that makes the text of the key of them.

    That raises BadMessage for what no message could have as a key.
    """

    names: tuple[str, ...]
    text: Callable[[Sequence[Value]], str]


def key_columns(spec: KeySpec) -> KeyColumns:
    """Raises ConfigurationError for a spec whose text may be made in several ways."""
    if not isinstance(spec, Key):
        return _one(spec)
    match spec.kind:
        case "all":
            parts = [key_columns(part) for part in spec.specs]
            return KeyColumns(tuple(name for part in parts for name in part.names), _all_of(parts))
        case "cloudevent":
            return _several(("the CloudEvent's source", "its id"), keys.joined)
        case "offset":
            return _several(("the Kafka topic", "the partition", "the offset"), "-".join)
        case "first":
            if any(len(key_columns(part).names) > 1 for part in spec.specs):
                raise ConfigurationError(
                    f"keys of {keys.describe(spec)} cannot be taken from a table: a row does not say which of them it "
                    "has"
                )
    return _one(spec)


def _one(spec: KeySpec) -> KeyColumns:
    what = keys.describe(spec)
    hashed = isinstance(spec, Key) and spec.kind == "payload"

    def text(values: Sequence[Value]) -> str:
        (value,) = values
        if isinstance(value, bytes):
            value = value.hex() if hashed else keys.decoded(value, what)
        return keys.as_text(value, what)

    return KeyColumns((what,), text)


def _several(names: tuple[str, ...], join: Callable[[Sequence[str]], str]) -> KeyColumns:
    one = [_Part(name) for name in names]

    def text(values: Sequence[Value]) -> str:
        return keys.as_text(join([part(value) for part, value in zip(one, values, strict=True)]), " and ".join(names))

    return KeyColumns(names, text)


@dataclass(frozen=True, slots=True)
class _Part:
    what: str

    def __call__(self, value: Value) -> str:
        return keys.as_text(keys.decoded(value, self.what) if isinstance(value, bytes) else value, self.what)


def _all_of(parts: Sequence[KeyColumns]) -> Callable[[Sequence[Value]], str]:
    def text(values: Sequence[Value]) -> str:
        texts, at = [], 0
        for part in parts:
            texts.append(part.text(values[at : at + len(part.names)]))
            at += len(part.names)
        return keys.as_text(keys.joined(texts), "all of them")

    return text
