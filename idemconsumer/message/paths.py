"""JMESPath into a payload as it is on the wire, compiled against the payload's type.

A plain path of names and indexes becomes attribute and item getters, since it is read for every message. Everything
else is searched in the payload's plain form, within bounds: a search runs Python for each element in the worker's
event loop, and nothing can interrupt it (R25).
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import UnionType
from typing import Any, Final, TypeAlias, Union, get_args, get_origin

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions
from jmespath.visitor import TreeInterpreter
from msgspec import inspect as types

from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.message import models
from idemconsumer.message.message import Message

Read: TypeAlias = Callable[[Message, object], object]
_Get: TypeAlias = Callable[[Any], object]

MAX_SEARCHED_BYTES: Final = 1 << 20
"""The largest body in which an expression that is not a plain path is searched: the plain form alone takes 40 ms."""
MAX_SEARCH_STEPS: Final = 20_000
"""The most parts of such an expression that are evaluated for one message: about 50 ms."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A step that the type knows: how it is taken, what is there, and how many names of the path it has used. `sure`:
    each value of the type has it, if it is not null."""

    get: _Get
    type: types.Type
    attribute: str | None = None
    names: int = 1
    sure: bool = True


class _NoSuchField(Exception):
    def __init__(self, on: str, name: str, known: Sequence[str]) -> None:
        super().__init__(on, name)
        self.on, self.name, self.known = on, name, known


class ByAttribute:
    """In place of a payload's type that is known at run time only: getters take attributes, or items of a mapping."""


def compile_path(expression: str, payload_type: Any, *, handler: str, option: str) -> Read:
    """Compile `expression` into a function of (message, payload). Absent and null are both None.

    Raises HandlerError where the payload's type shows that the path cannot be there.
    """
    try:
        compiled = jmespath.compile(expression)
    except JMESPathError:
        raise HandlerError(
            handler,
            f"`{option}` {expression!r} is not a JMESPath expression",
            'write a path into the payload, e.g. "order_id" or "order.id"; a name with other characters is '
            "quoted: '\"order-id\"'",
        ) from None
    _check_functions(compiled.parsed, expression, handler, option)
    names, whole = _leading_steps(compiled.parsed)
    if payload_type is ByAttribute:
        if not whole:
            raise HandlerError(
                handler,
                f"`{option}` {expression!r} is more than a path, and decode= makes an object of another library",
                'write a plain path of attributes, e.g. "order.id", or a function of the Message',
            )
        return _by_attribute(names)
    try:
        found = _resolve(names, _type_info(payload_type))
    except _NoSuchField as missing:
        raise _no_such_field(missing, expression, handler, option) from None
    if not whole or found is None:
        return _search(compiled.parsed, expression, option)
    attributes = [each.attribute for each in found if each.attribute is not None]
    return _attributes(attributes) if len(attributes) == len(found) else _follow([each.get for each in found])


def is_sure(expression: str, payload_type: Any) -> bool:
    """Whether the payload's type shows that what a valid path names is there, or tells nothing, as `dict` does."""
    names, whole = _leading_steps(jmespath.compile(expression).parsed)
    root = _type_info(payload_type)
    if not whole or isinstance(root, types.AnyType | types.DictType):
        return True
    found = _resolve(names, root)
    return found is None or all(each.sure for each in found)


def compile_search(expression: str) -> Callable[[object], object]:
    """Find what a valid expression names in plain values. Raises BadMessage where that takes too long."""
    parsed = jmespath.compile(expression).parsed

    def search(value: object) -> object:
        try:
            return _Search().visit(parsed, value)
        except Exception as error:  # noqa: BLE001 - JMESPath's own errors quote the values
            raise BadMessage("key_invalid", f"{expression!r} raised {type(error).__name__}") from None

    return search


