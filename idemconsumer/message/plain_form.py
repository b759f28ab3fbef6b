"""What a decoder has made, by the names and in the shapes that it has on the wire (R41)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from idemconsumer.message import digits, models

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_NAMES: Final = frozenset({str})
_AS_TEXT: Final = frozenset({"ipaddress", "pathlib", "pydantic", "pydantic_core"})  # whose types pydantic reads

_Shape: TypeAlias = "str | dict[str, _Shape] | list[_Shape] | None"
"""A JSON object with attributes in the place of values."""


def opened(value: Any) -> Any:
    """One level of it: a dict by names, a list, or a scalar of JSON. What has no such form is left as it is."""
    cls: Any = type(value)
    if cls in _SCALARS or cls is list or (cls is dict and _NAMES.issuperset(map(type, value))):
        return value
    return _opener(cls)(value)


@lru_cache(maxsize=1_024)
def _opener(cls: Any) -> Callable[[Any], Any]:
    if issubclass(cls, Mapping):
        return lambda value: {str(plain(name)): each for name, each in value.items()}
    if models.is_root(cls):
        return lambda value: opened(value.root)
    if (shape := _shape(cls)) is not None:
        return _object(cls, shape)
    if issubclass(cls, set | frozenset):  # in one order in all processes
        return lambda value: sorted(map(plain, value), key=msgspec.json.Encoder(order="deterministic").encode)
    if issubclass(cls, Sequence) and not issubclass(cls, str | bytes | bytearray | memoryview):
        return list
    if cls is msgspec.Raw:
        return msgspec.json.decode
    if hasattr(cls, "DESCRIPTOR") and hasattr(cls, "HasField"):  # Protobuf
        names = [field.name for field in cls.DESCRIPTOR.fields]
        return lambda value: {name: getattr(value, name) for name in names if is_there(value, name)}
    return _scalar


def _object(cls: Any, shape: dict[str, _Shape]) -> Callable[[Any], Any]:
    config = getattr(cls, "__struct_config__", None)
    tag = {} if config is None or config.tag_field is None else {config.tag_field: config.tag}

    def open_it(value: Any) -> Any:
        found = _filled(shape, value)
        if tag or models.extras(value):
            found = {**models.extras(value), **tag, **found}
        return list(found.values()) if config is not None and config.array_like else found

    return open_it


def plain(value: object) -> object:
    """All of it."""
    value = opened(value)
    if type(value) is dict:
        simple = _SCALARS.issuperset(map(type, value.values()))
        return value if simple else {name: plain(each) for name, each in value.items()}
    if type(value) is list:
        return value if _SCALARS.issuperset(map(type, value)) else list(map(plain, value))
    return value


def looked_up(value: Any, name: str | int) -> object:
    """What is there under that name, or at that index; None if nothing is."""
    if type(value) is dict and type(name) is str and (found := value.get(name)) is not None:
        return found
    value = opened(value)
    if isinstance(name, str):
        return value.get(name) if type(value) is dict else None
    return value[name] if type(value) is list and -len(value) <= name < len(value) else None


def is_there(value: Any, name: str) -> bool:
    """Whether that attribute was sent. Protobuf gives one that was not the value zero, and can tell of which it knows
    this: of all but repeated fields and, in proto3, scalars that are not declared `optional`."""
    try:
        return not hasattr(type(value), "HasField") or bool(value.HasField(name))
    except ValueError:
        return True


def _scalar(value: Any) -> object:
    if isinstance(value, Decimal) and value.is_finite():
        return bytes(digits.number(str(value))).decode()
    try:
        return msgspec.to_builtins(value)  # UUID, dates, enums: as JSON writes them
    except Exception:  # noqa: BLE001 - a type of the user's may raise anything
        known = str(type(value).__module__).partition(".")[0] in _AS_TEXT
        return str(value) if known and not hasattr(value, "get_secret_value") else value


@lru_cache(maxsize=1_024)
def _shape(cls: Any) -> dict[str, _Shape] | None:
    """Of an object of that class. None: it is no object with fields."""
    shape: dict[str, _Shape] = {}
    if models.is_model(cls):
        for wire, attribute, _ in models.places(cls):
            _put(shape, wire, attribute)
    elif hasattr(cls, "__struct_fields__"):
        shape.update(zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True))
    elif dataclasses.is_dataclass(cls):
        shape.update({field.name: field.name for field in dataclasses.fields(cls)})
    elif hasattr(cls, "__attrs_attrs__"):
        shape.update({field.name: field.name for field in cls.__attrs_attrs__})
    else:
        return None
    return shape


def _put(into: Any, wire: models.Wire, attribute: str) -> None:
    """The first one that is at a place stays there."""
    step, *rest = wire
    if isinstance(step, int):
        into += [None] * (max(step + 1, -step) - len(into))
    present = into[step] if isinstance(step, int) else into.get(step)
    if not rest:
        into[step] = attribute if present is None else present
    elif not isinstance(present, str):
        into[step] = present if present is not None else [] if isinstance(rest[0], int) else {}
        _put(into[step], tuple(rest), attribute)


def _filled(shape: Any, value: object) -> Any:
    if isinstance(shape, dict):
        return {
            name: found
            for name, part in shape.items()
            if (found := getattr(value, part, None) if type(part) is str else _filled(part, value)) is not msgspec.UNSET
        }
    if isinstance(shape, list):
        return [_filled(part, value) for part in shape]
    return None if shape is None else getattr(value, shape, None)
