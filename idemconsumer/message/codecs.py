"""Bytes to typed payloads, results to bytes. JSON, except for `bytes`, which are passed unchanged."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Final, TypeAlias, Union, get_args, get_origin

import msgspec
from msgspec import inspect as types

from idemconsumer.errors import BadMessage, Reject
from idemconsumer.message import contents, forms, models
from idemconsumer.message.fields import fields
from idemconsumer.message.message import Result, StoredResult

Decode: TypeAlias = Callable[[bytes], object]

_REASON = "undecodable"

# msgspec's error texts name types and paths, except these, which quote what was sent.
_QUOTES_VALUE = re.compile(r"(Invalid (?:enum )?value) .*?( - at `\$[^`]*`)?", re.DOTALL)
_QUOTES_FIELD = "Object contains unknown field"

# An HTTP field that every server can send: nothing that would end it, and only characters of Latin-1.
_FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_FIELD_VALUE = re.compile(r"([!-~\x80-\xff]([\t -~\x80-\xff]*[!-~\x80-\xff])?)?")


def decoder(annotation: Any) -> Decode:
    """Build the decoder for a payload annotation.

    That is a msgspec Struct, dataclass, TypedDict, dict, list, scalar, `Any`, `bytes` or `bytes | None` (the body
    itself), or anything with a pydantic model in it. Raises TypeError for a type that cannot be decoded. The decoder
    raises only BadMessage, `undecodable`, whose detail names types, positions and the payload type's own fields, never
    values.
    """
    if is_bytes(annotation):
        return lambda body: body
    annotation = models.bare(annotation) if hasattr(annotation, "__value__") else annotation
    if annotation is object:
        annotation = Any
    if models.validates(annotation):
        return _pydantic(annotation)
    try:
        unknown = next(_custom_classes(types.type_info(annotation)), None)
    except TypeError as error:
        raise TypeError(f"{error}; make each of them a field" if "InitVar" in str(error) else str(error)) from None
    if unknown is not None:
        raise TypeError(f"{unknown.__name__} is not a msgspec Struct, dataclass, TypedDict, builtin or pydantic model")
    return _safe(msgspec.json.Decoder(annotation, dec_hook=_read_model).decode, _msgspec_detail)


def without_mark(body: bytes) -> bytes:
    """The body without a byte order mark, which JSON may begin with and which is no part of it (RFC 8259, 8.1)."""
    return body.removeprefix(b"\xef\xbb\xbf")


def is_bytes(annotation: Any) -> bool:
    """Whether the payload is the body itself, and not JSON."""
    return annotation in (bytes, bytes | None)


def takes_none(annotation: Any) -> bool:
    """Whether a payload may be None: `X | None`."""
    if get_origin(annotation) is Annotated:
        return takes_none(get_args(annotation)[0])
    return get_origin(annotation) in (Union, UnionType) and type(None) in get_args(annotation)


def encode(
    result: object, what: str = "result", instead: str = "return", *, compared: bool = True
) -> StoredResult | None:
    """A handler's result as it is stored; None stores nothing. Raises TypeError that names what cannot be encoded and,
    if `compared`, what would be read back as something else."""
    if result is None:
        return None
    if isinstance(result, bytes):
        return StoredResult(result, "application/octet-stream")
    return StoredResult(_json(result, f"a {what} of type {type(result).__name__}", instead, compared))


def unencodable(annotation: Any) -> str | None:
    """The name of a class in a result's annotation of which no instance can be stored; None if that depends on the
    values."""
    if models.validates(annotation):
        return None
    try:
        node = types.type_info(annotation)
    except Exception:  # noqa: BLE001 - msgspec knows no such type, such as NoReturn: the values decide
        return None
    return next((cls.__name__ for cls in _custom_classes(node) if _concrete(cls)), None)


def _concrete(cls: type) -> bool:
    """False for a protocol, an abstract class or the base of a dataclass: their instances are of other classes."""
    if inspect.isabstract(cls) or getattr(cls, "_is_protocol", False) or hasattr(cls, "model_dump_json"):
        return False
    derived: list[type] = [] if cls is type else cls.__subclasses__()
    # Once it is imported, pydantic.v1 has subclasses of Path whose values are plain Paths.
    return all(unencodable(each) for each in derived if not str(each.__module__).startswith("pydantic."))


def encode_result(result: object, *, compared: bool = True) -> StoredResult | None:
    """As `encode`, for anything that a handler may return, including a Result (H43)."""
    if not isinstance(result, Result):
        return encode(result, compared=compared)
    encoded = encode(result.body, "Result with a body", "give it", compared=compared) or StoredResult(b"", "")
    if type(result.status) is not int or not 200 <= result.status < 600:
        raise TypeError(f"a Result has the status {result.status!r}; give it an HTTP status from 200 to 599")
    try:
        headers = msgspec.convert(result.headers, tuple[tuple[str, str], ...])
    except msgspec.ValidationError:
        raise TypeError("a Result has headers that are not pairs of strings; give it a list of (name, value)") from None
    for name, value in (*headers, ("content-type", result.content_type or "")):
        if not _FIELD_NAME.fullmatch(name) or not _FIELD_VALUE.fullmatch(value):
            raise TypeError(
                f"a Result has the header {name!r} with characters that HTTP does not allow; percent-encode them, "
                'as urllib.parse.quote(text, safe="") does'
            )
    return replace(
        encoded, status=result.status, headers=headers, content_type=result.content_type or encoded.content_type
    )


def encode_rejection(code: str, body: object, status: int | None = None) -> StoredResult:
    """A rejection as it is stored and replayed: `{"code": …, "body": …}`, with its status if it has one. Raises
    TypeError as `encode` does."""
    what = f"Reject with a code of type {type(code).__name__} and a body of type {type(body).__name__}"
    said = {"code": code, "body": body} | ({} if status is None else {"status": status})
    return StoredResult(_json(said, what, "give it"), status=status)


def stored_rejection(body: bytes) -> StoredResult:
    """A rejection of which only the body was kept."""
    return StoredResult(body, status=decode_rejection(StoredResult(body)).status)


def encode_refusal(refused: Reject) -> StoredResult:
    """As `encode_rejection`, with the name of the exception's class, for a step: a replay must raise the same class."""
    stored = encode_rejection(refused.code, refused.body, refused.status)
    # A class in the file that was started is elsewhere, or missing, in a process that was started another way.
    if (cls := type(refused)) is Reject or cls.__module__ == "__main__":
        return stored
    said = {
        **msgspec.json.decode(stored.body, type=dict[str, msgspec.Raw]),
        "class": f"{cls.__module__}:{cls.__qualname__}",
    }
    return replace(stored, body=msgspec.json.encode(said))