def plain(value: object) -> object:
    """The plain form of what msgspec does not know: pydantic models, by the names they have on the wire."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"{type(value).__name__} has no plain form")


# ---------------------------------------------------------------------------------------------- the getters
def _follow(steps: Sequence[_Get]) -> Read:
    def read(_: Message, payload: object) -> object:
        value = payload
        for get in steps:
            value = get(value)
        return value

    return read


def _attributes(names: Sequence[str]) -> Read:
    get = operator.attrgetter(".".join(names))

    def read(_: Message, payload: object) -> object:
        try:
            return get(payload)
        except AttributeError:  # an optional object on the way is None
            return None

    return read


def _attribute(name: str) -> _Get:
    return lambda value: getattr(value, name, None)


def _item(name: str) -> _Get:
    return lambda value: value.get(name) if isinstance(value, dict) else None


def _index(number: int) -> _Get:
    def get(value: Any) -> object:
        value = getattr(value, "root", value) if models.is_root(type(value)) else value
        return value[number] if isinstance(value, list | tuple) and -len(value) <= number < len(value) else None

    return get


def _in_root(get: _Get) -> _Get:
    return lambda value: get(getattr(value, "root", None))


def _looked_up(name: str) -> _Get:
    """Where the type does not tell: in what the decoder has made."""

    def get(value: Any) -> object:
        while models.is_root(type(value)):
            value = value.root
        if isinstance(value, dict):
            return value.get(name)
        cls: Any = type(value)
        if (attribute := _attribute_of(cls, name)) is not None:
            return getattr(value, attribute, None)
        return models.extras(value).get(name)

    return get


@lru_cache(maxsize=1_024)
def _attribute_of(cls: Any, name: str) -> str | None:
    """Of an object of that class, what has this name on the wire."""
    node = _type_info(cls)
    if isinstance(node, types.StructType) and node.tag_field == name:
        return None
    return next((field.attribute for wire, field in _fields(node) if wire == (name,)), None)


def _by_attribute(names: Sequence[str | int]) -> Read:
    def read(_: Message, payload: object) -> object:
        value: Any = payload
        for name in names:
            if isinstance(name, int):
                value = value[name] if isinstance(value, Sequence) and -len(value) <= name < len(value) else None
            elif isinstance(value, Mapping):
                value = value.get(name)
            else:
                value = getattr(value, name, None)
        return value

    return read


def _search(parsed: Mapping[str, Any], expression: str, option: str) -> Read:
    what = f"{option} (payload path {expression!r})"

    def search(message: Message, payload: object) -> object:
        if (size := len(message.body)) > MAX_SEARCHED_BYTES:
            raise BadMessage(
                "key_invalid",
                f"{what} is searched only in bodies up to {MAX_SEARCHED_BYTES:,} bytes, and this one has {size:,}; a "
                "plain path of names and indexes has no such limit",
            )
        try:
            return _Search().visit(parsed, msgspec.to_builtins(payload, str_keys=True, enc_hook=plain))
        except _TooLong:
            raise BadMessage(
                "key_invalid",
                f"{what} takes more than {MAX_SEARCH_STEPS:,} steps; use a plain path of names and indexes",
            ) from None
        except Exception as error:  # noqa: BLE001 - JMESPath's own errors quote the values
            raise BadMessage("key_invalid", f"{what} raised {type(error).__name__}") from None

    return search


class _TooLong(Exception):
    pass


class _Search(TreeInterpreter):
    """One search, which ends after a number of steps. Each of these is at most linear in what it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self._left = MAX_SEARCH_STEPS

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _TooLong
        return super().visit(node, *args, **kwargs)


# ------------------------------------------------------------------------------------------- the expression
def _leading_steps(node: Mapping[str, Any]) -> tuple[list[str | int], bool]:
    """The fields and indexes that an expression begins with, and whether it consists of nothing else."""
    match node["type"]:
        case "field" | "index":
            return [node["value"]], True
        case "subexpression" | "index_expression":
            names: list[str | int] = []
            for child in node["children"]:
                more, whole = _leading_steps(child)
                names += more
                if not whole:
                    return names, False
            return names, True
        case "projection" | "value_projection" | "filter_projection" | "pipe" | "flatten":
            return _leading_steps(node["children"][0])[0], False
        case _:
            return [], False


def _check_functions(node: Mapping[str, Any], expression: str, handler: str, option: str) -> None:
    # JMESPath looks functions up when it runs: without this every single message would become a dead letter.
    if node["type"] == "function_expression" and node["value"] not in Functions.FUNCTION_TABLE:
        raise HandlerError(
            handler,
            f"`{option}` {expression!r} calls {node['value']!r}, which is not a JMESPath function",
            _nearest(node["value"], list(Functions.FUNCTION_TABLE)) + "use one, or a function of the Message",
        )
    for child in node.get("children", ()):
        if isinstance(child, dict):
            _check_functions(child, expression, handler, option)


# ------------------------------------------------------------------------------------------------- the type
def _type_info(annotation: Any) -> types.Type:
    annotation = models.bare(annotation)
    if annotation is object:
        return types.AnyType()
    if models.is_model(annotation):  # of a pydantic dataclass, msgspec would tell the names in Python
        return types.CustomType(annotation)
    if get_origin(annotation) in (Union, UnionType):  # of several models, msgspec would tell nothing
        return types.UnionType(tuple(map(_type_info, get_args(annotation))))
    try:
        return types.type_info(annotation)
    except TypeError:  # msgspec does not know it: nothing can be checked before there is a payload
        return types.AnyType()


