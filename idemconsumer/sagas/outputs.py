"""The outputs of steps: their declared types, how they are stored, and how recorded ones are read.

An output is decoded right after it is encoded, before it is committed (L14). So the run that made it continues with the
value that a resume will get, and a value that a resume could not read fails at once. Recorded outputs are read when
they are requested, not all at once (L55).
"""

from __future__ import annotations

import asyncio
import inspect
import re
from asyncio import Future, Task
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace, UnionType
from typing import Any, Final, Never, NoReturn, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from idemconsumer.errors import BadMessage, Fenced
from idemconsumer.message import codecs, models
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import StepRow
from idemconsumer.stores.leases import PostgresLeases

WINDOW: Final = 4 << 20  # bytes of outputs in memory that have not been requested yet, beside the largest one
_AT_ONCE: Final = WINDOW // 2  # bytes per read, so that two branches do not evict each other's outputs
_OCTETS: Final = "application/octet-stream"
_AWAITABLE: Final = re.compile(r"\b(Awaitable|Coroutine|Future|Task|Any)\b")


@dataclass(frozen=True, slots=True)
class _Output:
    """How outputs are stored. `exact`: a type whose values read back unchanged; `octets`: bytes are stored as they
    are."""

    kind: Any
    exact: type | None
    octets: bool
    decode: codecs.Decode | None


def check(fn: Callable[..., Any]) -> None:
    """Raises TypeError if the return annotation shows that an output could not be read back. Called before the function
    has its effect (R40)."""
    _output(fn)


def plain(fn: Any) -> str | None:
    """The name of a function that has its effect as soon as it is called: a `def` that neither wraps an async function
    nor is annotated to return an awaitable. None for other functions, and for lambdas, which do not show it."""
    function = function_of(fn)
    if function is None or function.__code__.co_flags & inspect.CO_COROUTINE or inspect.iscoroutinefunction(fn):
        return None
    function = inspect.unwrap(function)
    if inspect.iscoroutinefunction(function) or function.__name__ == "<lambda>":
        return None
    given = function.__annotations__.get("return")
    awaited = given is not None and _AWAITABLE.search(str(given))
    return None if awaited else function.__qualname__


def encode(fn: Callable[..., Any], value: object) -> tuple[StoredResult | None, Any]:
    """The stored form of an output, and the value that a resume will get. Raises TypeError for a value that cannot be
    stored, or could not be read back."""
    stored = codecs.encode(value, compared=False)  # both runs get the value as the annotation decodes it
    if stored is None or type(value) is _output(fn).exact:
        return stored, value
    try:
        return stored, decode(fn, stored)
    except BadMessage as error:
        with suppress(Exception):  # it may be of a subclass, with fields that the annotated type forbids
            if models.validates(kind := _output(fn).kind):
                return (again := StoredResult(models.write_as(kind, value))), decode(fn, again)
        raise TypeError(
            f"it returned a {type(value).__name__}, which a resume could not read: {error.detail}; correct its return "
            "annotation"
        ) from error


def decode(fn: Callable[..., Any], stored: StoredResult | None) -> Any:
    """The value of a stored output. Raises BadMessage and TypeError."""
    if stored is None:
        return None
    output, octets = _output(fn), stored.content_type == _OCTETS
    if octets and output.octets:
        return stored.body
    if octets or output.decode is None:
        raise BadMessage(
            "undecodable", f"Expected {'JSON' if octets else 'bytes'}, got {'bytes' if octets else 'JSON'}"
        )
    return output.decode(stored.body)


# By function, with weak references: a function defined inside a handler is a new one in each run.
_known: WeakKeyDictionary[FunctionType, _Output] = WeakKeyDictionary()


def _output(fn: Callable[..., Any]) -> _Output:
    function = function_of(fn)
    if function is None:
        return _ANYTHING
    output = _known.get(function)
    if output is None:
        output = _known[function] = _read(_returns(function))
    return output


