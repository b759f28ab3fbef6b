"""Resources for a step's function, by the types of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

from idemconsumer.sagas.outputs import function_of

_Parameters = tuple[tuple[str, int | None, type], ...]  # name, position (None: keyword-only), type
_known: WeakKeyDictionary[FunctionType, _Parameters] = WeakKeyDictionary()


def injected(fn: Callable[..., Any], given: int, resources: Mapping[type, object]) -> dict[str, object]:
    """Keyword arguments for parameters that `given` positional ones leave open and that have the type of a resource."""
    if not resources:
        return {}
    if isinstance(fn, MethodType):  # a new object each time, while its function is the same
        fn, given = fn.__func__, given + 1
    return {
        name: resources[wanted]
        for name, place, wanted in _parameters(fn)
        if wanted in resources and (place is None or place >= given)
    }


def _parameters(fn: Callable[..., Any]) -> _Parameters:
    function = function_of(fn)
    if function is None:
        return ()
    if fn is not function:  # a partial or a callable object has other positions
        return _read(fn, function)
    if (known := _known.get(function)) is None:
        known = _known[function] = _read(fn, function)
    return known


def _read(fn: Callable[..., Any], function: FunctionType) -> _Parameters:
    found = []
    bound = fn.keywords if isinstance(fn, partial) else ()
    for place, parameter in enumerate(inspect.signature(fn).parameters.values()):
        if parameter.name in bound:
            continue
        wanted = _type(function, parameter.annotation)
        if isinstance(wanted, type) and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            by_name = parameter.kind is parameter.KEYWORD_ONLY
            found.append((parameter.name, None if by_name else place, wanted))
    return tuple(found)


def _type(function: FunctionType, annotation: Any) -> Any:
    if not isinstance(annotation, str):
        return annotation
    bare = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(bare, getattr(inspect.unwrap(function), "__globals__", {}))["it"]
    except (NameError, SyntaxError, TypeError, AttributeError):  # a parameter's, perhaps meant for type checkers only
        return None
