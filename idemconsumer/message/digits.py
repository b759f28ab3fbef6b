"""Numbers with all their digits, in one form whichever way they were written."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Final

import msgspec

_MOST: Final = 400  # more digits than any float has; a longer number that is written in two ways counts as two numbers

_INEXACT: Final = frozenset({float, dict, list})


def number(text: str) -> msgspec.Raw:
    """One form for all ways to write that number, and for no other number: as floats, two that differ in the 17th digit
    would be equal."""
    scientific = "e" in text or "E" in text
    if not scientific and text[-1] != "0":  # nearly all numbers: a body may have a hundred thousand
        return msgspec.Raw(text.encode())
    if scientific:
        try:
            sign, digits, exponent = Decimal(text).as_tuple()
        except InvalidOperation:  # an exponent of more than 18 digits
            return msgspec.Raw(text.encode())
        assert isinstance(exponent, int), "JSON has no NaN"
        if len(digits) + abs(exponent) > _MOST:
            return msgspec.Raw(text.encode())
        written = "".join(map(str, digits)) + "0" * exponent
        before = len(written) + min(exponent, 0)
        whole = written[: max(before, 0)].lstrip("0") or "0"
        part = "0" * -before + written[max(before, 0) :]
        text = f"{'-' * sign}{whole}.{part}"
    whole, _, part = text.partition(".")
    part = part.rstrip("0")
    if part:
        return msgspec.Raw(f"{whole}.{part}".encode())
    return msgspec.Raw(b"0" if whole == "-0" else whole.encode())


decode = msgspec.json.Decoder(float_hook=number).decode
"""Decodes JSON; numbers other than int come in this form."""


def exact(value: object, sent: object) -> object:
    """A plain value with the digits of `sent`, which is what the body has at the same place. If decode= has made
    another number of it, that number stays."""
    if isinstance(value, dict):
        inside = sent if isinstance(sent, dict) else {}
        return {name: exact(each, inside.get(name)) if type(each) in _INEXACT else each for name, each in value.items()}
    if isinstance(value, list):
        beside = sent if isinstance(sent, list) and len(sent) == len(value) else [None] * len(value)
        return [exact(each, other) for each, other in zip(value, beside, strict=True)]
    if type(value) is not float or not math.isfinite(value):
        return value
    return sent if _as_float(sent) == value else number(str(value))


def _as_float(sent: object) -> float | None:
    if isinstance(sent, msgspec.Raw):
        return float(bytes(sent))
    try:
        return float(sent) if type(sent) is int else None
    except OverflowError:
        return None
