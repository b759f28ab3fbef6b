"""What is in a value, as it is looked for in what is written: sets, and numbers that JSON does not have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any

from idemconsumer.message import models
from idemconsumer.message.fields import fields
from idemconsumer.message.forms import encode


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
            inside = _attributes(part, fields(type(part)) or {}).values()
        waiting += [each for each in inside if type(each) not in leave_out]


def _attributes(value: object, names: Mapping[str, str]) -> dict[str, object]:
    """By their names on the wire."""
    return {wire: getattr(value, name, None) for name, wire in names.items()} | dict(models.extras(value))


def in_order(tree: Any, value: object) -> Any:
    """What was written of a value, with the members of each set in an order that does not depend on the process."""
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
