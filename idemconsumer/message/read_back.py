"""Whether what was read is what was written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from idemconsumer.message import models
from idemconsumer.message.fields import fields
from idemconsumer.message.forms import form

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})


def difference(back: object, value: object) -> str | None:
    """In which field they differ, in words that quote no value. None: in none."""
    if _same(back, value):
        return None
    for name in fields(type(value)) or ():
        was, found = getattr(value, name, None), getattr(back, name, None)
        if not _same(found, was):
            return (
                f"its field {name!r}, a {type(was).__name__}, comes back as another value or type "
                f"({type(found).__name__}); annotate it with what it holds, or correct how it is written"
            )
    return f"it comes back as a {type(back).__name__}; annotate it with what it holds"


def _same(back: object, value: object) -> bool:
    """By their fields, since equality is the user's: it may look at private attributes, or only at identity. What no
    annotation describes comes back as JSON has it: an object, a list, or a text for all that JSON does not have."""
    cls = type(value)
    if cls is type(back) and cls in _SCALARS:
        return back == value
    if (names := fields(cls)) is not None:
        if cls is type(back):
            each = all(_same(getattr(back, name, None), getattr(value, name, None)) for name in names)
            return each and _all_same(models.extras(back), models.extras(value))
        if fields(type(back)) is not None:
            return False
        if isinstance(back, Mapping):
            return all(_same(back[wire], getattr(value, name, None)) for name, wire in names.items() if wire in back)
    if isinstance(value, Mapping) and isinstance(back, Mapping):
        return back.keys() == value.keys() and _all_same(back, value)
    if isinstance(value, list | tuple | deque) and isinstance(back, list | tuple | deque):
        return len(back) == len(value) and all(map(_same, back, value))
    if isinstance(back, str) and not isinstance(value, str | int | float | None):
        return True
    try:
        return form(back) == form(value)
    except Exception:  # noqa: BLE001 - only its field's own serializer knows it
        return type(back) is cls


def _all_same(back: Mapping[str, object], value: Mapping[str, object]) -> bool:
    return all(_same(back[name], its) for name, its in value.items())
