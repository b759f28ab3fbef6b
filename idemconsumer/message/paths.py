"""JMESPath into a payload as it is on the wire, compiled against the payload's type.

A plain path of names and indexes becomes attribute and item getters, since it is read for every message. Everything
else is searched in the payload's plain form, within bounds: a search runs Python for each element in the worker's
event loop, and nothing can interrupt it (R25).
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions
from jmespath.visitor import TreeInterpreter
from msgspec import inspect as types

from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.message.message import Message

Read: TypeAlias = Callable[[Message, object], object]
_Steps: TypeAlias = Sequence[tuple[bool, str | int]]  # whether it is an item; its name here

MAX_SEARCHED_BYTES: Final = 1 << 20
"""The largest body in which an expression that is not a plain path is searched: the plain form alone takes 40 ms."""
MAX_SEARCH_STEPS: Final = 20_000
"""The most parts of such an expression that are evaluated for one message: about 50 ms."""


@dataclass(frozen=True, slots=True)
class _Field:
    attribute: str
    type: types.Type


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
        steps = _resolve(names, _type_info(payload_type))
    except _NoSuchField as missing:
        raise _no_such_field(missing, expression, handler, option) from None
    return _follow(steps) if whole and steps is not None else _search(compiled.parsed, expression, option)


def plain(value: object) -> object:
    """The plain form of what msgspec does not know: pydantic models, by the names they have on the wire."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"{type(value).__name__} has no plain form")


# ---------------------------------------------------------------------------------------------- the getters
def _follow(steps: _Steps) -> Read:
    if not any(is_item for is_item, _ in steps):
        get = operator.attrgetter(".".join(str(name) for _, name in steps))

        def attributes(_: Message, payload: object) -> object:
            try:
                return get(payload)
            except AttributeError:  # an optional object on the way is None
                return None

        return attributes

    def mixed(_: Message, payload: object) -> object:
        value: Any = payload
        for is_item, name in steps:
            if isinstance(name, int):
                value = value[name] if isinstance(value, list | tuple) and -len(value) <= name < len(value) else None
            elif is_item:
                value = value.get(name) if isinstance(value, dict) else None
            else:
                value = getattr(value, name, None)
        return value

    return mixed


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
    if annotation is object:
        return types.AnyType()
    try:
        return types.type_info(annotation)
    except TypeError:  # msgspec does not know it: nothing can be checked before there is a payload
        return types.AnyType()


def _resolve(names: Sequence[str | int], node: types.Type) -> _Steps | None:
    """None: no mistake is visible, but getters cannot follow it."""
    steps: list[tuple[bool, str | int]] = []
    indexed = any(isinstance(name, int) for name in names)
    for name in names:
        if indexed and isinstance(node, types.CustomType):  # pydantic's plain form may be another text
            return None
        if isinstance(name, int):
            if (inner := _item_type(node)) is None:
                return None
            steps.append((True, name))
            node = inner
            continue
        found = _step(node, name)
        if found is None:
            return None
        is_item, field = found
        steps.append((is_item, field.attribute))
        node = field.type
    return steps


def _item_type(node: types.Type) -> types.Type | None:
    if isinstance(node, types.UnionType):
        members = [member for member in node.types if not isinstance(member, types.NoneType)]
        return _item_type(members[0]) if len(members) == 1 else None
    if isinstance(node, types.ListType | types.VarTupleType):
        return node.item_type
    return node if isinstance(node, types.AnyType) else None


def _step(node: types.Type, name: str) -> tuple[bool, _Field] | None:
    if isinstance(node, types.UnionType):
        members = [member for member in node.types if not isinstance(member, types.NoneType)]
        if len(members) == 1:
            return _step(members[0], name)
        known: list[str] = []
        for member in members:
            try:
                _step(member, name)
            except _NoSuchField as missing:
                known += missing.known
            else:
                return None  # the member is known only at run time
        raise _NoSuchField("the payload's types", name, known)
    if isinstance(node, types.AnyType):
        return True, _Field(name, node)
    if isinstance(node, types.DictType):
        return (True, _Field(name, node.value_type)) if _text_keys(node) else None
    if isinstance(node, types.StructType) and node.tag_field == name:
        return None
    fields = dict(_fields(node))
    if name not in fields:
        if isinstance(node, types.CustomType) and not fields:
            return None
        raise _NoSuchField(_type_name(node), name, list(fields))
    return isinstance(node, types.TypedDictType), fields[name]


def _text_keys(node: types.DictType) -> bool:
    return isinstance(node.key_type, types.AnyType | types.StrType)


def _fields(node: types.Type) -> Iterator[tuple[str, _Field]]:
    """The fields of an object type, by their names on the wire."""
    if isinstance(node, types.StructType | types.DataclassType | types.TypedDictType):
        if not getattr(node, "array_like", False):
            for field in node.fields:
                yield field.encode_name, _Field(field.name, field.type)
    elif isinstance(node, types.CustomType):
        for name, info in getattr(node.cls, "model_fields", {}).items():
            alias = info.validation_alias if isinstance(info.validation_alias, str) else info.alias
            yield alias or name, _Field(name, _type_info(info.annotation))


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