def decode_rejection(stored: StoredResult | None) -> Reject:
    """The inverse: the Reject that a step ended with, of its own class if that class is imported. The class's
    `__init__` is not called, so attributes other than `code`, `body` and `status` are missing."""
    rejection = {} if stored is None else msgspec.json.decode(stored.body)
    read = Reject(rejection.get("code", ""), rejection.get("body"), status=rejection.get("status"))
    return _of_class(read, rejection.get("class", ""))


def _of_class(read: Reject, name: str) -> Reject:
    module, _, path = name.partition(":")
    cls: Any = sys.modules.get(module)
    for part in path.split("."):
        cls = getattr(cls, part, None)
    if not isinstance(cls, type) or not issubclass(cls, Reject):
        return read
    own = Exception.__new__(cls, *read.args)  # its own __init__ may need other arguments
    own.__dict__.update(vars(read))
    with contextlib.suppress(Exception):  # its properties may need what is missing
        if (own.code, own.status) == (read.code, read.status) and own.body is read.body:
            return own
    return read


def _json(value: object, what: str, instead: str, compared: bool = True) -> bytes:
    def model(inside: object) -> object:
        if models.writes(type(inside)):
            return msgspec.Raw(_json(inside, f"a {type(inside).__name__}", "give it", compared))
        if isinstance(inside, str | int | float):
            return forms.form(inside)
        raise TypeError(f"{type(inside).__name__} is not JSON")

    try:
        written, levels = _written(value, model)
    except _NotReadBack as error:
        raise _NotReadBack(f"{what} cannot be stored: {error}") from None
    except Exception as error:  # noqa: BLE001 - a value's own code runs while it is encoded
        reason, _, advice = _why(error).partition("; ")
        types_of_json = f"{instead} a Struct, dataclass, dict, list, str, number, bytes or None"
        raise TypeError(f"{what} cannot be stored as JSON: {reason}; {advice or types_of_json}") from None
    problem, sets = _lost(value, written, compared)
    if sets and not levels and (b"null" in written or b"[" in written):
        levels = list(contents.levels(value))
    if b"null" in written and any(map(contents.has_no_json, levels)):
        raise _NotReadBack(f"{what} contains a number that is NaN or infinite, which JSON does not have; write None")
    if any(issubclass(kind, _SETS) for kind in contents.unusual(levels)):
        written = forms.encode(contents.in_order(_decode_exactly(written), value))
        problem = problem and _lost(value, written, compared)[0]  # where no annotation says that it is a set
    if problem is not None:
        raise _NotReadBack(f"{what} cannot be read back as it was: {problem}")
    return written


_Model: TypeAlias = Callable[[object], object]


