"""The contents of a value: sets, and numbers that JSON does not have. And whether a value was read back as it was
written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import chain
from math import isfinite
from typing import Any, Final, TypeAlias

from idemconsumer.message import models
from idemconsumer.message.fields import fields
from idemconsumer.message.forms import SCALARS, encode, form, opened

Level: TypeAlias = tuple[Set[type], Sequence[Any]]

_OPEN: Final = frozenset({dict, list, tuple, set, frozenset})
_CLOSED: Final = SCALARS | {bytes}
_IN_JSON: Final = frozenset({dict, list, tuple})
_OF_JSON: Final = _CLOSED | _IN_JSON
_LISTS: Final = (list, tuple, deque)
_SCALAR_TYPES: Final = (str, int, float, type(None))  # with their subclasses


def levels(value: Any) -> Iterator[Level]:
    """The levels of a value, each with its types.

    The first is the value itself if it is no dict or list, the next is everything in it, then everything in that, and
    so on. A level of only one type is read without a Python step per value. An object is opened once: it may contain
    itself, through an attribute that is not written.
    """
    level: list[Any] = list(_opener(type(value))(value)) if type(value) in _IN_JSON else [value]
    seen: dict[int, object] = {}
    while level:
        kinds = set(map(type, level))
        yield kinds, level
        inside: list[object] = []
        for cls in kinds - _CLOSED:
            these = level if len(kinds) == 1 else [each for each in level if type(each) is cls]
            if cls not in _OPEN:
                these = [each for each in these if id(each) not in seen]
                seen.update(zip(map(id, these), these, strict=True))
            inside += chain.from_iterable(map(_opener(cls), these))
        level = inside


def unusual(levels: Iterable[Level]) -> set[type]:
    """The types in the levels that JSON does not have, other than float."""
    return {kind for kinds, _ in levels for kind in kinds - _OF_JSON}


def has_no_json(level: Level) -> bool:
    """Whether a number in the level would be written as null."""
    kinds, values = level
    floats = float in kinds or any(issubclass(kind, float) for kind in kinds - _OF_JSON)
    return floats and not all(map(isfinite, [each for each in values if isinstance(each, float)]))


def _opener_of(cls: type) -> Callable[[Any], Iterable[object]]:
    if issubclass(cls, dict):
        return dict.values
    if issubclass(cls, list | tuple | set | frozenset | deque):
        return iter
    names = fields(cls)
    return (lambda _: ()) if names is None else (lambda value: _attributes(value, names).values())


_opener: Final[Callable[[type], Callable[[Any], Iterable[object]]]] = lru_cache(maxsize=1_024)(_opener_of)


def _attributes(value: object, names: Mapping[str, str]) -> dict[str, object]:
    """The attributes by their names on the wire."""
    return {wire: getattr(value, name, None) for name, wire in names.items()} | dict(models.extras(value))


def in_order(tree: Any, value: object) -> Any:
    """The JSON of a value, with the members of each set in an order that does not depend on the process."""
    if models.is_root(type(value)):
        return in_order(tree, getattr(value, "root", None))
    names = fields(type(value))
    inside = None if names is None else _attributes(value, names)
    if inside is not None and isinstance(tree, dict):
        return {name: in_order(each, inside.get(name)) for name, each in tree.items()}
    members = value.values() if isinstance(value, Mapping) else value if inside is None else list(inside.values())
    if not isinstance(members, Collection) or not isinstance(tree, list | dict) or len(tree) != len(members):
        return tree  # its own serializer has written something else
    found = list(map(in_order, tree.values() if isinstance(tree, dict) else tree, members))
    if isinstance(tree, dict):
        return dict(zip(tree, found, strict=True))
    return sorted(found, key=encode) if isinstance(value, Set) else found


# --------------------------------------------------------------------------------------------------------- read back
def difference(back: object, value: object) -> tuple[str | None, bool]:
    """The field in which two values differ, in words that quote no value, None if they are equal; and whether they may
    contain a set."""
    unordered: list[object] = []
    if _same(back, value, unordered):
        return None, bool(unordered)
    for name in fields(type(value)) or ():
        was, found = getattr(value, name, None), getattr(back, name, None)
        if not _same(found, was, unordered):
            return (
                f"its field {name!r}, a {type(was).__name__}, comes back as another value or type "
                f"({type(found).__name__}); annotate it with the type of its contents, or correct its serialization"
            ), True
    return f"it comes back as a {type(back).__name__}; annotate it with the type of its contents", True


def _same(back: object, value: object, unordered: list[object]) -> bool:
    """Compare by fields: equality is the user's code, and may compare private attributes, or only identity.

    A value that no annotation describes is read back as JSON has it: an object, a list, or a text for anything that
    JSON does not have.
    """
    cls = type(value)
    alike = cls is type(back)
    if alike and cls in SCALARS:
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
    if isinstance(back, str) and not isinstance(value, _SCALAR_TYPES):
        return True
    if alike and type(scalar := opened(value)) in SCALARS:
        return bool(scalar == opened(back))
    unordered.append(value)
    try:
        return form(back) == form(value)
    except Exception:  # noqa: BLE001 - only its field's own serializer knows it
        return alike


def _all_same(back: Mapping[str, object], value: Mapping[str, object], unordered: list[object]) -> bool:
    return back.keys() == value.keys() and all(_same(back[name], its, unordered) for name, its in value.items())
