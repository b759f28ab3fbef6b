"""Whether what was read is what was written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from idemconsumer.message import models


def field_names(cls: type) -> Sequence[str]:
    """Of a model, dataclass, Struct, NamedTuple or class of attrs, by attribute; of all else none."""
    if models.is_model(cls):
        return list(models.fields(cls))
    for declared in ("__struct_fields__", "__dataclass_fields__", "_fields"):
        if attributes := getattr(cls, declared, None):
            return list(attributes)
    return [each.name for each in getattr(cls, "__attrs_attrs__", ())]


def not_finite(value: object) -> bool:
    """Whether there is a float in it for which JSON has no number; `null` is written instead."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(not_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(not_finite, value))
    return any(not_finite(getattr(value, name, None)) for name in field_names(type(value)))


def difference(back: object, value: object) -> str | None:
    """In which field they differ, in words that quote no value. None: in none."""
    if _same(back, value):
        return None
    for name in field_names(type(value)):
        was, found = getattr(value, name, None), getattr(back, name, None)
        if not _same(found, was):
            return (
                f"its field {name!r}, a {type(was).__name__}, comes back as another value or type "
                f"({type(found).__name__}); annotate it with what it holds, or correct how it is written"
            )
    return f"it comes back as a {type(back).__name__}; annotate it with what it holds"


def _same(back: object, value: object) -> bool:
    """By their fields, since equality may look at private attributes, or only at identity."""
    if names := field_names(type(value)):
        pairs = ((getattr(back, name, None), getattr(value, name, None)) for name in names)
        return type(back) is type(value) and all(_same(found, was) for found, was in pairs)
    if isinstance(value, list | tuple) and isinstance(back, list | tuple):
        return type(back) is type(value) and len(back) == len(value) and all(map(_same, back, value))
    if isinstance(value, dict) and isinstance(back, dict):
        return back.keys() == value.keys() and all(_same(back[name], value[name]) for name in value)
    if isinstance(value, datetime) and isinstance(back, datetime) and value.tzinfo and back.tzinfo:
        # In the hour that a clock repeats, two that are the same moment in different zones are never equal (PEP 495).
        return _moment(back) == _moment(value)
    return bool(back == value) and isinstance(back, type(value))


def _moment(value: datetime) -> tuple[datetime, timedelta | None]:
    return value.replace(tzinfo=None), value.utcoffset()
