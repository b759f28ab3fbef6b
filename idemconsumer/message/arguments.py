"""What is kept of a step's arguments, so that a replay with others is seen (L73)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from idemconsumer.message import codecs, keys, models, read_back

SIZE: Final = 8  # bytes for each argument
OPAQUE: Final = bytes(SIZE)
"""Of an argument that is not compared: no JSON says what it is, such as a client."""


def digest(args: Iterable[object], opaque: Iterable[object] = ()) -> bytes:
    """The beginning of a hash for each argument, the same for equal values: whatever the order of a set, or the way a
    number is written. Fields that have their default are left out, so that a class may get another one. `opaque`: these
    objects are not compared either."""
    kept = list(opaque)
    return b"".join(OPAQUE if any(each is one for one in kept) else _digest(each) for each in args)


def _digest(value: object) -> bytes:
    written = codecs.whole(value)
    if written is not None and not isinstance(value, str | int | bytes):
        try:
            written = codecs.whole(_shortened(value))
        except Exception:  # noqa: BLE001 - a value's own code runs while it is compared
            return OPAQUE
    canonical = None if written is None else keys.canonical(written)
    return OPAQUE if canonical is None else canonical[:SIZE]


def _shortened(value: Any) -> object:
    cls: Any = type(value)
    if models.is_model(cls):
        return msgspec.Raw(models.write(value, exclude_defaults=True))
    if names := read_back.field_names(cls):
        defaults = _defaults(cls)
        given = {name: getattr(value, name, None) for name in names}
        return {name: _shortened(its) for name, its in given.items() if name not in defaults or its != defaults[name]}
    if isinstance(value, Mapping):
        return {name: _shortened(its) for name, its in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_json, value))
    if isinstance(value, list | tuple):
        return [_shortened(each) for each in value]
    return value


def _json(value: object) -> bytes:
    return codecs.whole(_shortened(value)) or b""


@lru_cache(maxsize=1024)
def _defaults(cls: Any) -> Mapping[str, object]:
    """Of a class with fields that is no model of pydantic's."""
    if hasattr(cls, "__struct_fields__"):
        return {
            each.name: each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
            for each in msgspec.structs.fields(cls)
            if not each.required
        }
    if dataclasses.is_dataclass(cls):
        return {
            each.name: each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            for each in dataclasses.fields(cls)
            if (each.default, each.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        }
    if hasattr(cls, "_field_defaults"):
        return dict(cls._field_defaults)
    declared = ((each.name, each.default, getattr(each.default, "factory", None)) for each in cls.__attrs_attrs__)
    return {
        name: default if make is None else make()
        for name, default, make in declared
        if not getattr(default, "takes_self", False)
    }