def function_of(fn: Any) -> FunctionType | None:
    """The function that carries the annotations, inside a partial, a method or a callable object."""
    while not isinstance(fn, FunctionType):
        if isinstance(fn, partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        elif isinstance(call := getattr(type(fn), "__call__", None), FunctionType):  # noqa: B004 - its annotations
            fn = call
        else:
            return None
    return fn


def parameter(fn: Any, place: int) -> str:
    """The name of a function's parameter at this place, counted from 0, for error texts."""
    try:
        return f"`{list(inspect.signature(fn).parameters)[place]}`"
    except (ValueError, TypeError, IndexError):
        return "value"


def resolved(function: FunctionType, annotation: object, *, extras: bool = False) -> Any:
    """One annotation of the function, resolved by the names of its module. The annotations of other parameters are not
    resolved, since they may be meant for type checkers only. Raises what `get_type_hints` raises."""
    bare = SimpleNamespace(__annotations__={"it": annotation})
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return get_type_hints(bare, names, include_extras=extras)["it"]


def _returns(function: FunctionType) -> Any:
    try:
        annotation = resolved(function, function.__annotations__.get("return", Any), extras=True)
    except NameError as error:
        raise TypeError(
            f"its return annotation {error.name!r} cannot be resolved; define or import it at the top of the module, "
            "not inside a function or under TYPE_CHECKING"
        ) from None
    except (SyntaxError, TypeError, AttributeError) as error:
        raise TypeError(f"its return annotation cannot be resolved: {error}; annotate with a type") from None
    if get_origin(annotation) in (Awaitable, Coroutine, Future, Task):  # for a plain function that returns an awaitable
        return get_args(annotation)[-1]
    return annotation


def _read(annotation: Any) -> _Output:
    annotation = models.bare(annotation)
    if any(annotation is anything for anything in (Any, object, Never, NoReturn)):
        return _ANYTHING
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if (lost := models.lost(annotation)) is not None:
        raise TypeError(f"what it returns cannot be read back: {lost}")
    others = tuple(kind for kind in kinds if models.bare(kind) is not bytes)
    return _Output(
        kind=annotation,
        exact=annotation if annotation in (str, int, bool) else None,
        octets=len(others) < len(kinds),
        decode=codecs.decoder(Union[others]) if others else None,  # noqa: UP007 - any number of types
    )


_ANYTHING: Final = _Output(kind=Any, exact=None, octets=True, decode=codecs.decoder(Any))


class Outputs:
    """Reads the outputs of `rows`, which are requested in about this order. If the outputs read ahead exceed the
    window, the oldest are dropped."""

    def __init__(self, store: PostgresLeases, key: bytes, rows: Sequence[StepRow]) -> None:
        self._store = store
        self._key = key
        left = [row for row in rows if row.left]
        self._left = {row.name: row.left for row in left}  # outputs that have not been requested yet, and their sizes
        self._order = [row.name for row in left]
        self._place = {name: place for place, name in enumerate(self._order)}
        self._ahead: dict[str, StoredResult] = {}
        self.held = 0  # bytes
        self._reading = asyncio.Lock()

    async def of(self, row: StepRow) -> StoredResult | None:
        """The output of a step, once for each step. Raises the store's errors, and Fenced if it has been pruned."""
        if not row.left:
            return row.output
        async with self._reading:  # another branch may be reading this output already
            if row.name not in self._ahead:
                await self._read(row.name)
            output = self._ahead.pop(row.name)
            self.held -= self._left.pop(row.name)
            return output

    async def _read(self, name: str) -> None:
        """Read this output, and those that follow it as far as they fit."""
        names, size = [name], self._left[name]
        for place in range(self._place[name] + 1, len(self._order)):
            following = self._order[place]
            if following in self._left and following not in self._ahead:
                size += self._left[following]
                if size > _AT_ONCE:
                    break
                names.append(following)
        while self._ahead and self.held + size > WINDOW:
            oldest = next(iter(self._ahead))
            del self._ahead[oldest]
            self.held -= self._left[oldest]
        found = await self._store.outputs(self._key, names)
        if found.keys() != set(names):
            raise Fenced("the saga has ended, and its steps are pruned")
        self._ahead |= found
        self.held += sum(self._left[name] for name in names)
