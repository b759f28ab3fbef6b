"""JMESPath into a payload as it is on the wire, compiled against the payload's type.

A plain path of names and indexes becomes attribute and item getters, since it is read for every message. Any other
expression is searched in the payload's plain form, within limits: a search runs Python for each element in the worker's
event loop, and nothing can interrupt it (R25).
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Final, TypeAlias, Union, get_args, get_origin

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions
from jmespath.visitor import TreeInterpreter
from msgspec import inspect as types

from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.message import contents, digits, models
from idemconsumer.message.codecs import without_mark
from idemconsumer.message.forms import is_there, looked_up, plain
from idemconsumer.message.message import Message

Read: TypeAlias = Callable[[Message, object], object]

MAX_SEARCHED_BYTES: Final = 1 << 20
"""The largest body in which an expression that is not a plain path is searched: the plain form alone takes 40 ms."""
MAX_SEARCH_STEPS: Final = 20_000
"""The most parts of such an expression that are evaluated for one message: about 50 ms."""


@dataclass(frozen=True, slots=True)
class _Found:
    """One step of a path into a type: the type found, the attribute to read if it is one, and how many names of the
    path were used. `sure`: the type shows that a value is there, though perhaps null."""

    type: types.Type
    attribute: str | None = None
    names: int = 1
    sure: bool = True


class _NoSuchField(Exception):
    def __init__(self, on: str, name: str, known: Sequence[str]) -> None:
        super().__init__(on, name)
        self.on, self.name, self.known = on, name, known


_OF_SEVERAL: Final = ("or_expression", "and_expression", "not_expression", "comparator", "function_expression",
                      "multi_select_list", "multi_select_dict", "key_val_pair")  # fmt: skip


class ByAttribute:
    """Stands for a payload type that is known only at run time: getters take attributes, or items of a mapping."""


def compile_path(expression: str, payload_type: Any, *, handler: str, option: str) -> Read:
    """Compile `expression` into a function of (message, payload) that returns values in their form on the wire.

    Absent and null are both None. Raises HandlerError if the payload's type shows that the path cannot exist.
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
        return _exact(_by_attribute(names), compiled.parsed)
    try:
        found = _resolve(names, _type_info(payload_type))
    except _NoSuchField as missing:
        raise _no_such_field(missing, expression, handler, option) from None
    if not whole:
        return _exact(_search(compiled.parsed, expression, option), compiled.parsed)
    attributes = [each.attribute for each in found if each.attribute is not None]
    return _exact(_attributes(attributes) if len(attributes) == len(found) else _follow(names), compiled.parsed)


def is_sure(expression: str, payload_type: Any) -> bool:
    """Whether the payload's type shows that every path in a valid expression is there. True also for a type that shows
    no fields, such as `dict`."""
    root = _type_info(payload_type)
    if isinstance(root, types.AnyType | types.DictType):
        return True
    try:
        begun = _paths_of(jmespath.compile(expression).parsed)
        return all(step.sure for names in begun for step in _resolve(names, root))
    except _NoSuchField:  # in one alternative of an expression such as `a || b`
        return False


# ---------------------------------------------------------------------------------------------- the getters
def _follow(names: Sequence[str | int]) -> Read:
    """A getter where the type shows nothing: looks each name up in the decoded value."""

    def read(_: Message, payload: object) -> object:
        for name in names:
            payload = looked_up(payload, name)
        return payload

    return read


def _attributes(names: Sequence[str]) -> Read:
    get = operator.attrgetter(".".join(names))

    def read(_: Message, payload: object) -> object:
        try:
            return get(payload)
        except AttributeError:  # an optional object on the path is None
            return None

    return read


def _by_attribute(names: Sequence[str | int]) -> Read:
    def read(_: Message, payload: object) -> object:
        value: Any = payload
        for name in names:
            if isinstance(name, int) or isinstance(value, Mapping):
                value = looked_up(value, name)
            else:
                value = getattr(value, name, None) if is_there(value, name) else None
        return value

    return read


def _exact(read: Read, parsed: Mapping[str, Any]) -> Read:
    """Return values in their form on the wire, and numbers with all their digits: as floats, two numbers that differ in
    the 17th digit would be equal."""

    def exact(message: Message, payload: object) -> object:
        value = read(message, payload)
        if value is None or type(value) is str or type(value) is int:
            return value
        with suppress(Exception):  # a value's own code
            value = plain(value)
            if not any(float in kinds for kinds, _ in contents.levels(value)):
                return value
            return digits.exact(value, _sent(message, parsed))
        return value

    return exact


def _sent(message: Message, parsed: Mapping[str, Any]) -> object:
    """The value of the expression in the body itself; None if finding it would take too long (R25)."""
    if len(message.body) > MAX_SEARCHED_BYTES:
        return None
    try:
        body = digits.decode(without_mark(message.body))
    except (msgspec.MsgspecError, UnicodeError):
        return None
    with suppress(Exception):  # JMESPath's own errors
        return _Search().visit(parsed, body)
    return None


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
            return _Search().visit(parsed, plain(payload))
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
    """One search, which ends after a limited number of steps. Each is at most linear in the value that it reads."""

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
        case "identity":  # before an index at the start of the expression
            return [], True
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


def _paths_of(node: Mapping[str, Any]) -> Iterator[list[str | int]]:
    """The beginning of each path in an expression that starts at the payload itself."""
    if node["type"].endswith(_OF_SEVERAL):
        for child in node["children"]:
            yield from _paths_of(child)
    else:
        yield _leading_steps(node)[0]


