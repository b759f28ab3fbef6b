"""The two forms of any value: the plain form, as it is on the wire (R41), and the form for comparison, which is the
same for equal values in each process (R26, R40, L73)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePath
from typing import Any, Final, TypeAlias

import msgspec

from idemconsumer.message import digits, models
from idemconsumer.message.fields import declared, fields, on_the_wire, tag
from idemconsumer.message.message import Message

Form: TypeAlias = "str | int | float | bool | msgspec.Raw | list[Form] | dict[str, Form] | None"

SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_NAMES: Final = frozenset({str})
_ASTERISKS: Final = "**********"

# Types whose text is everything that they contain.
_TEXTS: Final = (PurePath, Fraction, complex, IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface,
                 IPv6Network)  # fmt: skip

encode: Final = msgspec.json.Encoder(order="deterministic").encode


def plain(value: object) -> object:
    """The whole value by the names and in the shapes that it has on the wire. A part without such a form is left as it
    is."""
    value = opened(value)
    if type(value) is dict:
        simple = SCALARS.issuperset(map(type, value.values()))
        return value if simple else {name: plain(each) for name, each in value.items()}
    if type(value) is list:
        return value if SCALARS.issuperset(map(type, value)) else list(map(plain, value))
    return value


def form(value: Any, *, secrets: bool = False) -> Form:
    """The whole value in the form for comparison.

    Numbers have one notation; fields that are computed or have the default of their class are left out. Raises
    TypeError for a value without such a form, or whatever a value's own code raises. `secrets`: of a secret, only its
    presence counts.
    """
    cls = type(value)
    if cls is float:
        if not math.isfinite(value):
            raise TypeError("JSON has no such number")
        return int(value) if value.is_integer() else value
    if cls in SCALARS or cls is msgspec.Raw:
        return value  # type: ignore[no-any-return]
    if models.is_root(cls):
        return form(value.root, secrets=secrets)
    if (names := fields(cls)) is not None:
        return _of_fields(value, names, secrets)
    if secrets and models.is_secret(cls):
        return _ASTERISKS
    part = opened(value)
    if type(part) is list:
        return [form(each, secrets=secrets) for each in part]
    if type(part) is dict:
        if isinstance(value, Mapping) and len(part) < len(value):
            raise TypeError("two keys have the same text")
        return {name: form(each, secrets=secrets) for name, each in part.items()}
    if type(part) in SCALARS:
        return form(part)
    raise TypeError("nothing says what it is")


def _of_fields(value: Any, names: Mapping[str, str], secrets: bool) -> Form:
    if isinstance(value, Message):
        raise TypeError("it says which attempt this is")
    cls: Any = type(value)
    found, defaults = dict[str, Form](tag(cls)), _defaults(cls)
    for name, wire in names.items():
        if (its := getattr(value, name, None)) is msgspec.UNSET:
            continue
        try:
            its = form(its, secrets=secrets)
        except TypeError:
            if not models.is_model(cls) or name not in models.by_hand(cls):
                raise
            # Only its own serializer knows the class, or how a secret is kept.
            its = form(next(iter(models.write_field(value, name).values()), None), secrets=secrets)
        if wire not in defaults or its != defaults[wire]:
            found[wire] = its
    return found | {name: form(its, secrets=secrets) for name, its in models.extras(value).items()}


def _defaults_of(cls: type) -> Mapping[str, Form]:
    """The defaults by their names on the wire. Results of factory functions are not included, except of classes such as
    `list`: a function may return an id, or the day on which this process began."""
    found = dict[str, Form]()
    for _, wire, default, make in declared(cls) or ():
        if type(default).__name__ != "_Nothing":  # attrs's marker for no default
            with suppress(Exception):  # nor is a default without a form, such as MISSING
                found[wire] = form(make() if isinstance(make, type) else default, secrets=True)
    return found


_defaults: Final[Callable[[type], Mapping[str, Form]]] = lru_cache(maxsize=1_024)(_defaults_of)


# -------------------------------------------------------------------------------------------------- one level of it
def opened(value: Any) -> Any:
    """The top level as a dict by names, a list, or a JSON scalar. A value without such a form is left as it is."""
    cls: Any = type(value)
    if cls in SCALARS or cls is list or (cls is dict and _NAMES.issuperset(map(type, value))):
        return value
    return _opener(cls)(value)


@lru_cache(maxsize=1_024)
def _opener(cls: Any) -> Callable[[Any], Any]:
    if models.is_root(cls):
        return lambda value: opened(value.root)
    if issubclass(cls, Enum):
        return lambda value: opened(value.value)
    if fields(cls) is not None and not issubclass(cls, tuple):
        return on_the_wire(cls)
    if issubclass(cls, Mapping):
        return lambda value: {_name(name): each for name, each in value.items()}
    if issubclass(cls, Set):  # in one order in all processes
        return lambda value: sorted(value, key=lambda each: encode(form(each)))
    if issubclass(cls, str):
        return str.__str__
    if issubclass(cls, int | float):
        return int if issubclass(cls, int) else float
    if issubclass(cls, Sequence) and not issubclass(cls, bytes | bytearray | memoryview):
        return list
    if cls is msgspec.Raw:
        return msgspec.json.decode
    if hasattr(cls, "DESCRIPTOR") and hasattr(cls, "HasField"):  # Protobuf
        names = [field.name for field in cls.DESCRIPTOR.fields]
        return lambda value: {name: getattr(value, name) for name in names if is_there(value, name)}
    # pydantic's URLs, and its NameEmail.
    if issubclass(cls, _TEXTS) or hasattr(cls, "unicode_string") or cls.__module__ == "pydantic.networks":
        return str
    return _scalar


def _name(name: object) -> str:
    return name if type(name) is str else part if isinstance(part := form(name), str) else encode(part).decode()


def _scalar(value: Any) -> object:
    if isinstance(value, Decimal) and value.is_finite():
        return bytes(digits.number(str(value))).decode()
    try:
        return msgspec.to_builtins(value)  # UUID, dates, bytes: as JSON writes them
    except Exception:  # noqa: BLE001 - a type of the user's may raise anything
        return value


def looked_up(value: Any, name: str | int) -> object:
    """The value under that name, or at that index; None if there is none."""
    if type(value) is dict and type(name) is str and (found := value.get(name)) is not None:
        return found
    value = opened(value)
    if isinstance(name, str):
        return value.get(name) if type(value) is dict else None
    return value[name] if type(value) is list and -len(value) <= name < len(value) else None


def is_there(value: Any, name: str) -> bool:
    """Whether that attribute was sent. Protobuf returns zero for one that was not. It can tell the difference except
    for repeated fields and, in proto3, scalars that are not declared `optional`; for these the result is True."""
    try:
        return not hasattr(type(value), "HasField") or bool(value.HasField(name))
    except ValueError:
        return True