def _written(value: Any, model: _Model) -> tuple[bytes, Sequence[contents.Level]]:
    """The JSON of a value, and its levels where they had to be read: msgspec takes a pydantic dataclass for its own."""
    if models.writes(type(value)):
        return models.write(value), ()
    if type(value) not in _OPEN:
        return msgspec.json.encode(value, enc_hook=model), ()
    try:
        written, levels = msgspec.json.encode(value), list(contents.levels(value))
    except Exception:  # noqa: BLE001 - it does not know all of it
        written, levels = b"", []
    if written and not any(map(models.writes, contents.unusual(levels))):
        return written, levels
    return msgspec.json.encode(_prepared(value, model), enc_hook=model), ()


def _prepared(value: Any, model: _Model) -> Any:
    """The value, with the JSON of each part that pydantic has to write."""
    if type(value) is dict:
        return {name: _prepared(each, model) for name, each in value.items()}
    if type(value) in _OPEN:
        return [_prepared(each, model) for each in value]
    return model(value) if models.writes(type(value)) else value


class _NotReadBack(TypeError):
    pass


_OPEN: Final = frozenset({dict, list, tuple})
_SETS: Final = (set, frozenset)
_decode_exactly = msgspec.json.Decoder(float_hook=lambda text: msgspec.Raw(text.encode())).decode


def _lost(value: Any, written: bytes, compared: bool) -> tuple[str | None, bool]:
    """Why a value with fields cannot be read back, and whether it may contain a set, NaN or infinity. Quotes no value.

    Only a value shows what the type's own serializers do, and which of several classes it is; so it is compared before
    an effect depends on it (R40).
    """
    cls: Any = type(value)
    if fields(cls) is None:
        return None, True
    if not models.is_model(cls):
        cls = getattr(value, "__orig_class__", cls)  # for Box[int], whose class is Box
    if (lost := _always_lost(cls)) is not None or not compared:
        return lost, True
    try:
        return contents.difference(_decoder_of(cls)(written), value)
    except (BadMessage, TypeError) as error:
        return f"{getattr(error, 'detail', error)}; correct the types of its fields, or their serialization", True
    except RecursionError as error:
        return _why(error), True


_always_lost: Final[Callable[[Any], str | None]] = lru_cache(maxsize=1024)(models.lost)
_decoder_of: Final[Callable[[Any], Decode]] = lru_cache(maxsize=1024)(decoder)


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    if isinstance(error, UnicodeEncodeError):
        return "it contains text that is not valid Unicode (a lone surrogate)"
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a value's own code raised it, and that may be broken as well
        return type(error).__name__


# ------------------------------------------------------------------------------------------------- decoding
def _safe(decode: Decode, detail: Callable[[Exception], str]) -> Decode:
    def safe(body: bytes) -> object:
        try:
            return decode(without_mark(body))
        except Exception as error:  # noqa: BLE001 - bad input, or whatever a payload type's own check raises
            raise BadMessage(_REASON, detail(error)) from None

    return safe


def _msgspec_detail(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "text is not UTF-8"
    if not isinstance(error, msgspec.MsgspecError):
        return f"the payload type's own check raised {type(error).__name__}"
    if error.__cause__ is not None:  # raised in __post_init__: the text is the user's and may quote anything
        return f"the payload type's own check raised {type(error.__cause__).__name__}"
    text = str(error)
    if text.startswith(_QUOTES_FIELD):
        return _QUOTES_FIELD
    if quoting := _QUOTES_VALUE.fullmatch(text):
        return f"{quoting[1]}{quoting[2] or ''}"
    return text


def _custom_classes(node: object, seen: set[int] | None = None) -> Iterator[type]:
    # msgspec accepts any class when the decoder is built, and then refuses every message.
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, types.CustomType | types.RawType):
        if isinstance(node, types.CustomType) and node.cls is not object and not models.is_model(node.cls):
            yield node.cls
    elif isinstance(node, tuple):
        for item in node:
            yield from _custom_classes(item, seen)
    elif isinstance(node, types.Type | types.Field):
        for name in node.__struct_fields__:
            yield from _custom_classes(getattr(node, name), seen)


# ------------------------------------------------------------------------------------------------- pydantic
def _read_model(cls: type, value: object) -> object:
    """A model inside one of msgspec's classes."""
    return models.adapter(cls).validate_json(msgspec.json.encode(value))


def _pydantic(annotation: Any) -> Decode:
    from pydantic import ValidationError

    adapter = models.new_adapter(annotation)
    strict_json = msgspec.json.Decoder()

    def decode(body: bytes) -> object:
        strict_json.decode(body)  # pydantic's parser takes NaN, Infinity and 1e400, which are not JSON
        return adapter.validate_json(body)

    def detail(error: Exception) -> str:
        if not isinstance(error, ValidationError):
            return _msgspec_detail(error)
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        fields = getattr(annotation, "model_fields", {})
        at = f" at {first['loc'][0]}" if first["loc"] and first["loc"][0] in fields else ""
        return f"{error.error_count()} validation error(s), the first is {first['type']}{at}"

    return _safe(decode, detail)