def _resolve(names: Sequence[str | int], node: types.Type) -> Sequence[_Found] | None:
    """None: no mistake is visible, but getters cannot follow it."""
    steps: list[_Found] = []
    indexed = any(isinstance(name, int) for name in names)
    while names:
        if indexed and isinstance(node, types.CustomType):  # pydantic's plain form may be another text
            return None
        found = _indexed(node, names[0]) if isinstance(names[0], int) else _named(node, names)
        if found is None:
            return None
        steps.append(found)
        node, names = found.type, names[found.names :]
    return steps


def _indexed(node: types.Type, number: int) -> _Found | None:
    inner = _item_type(node)
    return None if inner is None else _Found(_index(number), inner)


def _item_type(node: types.Type) -> types.Type | None:
    if isinstance(node, types.UnionType):
        members = _members(node)
        return _item_type(members[0]) if len(members) == 1 else None
    if isinstance(node, types.ListType | types.VarTupleType):
        return node.item_type
    return node if isinstance(node, types.AnyType) else None


def _members(node: types.UnionType) -> list[types.Type]:
    return [member for member in node.types if not isinstance(member, types.NoneType)]


def _named(node: types.Type, names: Sequence[str | int]) -> _Found | None:
    name = str(names[0])
    if isinstance(node, types.UnionType):
        return _in_one_of(_members(node), names)
    if isinstance(node, types.AnyType):
        return _Found(_looked_up(name), node, sure=False)
    if isinstance(node, types.DictType):
        return _Found(_item(name), node.value_type) if _text_keys(node) else None
    if isinstance(node, types.StructType) and node.tag_field == name:
        return None
    if isinstance(node, types.CustomType) and models.is_root(node.cls):
        inner = _named(_type_info(models.fields(node.cls)["root"].annotation), names)
        return None if inner is None else replace(inner, get=_in_root(inner.get), attribute=None)
    known = list(_fields(node))
    for wire, field in known:
        if tuple(names[: len(wire)]) == wire:
            return replace(field, names=len(wire))
    if isinstance(node, types.CustomType) and (not known or models.takes_more(node.cls)):
        return _Found(_looked_up(name), types.AnyType(), sure=False) if known else None
    raise _NoSuchField(_type_name(node), name, [".".join(map(str, wire)) for wire, _ in known])


def _in_one_of(members: Sequence[types.Type], names: Sequence[str | int]) -> _Found | None:
    """Which of them it is, only the value tells. One at least has to have the field."""
    if len(members) == 1:
        return _named(members[0], names)
    known: list[str] = []
    have_it: list[_Found] = []
    for member in members:
        try:
            if (found := _named(member, names)) is not None:
                have_it.append(found)
        except _NoSuchField as missing:
            known += missing.known
    if not have_it and known:
        raise _NoSuchField("the payload's types", str(names[0]), known)
    sure = len(have_it) == len(members) and all(each.sure for each in have_it)
    inner = types.UnionType(tuple(each.type for each in have_it)) if sure else types.AnyType()
    return _Found(_looked_up(str(names[0])), inner, sure=sure)


def _text_keys(node: types.DictType) -> bool:
    return isinstance(node.key_type, types.AnyType | types.StrType)


def _fields(node: types.Type) -> Iterator[tuple[models.Wire, _Found]]:
    """The fields of an object type, by where they are on the wire."""
    if isinstance(node, types.TypedDictType):
        for field in node.fields:
            yield (field.encode_name,), _Found(_item(field.name), field.type)
    elif isinstance(node, types.StructType | types.DataclassType):
        if not getattr(node, "array_like", False):
            for field in node.fields:
                yield (field.encode_name,), _Found(_attribute(field.name), field.type, field.name)
    elif isinstance(node, types.CustomType):
        for name, info in models.fields(node.cls).items():
            for wire in models.read_at(node.cls, name, info):
                yield wire, _Found(_attribute(name), _type_info(info.annotation), name)


def _type_name(node: types.Type) -> str:
    cls = getattr(node, "cls", None)
    return cls.__name__ if cls is not None else type(node).__name__.removesuffix("Type").lower()


def _no_such_field(missing: _NoSuchField, expression: str, handler: str, option: str) -> HandlerError:
    if not missing.known:
        return HandlerError(
            handler,
            f"`{option}` {expression!r} looks for {missing.name!r} in {missing.on}, which has no fields",
            'write Key.header("…"), Key.message_id(), Key.payload() or a function of the Message',
        )
    return HandlerError(
        handler,
        f"`{option}` {expression!r}: {missing.on} has no field {missing.name!r}",
        f"{_nearest(missing.name, missing.known)}its fields are {', '.join(missing.known)}",
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
