"""The events that the package logs, found in its source: each call of a log, with the text that it gets.

A text that is a parameter is looked for at the calls of that function, and one that is a field at the calls of its
class. What cannot be followed is an error, so that no event is missing in the reference.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

from manual.sources import parsed

PACKAGE: Final = Path(__file__).parents[1] / "idemconsumer"
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_LOGS: Final = ("log", "self._log", "self._summing")
_WRITERS: Final = ("logs.py", "observe/summing.py")  # where a text arrives that others give

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Event:
    """`levels` and `fields` of all calls that log it."""

    text: str
    levels: set[str] = field(default_factory=set)
    fields: dict[str, None] = field(default_factory=dict)


class Untraceable(Exception):
    """A call of a log whose text is not found by this module."""


@dataclass(frozen=True)
class _Place:
    """Where an expression stands: its file, and the functions around it, the innermost last."""

    package: Path
    file: Path
    module: ast.Module
    functions: tuple[Function, ...]

    def __str__(self) -> str:
        return str(self.file.relative_to(self.package))


def events(package: Path = PACKAGE) -> dict[str, Event]:
    """By text, sorted."""
    found: dict[str, Event] = {}
    for place, call in _calls(package, "log.", "_summing."):
        for level, expression in _logged(place, call):
            for text in _texts(place, expression):
                event = found.setdefault(text, Event(text))
                event.levels |= level
                event.fields |= {each.arg: None for each in call.keywords if each.arg not in (None, "exc_info")}
    return dict(sorted(found.items(), key=lambda each: each[0].lower()))


def _calls(package: Path, *words: str) -> Iterator[tuple[_Place, ast.Call]]:
    """Those in files that have one of the words."""
    for file in sorted(package.rglob("*.py")):
        if any(word in _text(file) for word in words):
            module = parsed(file)
            yield from _inside(module, _Place(package, file, module, ()))


@cache
def _text(file: Path) -> str:
    return file.read_text("utf-8")


def _inside(node: ast.AST, place: _Place) -> Iterator[tuple[_Place, ast.Call]]:
    if isinstance(node, Function):
        place = replace(place, functions=(*place.functions, node))
    if isinstance(node, ast.Call):
        yield place, node
    for child in ast.iter_child_nodes(node):
        yield from _inside(child, place)


def _logged(place: _Place, call: ast.Call) -> Iterator[tuple[set[str], ast.expr]]:
    """The level and the text of what this call logs; nothing for any other call."""
    if str(place).endswith(_WRITERS):
        return
    match call.func:
        case ast.Attribute(value, attr) if ast.unparse(value) in _LOGS:
            match attr, call.args:
                case ("say", [level, event, again, *_]):
                    yield _level(place, level), event
                    yield _level(place, level), again
                case ("log", [level, event, *_]):
                    yield _level(place, level), event
                case (_, [event, *_]) if attr in _LEVELS:
                    yield {attr}, event
        case ast.Name(name) if name in _aliases(place.module):
            levels = {
                each.attr
                for value in _assigned(place, name)
                for each in ast.walk(value)
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) in _LOGS and each.attr in _LEVELS
            }
            if levels:
                yield levels, call.args[0]


@cache
def _aliases(module: ast.Module) -> frozenset[str]:
    """Names that are set to a method of a log somewhere in the module: `say = log.error`."""
    return frozenset(
        target.id
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and "log." in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def _level(place: _Place, expression: ast.expr) -> set[str]:
    values = _assigned(place, expression.id) if isinstance(expression, ast.Name) else [expression]
    named = {each.attr.lower() for value in values for each in ast.walk(value) if isinstance(each, ast.Attribute)}
    return named & set(_LEVELS)


def _assigned(place: _Place, name: str) -> list[ast.expr]:
    """What a name is set to in the innermost function that sets it, else in the module."""
    for scope in (*reversed(place.functions), place.module):
        within = ast.walk(scope) if isinstance(scope, Function) else iter(scope.body)
        found = [value for node in within for value in _set_to(node, name)]
        if found:
            return found
    return []


def _set_to(node: ast.AST, name: str) -> Iterator[ast.expr]:
    match node:
        case ast.Assign([ast.Name(target)], value) if target == name:
            yield value
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
            yield from (v for t, v in zip(targets, values, strict=True) if isinstance(t, ast.Name) and t.id == name)
        case ast.AnnAssign(ast.Name(target), value=ast.expr() as value) if target == name:
            yield value


def _texts(place: _Place, expression: ast.expr) -> Iterator[str]:
    match expression:
        case ast.Constant(str(text)):
            yield text
        case ast.Constant(None):
            return
        case ast.IfExp(_, one, other):
            yield from _texts(place, one)
            yield from _texts(place, other)
        case ast.BoolOp(values=values):
            for value in values:
                if not (isinstance(value, ast.Name) and isinstance(values[-1], ast.Constant)):
                    yield from _texts(place, value)
        case ast.JoinedStr([ast.FormattedValue(inner), ast.Constant(str(end))]):
            yield from (f"{text}{end}" for text in _texts(place, inner))
        case ast.Name(name) if values := _assigned(place, name):
            for value in values:
                yield from _texts(place, value)
        case ast.Name(name) if (at := _parameter(place, name)) is not None:
            yield from _given(*at, place)
        case ast.Attribute(_, name) if found := list(_field(place, name)):
            for value in found:
                yield from _texts(place, value)
        case _:
            raise Untraceable(f"{place}:{expression.lineno}: write the text of the event as a literal")


def _parameter(place: _Place, name: str) -> tuple[str, int] | None:
    """The innermost function and the place in its calls; `self` is not given there."""
    function = place.functions[-1]
    names = [each.arg for each in function.args.args]
    method = names[:1] == ["self"]
    return (f".{function.name}" if method else function.name, names.index(name) - method) if name in names else None


def _given(function: str, at: int, home: _Place) -> Iterator[str]:
    """What calls of that name give: those of an unrelated one have no text there."""
    found: list[str] = []
    for place, call in _calls(home.package, f"{function.lstrip('.')}("):
        called = f".{call.func.attr}" if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if called == function and len(call.args) > at and place.functions[-1:] != home.functions[-1:]:
            try:
                found += _texts(place, call.args[at])
            except Untraceable:
                if place.file == home.file:
                    raise
    if not found:
        raise Untraceable(f"{home}: no call of {function} gives the text of an event")
    yield from found


def _field(place: _Place, name: str) -> Iterator[ast.expr]:
    """The default of a field of a class of this module, and what calls of the class give."""
    for node in place.module.body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
        names = [each.target.id for each in fields if isinstance(each.target, ast.Name)]
        if name in names:
            default = fields[names.index(name)].value
            yield from (each.value for each in getattr(default, "keywords", ()) if each.arg == "default")
            for call in (each for each in ast.walk(place.module) if isinstance(each, ast.Call)):
                if ast.unparse(call.func) in (node.name, "cls") and len(call.args) > names.index(name):
                    yield call.args[names.index(name)]