def _check_functions(node: Mapping[str, Any], expression: str, handler: str, option: str) -> None:
    # JMESPath looks functions up at run time: without this check every message would become a dead letter.
    if node["type"] == "function_expression" and node["value"] not in Functions.FUNCTION_TABLE:
        raise HandlerError(
            handler,
            f"`{option}` {expression!r} calls {node['value']!r}, which is not a JMESPath function",
            nearest(node["value"], list(Functions.FUNCTION_TABLE)) + "use one, or a function of the Message",
        )
    for child in node.get("children", ()):
        if isinstance(child, dict):
            _check_functions(child, expression, handler, option)


# ------------------------------------------------------------------------------------------------- the type
def _type_info(annotation: Any) -> types.Type:
    """The type that the decoder produces. A type that pydantic reads is resolved one level deep, since it may contain
    itself."""
    annotation = models.bare(annotation)
    if annotation is object:
        return types.AnyType()
    if models.validates(annotation):
        return _validated(annotation)
    try:
        return types.type_info(annotation)
    except TypeError:  # msgspec does not know the type: nothing can be checked before there is a payload
        return types.AnyType()


def _validated(annotation: Any) -> types.Type:
    cls, arguments = get_origin(annotation) or annotation, get_args(annotation)
    inside = tuple(map(types.CustomType, arguments))
    if cls in (Union, UnionType):
        return types.UnionType(inside)
    if not isinstance(cls, type):
        return types.AnyType()
    if issubclass(cls, Mapping) and len(inside) == 2:
        return types.DictType(*inside)
    if issubclass(cls, tuple) and inside and arguments[-1] is not Ellipsis:
        return types.TupleType(inside)
    if issubclass(cls, Collection) and inside:
        return types.ListType(inside[0])
    return types.CustomType(annotation)


def _resolve(names: Sequence[str | int], node: types.Type) -> Sequence[_Found]:
    steps: list[_Found] = []
    while names:
        steps += [found := _step(node, names)]
        node, names = found.type, names[found.names :]
    return steps


def _step(node: types.Type, names: Sequence[str | int]) -> _Found:
    if isinstance(node, types.CustomType):
        node = _type_info(node.cls)
    if isinstance(node, types.CustomType) and models.is_root(node.cls):
        return replace(_step(types.CustomType(models.fields(node.cls)["root"].annotation), names), attribute=None)
    if isinstance(node, types.UnionType):
        return _in_one_of([each for each in node.types if not _is_none(each)], names)
    return _indexed(node, names[0]) if isinstance(names[0], int) else _named(node, names)


def _is_none(node: types.Type) -> bool:
    return isinstance(node, types.NoneType) or (isinstance(node, types.CustomType) and node.cls is type(None))


_UNKNOWN: Final = _Found(types.AnyType(), sure=False)


def _indexed(node: types.Type, number: int) -> _Found:
    if isinstance(node, types.ListType | types.VarTupleType):
        return _Found(node.item_type)
    if isinstance(node, types.TupleType) and -len(node.item_types) <= number < len(node.item_types):
        return _Found(node.item_types[number])
    return _UNKNOWN


def _named(node: types.Type, names: Sequence[str | int]) -> _Found:
    name = str(names[0])
    if isinstance(node, types.DictType):
        return _Found(node.value_type)
    if isinstance(node, types.StructType) and node.tag_field == name:
        return _Found(types.StrType())
    known = list(_fields(node))
    for wire, field in known:
        if tuple(names[: len(wire)]) == wire:
            return replace(field, names=len(wire))
    parents = {wire[0] for wire, _ in known if len(wire) > 1}
    if name in parents or isinstance(node, types.AnyType | types.RawType):
        return _UNKNOWN
    if isinstance(node, types.CustomType) and (not known or models.takes_more(get_origin(node.cls) or node.cls)):
        return _UNKNOWN
    raise _NoSuchField(_type_name(node), name, [".".join(map(str, wire)) for wire, _ in known])


def _in_one_of(members: Sequence[types.Type], names: Sequence[str | int]) -> _Found:
    """A step into a union: only the value decides which member it is. At least one member must have the field."""
    if len(members) == 1:
        return _step(members[0], names)
    known: list[str] = []
    have_it: list[_Found] = []
    for member in members:
        try:
            have_it.append(_step(member, names))
        except _NoSuchField as missing:
            known += missing.known
    if not have_it:
        raise _NoSuchField("the payload's types", str(names[0]), known)
    if any(each.names > 1 for each in have_it):
        return _UNKNOWN
    sure = len(have_it) == len(members) and all(each.sure for each in have_it)
    return _Found(types.UnionType(tuple(each.type for each in have_it)), sure=sure)


def _fields(node: types.Type) -> Iterator[tuple[models.Wire, _Found]]:
    """The fields of an object type, by their place on the wire."""
    if isinstance(node, types.CustomType):
        by_name = models.is_typed_dict(get_origin(node.cls) or node.cls)
        for wire, attribute, annotation in models.places(node.cls):
            yield wire, _Found(types.CustomType(annotation), None if by_name else attribute)
    elif isinstance(node, types.TypedDictType):
        for field in node.fields:
            yield (field.encode_name,), _Found(field.type)
    elif isinstance(node, types.StructType | types.DataclassType) and not getattr(node, "array_like", False):
        for field in node.fields:
            yield (field.encode_name,), _Found(field.type, field.name)


def _type_name(node: types.Type) -> str:
    cls = getattr(node, "cls", None)
    cls = get_origin(cls) or cls
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
        f"{nearest(missing.name, missing.known)}its fields are {', '.join(missing.known)}",
    )


def nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
