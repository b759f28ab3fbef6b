"""Public names: each one's signature and docstring, with its methods."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import idemconsumer
from idemconsumer import http, sqlalchemy, testing
from idemconsumer.http import fastapi, wsgi

PAGES: Final = {
    "idemconsumer": [idemconsumer],
    "http": [http, fastapi, wsgi],
    "testing": [testing],
    "sqlalchemy": [sqlalchemy],
}
_WIDTH: Final = 100
_RULES: Final = re.compile(r" ?\((?:[A-Z]\d{1,2}(?:, )?)+\)")


class _Written:
    """An annotation as it stands in the source."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def entries(name: str) -> Iterator[str]:
    """Those of a page."""
    for module in PAGES[name]:
        if len(PAGES[name]) > 1:
            yield f"## In `{module.__name__}`"
        for each in public(module):
            yield from _entry(module, each, "###" if len(PAGES[name]) > 1 else "##")


def public(module: ModuleType) -> list[str]:
    """The names that a module gives; those of a module without `__all__` are the classes that it defines."""
    return list(getattr(module, "__all__", None) or [
        name for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ])  # fmt: skip


def doc(value: object) -> str:
    """A docstring as Markdown, without the numbers of rules."""
    return _RULES.sub("", inspect.getdoc(value) or "")


def _entry(module: ModuleType, name: str, level: str) -> Iterator[str]:
    value = getattr(module, name)
    if inspect.isclass(value):
        yield from _class(name, value, level)
    elif callable(value) and not typing.get_origin(value):
        yield f"{level} `{name}`\n\n{_code(_signatures(name, value))}\n\n{doc(value)}"
    else:
        yield f"{level} `{name}`\n\nThe type of a parameter of an endpoint. {_after(module, name)}"


def _class(name: str, kind: type, level: str) -> Iterator[str]:
    bases = [base.__name__ for base in kind.__bases__ if issubclass(base, BaseException)]
    head = f"class {name}({', '.join(bases)})" if bases else f"class {name}"
    if issubclass(kind, StrEnum):
        head = "\n".join([f"class {name}(StrEnum):", *(f'    {each.name} = "{each.value}"' for each in kind)])
    elif _is_made_by_users(kind):
        head = "\n".join(f"class {each}" for each in _signatures(name, kind))
    yield f"{level} `{name}`\n\n{_code([head])}\n\n{doc(kind)}"
    if not name.endswith("Contract"):
        for method, raw in _methods(kind):
            overloads = _overloads(kind, method)
            if isinstance(raw, property):
                lines = [_property(raw, method)]
            else:
                lines = [_signature(method, each) for each in overloads or [getattr(kind, method)]]
            told = next(filter(None, map(doc, overloads or [raw, getattr(kind, method)])), "")
            yield f"{level}# `{name}.{method}`\n\n{_code(lines)}\n\n{told}"


def _is_made_by_users(kind: type) -> bool:
    return not getattr(kind, "_is_protocol", False) and "__init__" in vars(kind) | dict.fromkeys(
        ["__init__"] if hasattr(kind, "__struct_fields__") else []
    )


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Those that are ours, each once, in the order of the source: public ones, and a call that says what it does."""
    found: dict[str, Any] = {}
    for base in (base for base in kind.__mro__ if base.__module__.startswith("idemconsumer")):
        for name, raw in vars(base).items():
            function = getattr(raw, "fget", None) or getattr(raw, "__func__", raw)
            told = not name.startswith("_") or (name == "__call__" and raw.__doc__)
            if told and inspect.isfunction(function):
                found.setdefault(name, raw)
    yield from found.items()


def _property(raw: property, name: str) -> str:
    returns = inspect.get_annotations(raw.fget).get("return", "object") if raw.fget is not None else "object"
    return f"{name}: {returns}"


def _overloads(kind: type, method: str) -> Sequence[Callable[..., Any]]:
    """Those of a method, also where a Protocol has nothing else of it."""
    for base in kind.__mro__:
        named: Any = SimpleNamespace(__module__=base.__module__, __qualname__=f"{base.__qualname__}.{method}")
        if found := typing.get_overloads(named):
            return found
    return []


def _signatures(name: str, function: Callable[..., Any]) -> list[str]:
    overloads = [] if inspect.isclass(function) else typing.get_overloads(inspect.unwrap(function))
    return [_signature(name, each) for each in overloads or [function]]


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.name != "self"]
    signature = signature.replace(
        parameters=[
            each.replace(
                annotation=_as_written(each.annotation),
                default=_default(each.default),
            )
            for each in own
        ],
        return_annotation=_as_written(signature.return_annotation),
    )
    prefix = "async def " if inspect.iscoroutinefunction(inspect.unwrap(function)) else ""
    prefix = "" if inspect.isclass(function) else prefix or "def "
    text = f"{prefix}{name}{signature}"
    if len(text) <= _WIDTH:
        return text
    own = list(signature.parameters.values())
    parts = [str(signature.replace(parameters=[each], return_annotation=inspect.Signature.empty))[1:-1] for each in own]
    if any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in own):
        first = next(n for n, each in enumerate(own) if each.kind is inspect.Parameter.KEYWORD_ONLY)
        parts = [part.removeprefix("*, ") for part in parts]
        if not any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in own):
            parts.insert(first, "*")
    after = "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation!r}"
    return "\n".join([f"{prefix}{name}(", *(f"    {part}," for part in parts), f"){after}"])


def _default(value: Any) -> Any:
    return _Written("…") if inspect.isfunction(value) or value is ... else value


def _as_written(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _Written(re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text))


def _after(module: ModuleType, name: str) -> str:
    """The text behind an assignment, which is its docstring to readers."""
    found = re.search(rf'^{name} = [^\n]*\n"""(.*?)"""', inspect.getsource(module), re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def _code(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])
