"""What a value consists of, whatever has made it: the same for equal values, in each process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePath
from typing import Any, Final, TypeAlias

import msgspec

from idemconsumer.message import models
from idemconsumer.message.message import Message

Form: TypeAlias = "str | int | float | bool | list[Form] | dict[str, Form] | None"

_ASTERISKS: Final = "**********"

# What their text says is all that they are.
_TEXTS: Final = (PurePath, Fraction, complex, IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface,
                 IPv6Network)  # fmt: skip

encode: Final = msgspec.json.Encoder(order="deterministic").encode


def form(value: Any, *, secrets: bool = False) -> Form:
    """As JSON: fields by their names on the wire, without those that have the default of their class and those that are
    computed; the members of a set sorted. Raises TypeError, or whatever a value's own code raises, if nothing says what
    it is. `secrets`: a secret is only said to be there."""

    def of(part: object) -> Form:
        return form(part, secrets=secrets)

    cls = type(value)
    if value is None or cls in (str, int, bool, msgspec.Raw):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Enum):
        return of(value.value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError("JSON has no such number")
        return int(value) if value.is_integer() else float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, _TEXTS):
        return str(value)
    if models.is_root(cls):
        return of(value.root)
    if names := fields(cls):
        return _of_fields(value, names, of)
    if isinstance(value, Mapping):
        found = {_text(of(name)): of(each) for name, each in value.items()}
        if len(found) == len(value):
            return found
        raise TypeError("two keys have the same text")
    if isinstance(value, Set):
        return sorted(map(of, value), key=encode)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [of(each) for each in value]
    if models.is_secret(cls):
        if secrets:
            return _ASTERISKS
        raise TypeError("it is a secret")
    if hasattr(value, "unicode_string"):  # an URL of pydantic's
        return str(value)
    plain: Form = msgspec.to_builtins(value)  # dates, UUID, Decimal, bytes
    return plain


def _text(name: Form) -> str:
    return name if isinstance(name, str) else encode(name).decode()


def _of_fields(value: Any, names: Mapping[str, str], of: Callable[[object], Form]) -> Form:
    if isinstance(value, Message):
        raise TypeError("it says which attempt this is")
    found, defaults = dict[str, Form](), _defaults(type(value))
    for name, wire in names.items():
        if (its := getattr(value, name, None)) is msgspec.UNSET:
            continue
        try:
            found[wire] = of(its)
        except TypeError:
            if not models.is_model(type(value)) or name not in models.by_hand(type(value)):
                raise
            # Only its own serializer knows the class, or how a secret is kept.
            found[wire] = of(next(iter(models.write_field(value, name).values()), None))
    given = {wire: its for wire, its in found.items() if wire not in defaults or its != defaults[wire]}
    return given | {name: of(its) for name, its in models.extras(value).items()}


def _fields(cls: Any) -> Mapping[str, str]:
    """Of a model, dataclass, Struct, NamedTuple or class of attrs: each attribute's name on the wire. Else none."""
    if models.is_model(cls):
        return {name: info.serialization_alias or name for name, info in models.fields(cls).items()}
    if hasattr(cls, "__struct_fields__"):
        return dict(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    if dataclasses.is_dataclass(cls):
        return {each.name: each.name for each in dataclasses.fields(cls)}
    if issubclass(cls, tuple):
        return {name: name for name in getattr(cls, "_fields", ())}
    return {each.name: each.name for each in getattr(cls, "__attrs_attrs__", ())}


fields: Final[Callable[[type], Mapping[str, str]]] = lru_cache(maxsize=1024)(_fields)


def _declared(cls: Any) -> Mapping[str, Form]:
    """Of a class with fields, by their names on the wire. What a function makes may be an id, or the day on which this
    process began, so it is no default."""
    if models.is_model(cls):
        declared = [(name, info.default, info.default_factory) for name, info in models.fields(cls).items()]
    elif hasattr(cls, "__struct_fields__"):
        declared = [(each.name, each.default, each.default_factory) for each in msgspec.structs.fields(cls)]
    elif dataclasses.is_dataclass(cls):
        declared = [(each.name, each.default, each.default_factory) for each in dataclasses.fields(cls)]
    elif issubclass(cls, tuple):
        declared = [(name, default, None) for name, default in cls._field_defaults.items()]
    else:
        declared = [(each.name, each.default, getattr(each.default, "factory", None)) for each in cls.__attrs_attrs__]
    names, found = fields(cls), dict[str, Form]()
    for name, default, make in declared:
        if type(default).__name__ != "_Nothing":  # how attrs says that there is none
            with suppress(Exception):  # nor is there one that has no form, such as MISSING
                found[names[name]] = form(make() if isinstance(make, type) else default, secrets=True)
    return found


_defaults: Final[Callable[[type], Mapping[str, Form]]] = lru_cache(maxsize=1024)(_declared)


def parts(value: object, leave_out: Set[type]) -> Iterator[object]:
    """It, and all values in it that are not of these types."""
    waiting = [value]
    while waiting:
        yield (part := waiting.pop())
        inside: Iterable[object]
        if isinstance(part, dict):
            inside = part.values()
        elif isinstance(part, list | tuple | set | frozenset):
            inside = part
        else:
            inside = _of_attributes(part)
        waiting += [each for each in inside if type(each) not in leave_out]


def _of_attributes(value: object) -> Iterator[object]:
    for name in fields(type(value)):
        yield getattr(value, name, None)
    yield from models.extras(value).values()


def in_order(tree: Any, value: object) -> Any:
    """What was written of a value, with the members of each set in an order that does not depend on the process."""
    if models.is_root(type(value)):
        return in_order(tree, next(_of_attributes(value)))
    if (names := fields(type(value))) and isinstance(tree, dict):
        inside = {wire: getattr(value, name, None) for name, wire in names.items()} | dict(models.extras(value))
        return {name: in_order(each, inside.get(name)) for name, each in tree.items()}
    members = value.values() if isinstance(value, Mapping) else list(_of_attributes(value)) if names else value
    if not isinstance(members, Collection) or not isinstance(tree, list | dict) or len(tree) != len(members):
        return tree  # its own serializer has written something else
    found = list(map(in_order, tree.values() if isinstance(tree, dict) else tree, members))
    if isinstance(tree, dict):
        return dict(zip(tree, found, strict=True))
    return sorted(found, key=encode) if isinstance(value, Set) else found
