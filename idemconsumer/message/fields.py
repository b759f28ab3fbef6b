"""The fields of a class in one description, for pydantic, msgspec, dataclasses, attrs and NamedTuple."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from idemconsumer.message import models

_Shape: TypeAlias = "str | dict[str, _Shape] | list[_Shape] | None"
"""A JSON object with attributes in the place of values."""


def declared(cls: Any) -> Sequence[tuple[str, str, object, object]] | None:
    """For each field: its attribute, its name when written, its default, and its default factory. For a field without a
    default, each library has a marker of its own. Returns None for a class without fields."""
    none = dataclasses.MISSING
    if models.is_model(cls):
        known = models.fields(cls).items()
        return [(name, info.serialization_alias or name, info.default, info.default_factory) for name, info in known]
    if dataclasses.is_dataclass(cls):
        return [(each.name, each.name, each.default, each.default_factory) for each in dataclasses.fields(cls)]
    given: Iterable[tuple[str, str, object]]
    if hasattr(cls, "__struct_fields__"):
        names, wires, own = cls.__struct_fields__, cls.__struct_encode_fields__, cls.__struct_defaults__
        given = zip(names, wires, (none,) * (len(names) - len(own)) + own, strict=True)
    elif hasattr(cls, "__attrs_attrs__"):
        given = ((each.name, each.name, each.default) for each in cls.__attrs_attrs__)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        given = ((name, name, cls._field_defaults.get(name, none)) for name in cls._fields)
    else:
        return None
    return [(*each, getattr(each[-1], "factory", None)) for each in given]


def _fields(cls: type) -> Mapping[str, str] | None:
    """The names under which the fields are written, by attribute. None for a class without fields."""
    known = declared(cls)
    return None if known is None else {name: wire for name, wire, _, _ in known}


fields: Final[Callable[[type], Mapping[str, str] | None]] = lru_cache(maxsize=1_024)(_fields)


@lru_cache(maxsize=1_024)
def tag(cls: Any) -> Mapping[str, str | int]:
    """The field that tells msgspec which of several classes an object is of."""
    config = getattr(cls, "__struct_config__", None)
    return {} if config is None or config.tag_field is None else {config.tag_field: config.tag}


# ------------------------------------------------------------------------------------------------- on the wire (R41)
def on_the_wire(cls: Any) -> Callable[[Any], Any]:
    """A function that turns an object of that class into a dict or list, by each name that its fields are read by."""
    shape: dict[str, _Shape] = {wire: name for name, wire in (fields(cls) or {}).items()}
    if models.is_model(cls):
        shape = {}
        for path, attribute, _ in models.places(cls):
            _put(shape, path, attribute)
    as_list = getattr(getattr(cls, "__struct_config__", None), "array_like", False)

    def opened(value: Any) -> Any:
        found = {**models.extras(value), **tag(cls), **_filled(shape, value)}
        return list(found.values()) if as_list else found

    return opened


def _put(into: Any, wire: models.Wire, attribute: str) -> None:
    """Put the attribute at its place. The first one at a place stays there."""
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
