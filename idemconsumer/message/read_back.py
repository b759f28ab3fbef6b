"""Whether what was read is what was written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from idemconsumer.message import models
from idemconsumer.message.fields import fields
from idemconsumer.message.forms import form, opened

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_LISTS: Final = (list, tuple, deque)
_IN_JSON: Final = (str, int, float, type(None))


def difference(back: object, value: object) -> tuple[str | None, bool]:
    """In which field they differ, in words that quote no value, None: in none; and whether a set may be in them."""
    unordered: list[object] = []
    if _same(back, value, unordered):
        return None, bool(unordered)
    for name in fields(type(value)) or ():
        was, found = getattr(value, name, None), getattr(back, name, None)
        if not _same(found, was, unordered):
            return (
                f"its field {name!r}, a {type(was).__name__}, comes back as another value or type "
                f"({type(found).__name__}); annotate it with what it holds, or correct how it is written"
            ), True
    return f"it comes back as a {type(back).__name__}; annotate it with what it holds", True


def _same(back: object, value: object, unordered: list[object]) -> bool:
    """By their fields, since equality is the user's: it may look at private attributes, or only at identity. What no
    annotation describes comes back as JSON has it: an object, a list, or a text for all that JSON does not have."""
    cls = type(value)
    alike = cls is type(back)
    if alike and cls in _SCALARS:
        return back == value
    if (names := fields(cls)) is not None:
        if alike:
            for name in names:
                was, found = getattr(value, name, None), getattr(back, name, None)
                if was is not found and not _same(found, was, unordered):
                    return False
            return _all_same(models.extras(back), models.extras(value), unordered)
        if fields(type(back)) is not None:
            return False
        if isinstance(back, Mapping):
            given = ((back[wire], getattr(value, name, None)) for name, wire in names.items() if wire in back)
            return all(_same(*pair, unordered) for pair in given)
    if isinstance(value, _LISTS) and isinstance(back, _LISTS):
        return len(back) == len(value) and all(_same(*pair, unordered) for pair in zip(back, value, strict=True))
    if isinstance(value, Mapping) and isinstance(back, Mapping):
        return _all_same(back, value, unordered)
    if isinstance(back, str) and not isinstance(value, _IN_JSON):
        return True
    if alike and type(scalar := opened(value)) in _SCALARS:
        return bool(scalar == opened(back))
    unordered.append(value)
    try:
        return form(back) == form(value)
    except Exception:  # noqa: BLE001 - only its field's own serializer knows it
        return alike


def _all_same(back: Mapping[str, object], value: Mapping[str, object], unordered: list[object]) -> bool:
    return back.keys() == value.keys() and all(_same(back[name], its, unordered) for name, its in value.items())
