"""JMESPath into a payload as it is on the wire, compiled against the payload's type.

A plain dotted path becomes attribute and item getters, since it is read for every message. Everything else is
searched in the payload's plain form.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions
from msgspec import inspect as types

from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.message.message import Message

Read: TypeAlias = Callable[[Message, object], object]


@dataclass(frozen=True, slots=True)
class _Field:
    attribute: str
    type: types.Type


class _NoSuchField(Exception):
    def __init__(self, on: str, name: str, known: Sequence[str]) -> None:
        super().__init__(on, name)
        self.on, self.name, self.known = on, name, known


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
    names, whole = _leading_fields(compiled.parsed)
    try:
        steps = _resolve(names, _type_info(payload_type))
    except _NoSuchField as missing:
        raise _no_such_field(missing, expression, handler, option) from None
    return _follow(steps) if whole and steps is not None else _search(compiled, expression, option)


def plain(value: object) -> object:
    """The plain form of what msgspec does not know: pydantic models, by the names they have on the wire."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"{type(value).__name__} has no plain form")


# ---------------------------------------------------------------------------------------------- the getters
def _follow(steps: Sequence[tuple[bool, str]]) -> Read:
    if not any(is_item for is_item, _ in steps):
        get = operator.attrgetter(".".join(name for _, name in steps))

        def attributes(_: Message, payload: object) -> object:
            try:
                return get(payload)
            except AttributeError:  # an optional object on the way is None
                return None

        return attributes

    def mixed(_: Message, payload: object) -> object:
        value: Any = payload
        for is_item, name in steps:
            if is_item:
                value = value.get(name) if isinstance(value, dict) else None
            else:
                value = getattr(value, name, None)
        return value

    return mixed


def _search(compiled: Any, expression: str, option: str) -> Read:
    def search(_: Message, payload: object) -> object:
        try:
            return compiled.search(msgspec.to_builtins(payload, str_keys=True, enc_hook=plain))
        except Exception as error:  # noqa: BLE001 - JMESPath's own errors quote the values
            raise BadMessage(
                "key_invalid", f"{option} (payload path {expression!r}) raised {type(error).__name__}"
            ) from None

    return search


# ------------------------------------------------------------------------------------------- the expression
def _leading_fields(node: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The fields that an expression begins with, and whether it consists of nothing else."""
    match node["type"]:
        case "field":
            return [node["value"]], True
        case "subexpression":
            names: list[str] = []
            for child in node["children"]:
                more, whole = _leading_fields(child)
                names += more
                if not whole:
                    return names, False
            return names, True
        case "index_expression" | "projection" | "value_projection" | "filter_projection" | "pipe" | "flatten":
            return _leading_fields(node["children"][0])[0], False
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


def _resolve(names: Sequence[str], node: types.Type) -> list[tuple[bool, str]] | None:
    """Each step as (is it an item, its name here). None: no mistake is visible, but getters cannot follow it."""
    steps: list[tuple[bool, str]] = []
    for name in names:
        found = _step(node, name)
        if found is None:
            return None
        is_item, field = found
        steps.append((is_item, field.attribute))
        node = field.type
    return steps


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
