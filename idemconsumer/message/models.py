"""pydantic models: how one is written so that it can be read back, and where that is impossible.

Models are recognised by attributes, so that pydantic is imported only where the program has imported it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import UnionType
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

Wire: TypeAlias = tuple[str | int, ...]
"""Where a field is in the JSON: its name, or a path."""


def is_model(cls: Any) -> bool:
    """Whether it is a pydantic model or a pydantic dataclass."""
    return hasattr(cls, "__pydantic_validator__") and isinstance(cls, type)


def is_root(cls: type) -> bool:
    """Whether it is a root model: on the wire it is what its one field is."""
    return bool(getattr(cls, "__pydantic_root_model__", False))


def is_typed_dict(cls: Any) -> bool:
    """Whether it is a TypedDict of `typing` or of `typing_extensions`; each of these recognises only its own."""
    return hasattr(cls, "__required_keys__")


def bare(annotation: Any) -> Any:
    """The type inside Annotated, a NewType and, from Python 3.12, `type Name = …`."""
    while True:
        if hasattr(annotation, "__metadata__"):
            annotation = annotation.__origin__
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        else:
            return annotation


def parts(annotation: Any, into: Callable[[Any], bool] = lambda _: True) -> Iterator[Any]:
    """The annotation itself and each type in it, including the types of a class's fields if `into` returns True for the
    class."""
    waiting, seen = [annotation], dict[int, Any]()  # the parts are kept, so that no other part gets the same id
    while waiting:
        part = bare(waiting.pop())
        if id(part) in seen:
            continue
        seen[id(part)] = part
        yield part
        cls = get_origin(part) or part
        inside = _field_types(cls) if isinstance(cls, type) else ()
        if not inside or into(cls):
            waiting += (*get_args(part), *inside)


def _field_types(cls: type) -> Sequence[Any]:
    if is_model(cls):
        own = by_hand(cls)
        return [info.annotation for name, info in fields(cls).items() if name not in own]
    plain = dataclasses.is_dataclass(cls) or is_typed_dict(cls) or hasattr(cls, "_fields")
    if not plain and not hasattr(cls, "__struct_fields__") and not hasattr(cls, "__attrs_attrs__"):
        return ()
    return list(_hints(cls).values())


def _hints(cls: Any) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except Exception:  # noqa: BLE001 - a name that only type checkers see: whoever decodes it will say so
        return {}


def validates(annotation: Any) -> bool:
    """Whether pydantic has to read and write it. It does if it is a model; if it contains a model outside any class of
    msgspec's; or if it contains a type that msgspec does not accept, or would take for its own."""
    around = (part for part in parts(annotation, into=lambda _: False))
    return any(is_model(get_origin(part) or part) or _is_pydantics(part) for part in around) or any(
        map(_only_pydantic, parts(annotation, into=lambda cls: not is_model(cls)))
    )


def writes(cls: type) -> bool:
    """Whether pydantic has to write its instances."""
    return cls.__module__ != "builtins" and _validates(cls)


_validates = lru_cache(maxsize=1_024)(validates)


def _only_pydantic(part: Any) -> bool:
    """A pydantic dataclass, which has aliases and constraints; or a union with a model in it."""
    if get_origin(part) in (Union, UnionType):
        kinds = [bare(kind) for kind in get_args(part) if kind is not type(None)]
        return len(kinds) > 1 and any(is_model(get_origin(kind) or kind) for kind in kinds)
    return is_model(cls := get_origin(part) or part) and dataclasses.is_dataclass(cls)


def _is_pydantics(part: Any) -> bool:
    # Classes that are created at run time, such as Protobuf's, may have no module.
    return any(str(cls.__module__).partition(".")[0] == "pydantic" for cls in getattr(part, "__mro__", ()))


@lru_cache(maxsize=256)
def adapter(cls: Any) -> Any:
    """pydantic's TypeAdapter of a class. Not cached for other annotations: `A | B` and `B | A` are equal, but read
    differently."""
    return new_adapter(cls)


def new_adapter(annotation: Any) -> Any:
    """pydantic's TypeAdapter. Raises TypeError, with what to write instead, for a type that pydantic does not know."""
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(annotation)
    except PydanticSchemaGenerationError as error:
        unknown = str(error).partition(". Set")[0].partition(" for ")[2]
        raise TypeError(
            "only pydantic reads a type that contains a pydantic dataclass or a union with a model, and it does not "
            f"know {unknown}; write a dataclass, a TypedDict or a pydantic model in its place"
        ) from None
    except PydanticUserError as error:
        raise TypeError(error.message) from None


def write(value: object) -> bytes:
    """The JSON of a model, by the names under which it is read. Computed fields are left out if they would make it
    unreadable."""
    cls: Any = type(value)
    dumped: bytes = adapter(cls).dump_json(value, by_alias=True, round_trip=_is_strict(cls))
    return dumped


def write_as(annotation: Any, value: object) -> bytes:
    """The JSON of a value as the annotation describes it, without the fields of a subclass."""
    from pydantic import TypeAdapter

    written: bytes = TypeAdapter(annotation).dump_json(value, by_alias=True, round_trip=True, warnings=False)
    return written


def write_field(value: Any, name: str) -> Mapping[str, Any]:
    """What a model writes for one field in its JSON."""
    cls: Any = type(value)
    written: Mapping[str, Any] = adapter(cls).dump_python(value, mode="json", include={name}, round_trip=True)
    return written


@lru_cache(maxsize=256)
def _is_strict(cls: Any) -> bool:
    """Whether it, or a model in it, forbids its own computed fields as input, or reads a value from JSON text."""
    return any(
        (_config(part).get("extra") == "forbid" and getattr(part.__pydantic_decorators__, "computed_fields", None))
        or any("Json" in str(each) for info in fields(part).values() for each in (info.annotation, *info.metadata))
        for part in parts(cls)
        if is_model(part)
    )


def _config(cls: Any) -> Mapping[str, Any]:
    return getattr(cls, "model_config", None) or getattr(cls, "__pydantic_config__", None) or {}


def fields(cls: type) -> dict[str, Any]:
    """pydantic's description of each field, by attribute."""
    known: dict[str, Any] = getattr(cls, "__pydantic_fields__", None) or getattr(cls, "model_fields", {})
    return known


def read_at(cls: type, name: str, info: Any) -> list[Wire]:
    """All places in the JSON from which the field may be read."""
    alias = info.validation_alias if info.validation_alias is not None else info.alias
    choices = getattr(alias, "choices", [alias])
    found = [
        tuple(choice.path) if hasattr(choice, "path") else (choice,) for choice in choices if choice is not None
    ]  # fmt: skip
    config = _config(cls)
    if not found or config.get("populate_by_name") or config.get("validate_by_name"):
        found.append((name,))
    return found


def places(annotation: Any) -> list[tuple[Wire, str, Any]]:
    """Each field of a class that pydantic reads: its place in the JSON, its attribute, and its type. Of two fields that
    may be at the same place, the first one counts."""
    cls = get_origin(annotation) or annotation
    known = fields(cls) if is_model(cls) else {}
    given = {name: info.annotation for name, info in known.items()} or _hints(cls)
    read = {name: read_at(cls, name, known[name]) if name in known else [(name,)] for name in given}
    ranked = [(rank, wire, name) for name, wires in read.items() for rank, wire in enumerate(wires)]
    of = dict(zip(getattr(cls, "__parameters__", ()), get_args(annotation), strict=False))
    return [(wire, name, _applied(given[name], of)) for _, wire, name in sorted(ranked, key=lambda each: each[0])]


def _applied(annotation: Any, of: Mapping[Any, Any]) -> Any:
    """The annotation, with a generic class's arguments in place of its variables."""
    if isinstance(annotation, TypeVar):
        return of.get(annotation, annotation)
    open_ones = getattr(annotation, "__parameters__", ()) if get_origin(annotation) else ()
    return annotation[tuple(of.get(each, each) for each in open_ones)] if open_ones else annotation


def takes_more(cls: type) -> bool:
    """Whether it keeps fields that it does not declare."""
    return bool(_config(cls).get("extra") == "allow")


def extras(value: object) -> Mapping[str, Any]:
    """The undeclared fields that it has kept."""
    return getattr(value, "__pydantic_extra__", None) or {}


def lost(annotation: Any) -> str | None:
    """Why no value of this type can be read back as it was, as far as the type shows: a field, and what to write
    instead."""
    models = [part for part in parts(annotation) if is_model(part)]
    return next((reason for part in models for reason in (*_hidden_fields(part), *_renamed_fields(part))), None)


def _hidden_fields(cls: type) -> Iterator[str]:
    own = by_hand(cls)
    for name, info in fields(cls).items():
        field = f"its field {name!r} of {cls.__name__}"
        if info.exclude:
            yield f"{field} is left out of what is written; remove exclude=True, or return another type"
        if name not in own and any(map(is_secret, _arguments(info.annotation))):
            yield (
                f"{field} is a secret, and only asterisks are written for it; leave it out, or write it with a "
                "field_serializer"
            )


def _renamed_fields(cls: Any) -> Iterator[str]:
    if cls.__pydantic_decorators__.model_serializers:
        return  # this depends on the value
    for name, info in fields(cls).items():
        written, places = info.serialization_alias or name, read_at(cls, name, info)
        if (written,) not in places and info.init is not False:
            read = ".".join(map(str, places[0]))
            alias = f"Field(alias={read!r}), or " if len(places[0]) == 1 else ""
            yield (
                f"its field {name!r} of {cls.__name__} is written as {written!r} and read as {read!r}; write {alias}"
                "model_config = ConfigDict(populate_by_name=True)"
            )


def by_hand(cls: Any) -> frozenset[str]:
    """The fields that the user's own code writes."""
    decorators, known = cls.__pydantic_decorators__, fields(cls)
    named = {name for each in decorators.field_serializers.values() for name in each.info.fields}
    if "*" in named or decorators.model_serializers or _config(cls).get("json_encoders"):
        return frozenset(known)
    return frozenset(named | {name for name, info in known.items() if _has_serializer(info.metadata)})


def _has_serializer(metadata: Sequence[object]) -> bool:
    return any(type(each).__name__ in ("PlainSerializer", "WrapSerializer") for each in metadata)


def _arguments(annotation: Any) -> Iterator[Any]:
    if _has_serializer(getattr(annotation, "__metadata__", ())):
        return
    part = bare(annotation)
    yield part
    for argument in get_args(part):
        yield from _arguments(argument)


def is_secret(part: Any) -> bool:
    """Whether it is a pydantic secret such as SecretStr, for which only asterisks are written."""
    return _is_pydantics(get_origin(part) or part) and hasattr(get_origin(part) or part, "get_secret_value")
