"""A dead letter as it is shown to a person, and as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping

import click
import msgspec

from idemconsumer.admin.dead_letters import DeadLetterDetail, Redrive
from idemconsumer.cli.verbs import facts, printable, time_of

_SHOWN = (
    "id", "handler", "scope", "source", "position", "reason", "error", "attempts", "arrivals", "first_at", "last_at",
)  # fmt: skip
_GIVEN = ("message_id", "record_key", "timestamp")


def show(letter: DeadLetterDetail, redrives: Iterable[Redrive]) -> None:
    """In full, and what to do about it."""
    for line in (*facts(_facts(letter, redrives)), *_message(letter)):
        click.echo(line)


def _facts(letter: DeadLetterDetail, redrives: Iterable[Redrive]) -> Iterator[tuple[str, object]]:
    yield from ((name, getattr(letter, name)) for name in _SHOWN)
    yield from ((name, in_words(value)) for name in _GIVEN if (value := getattr(letter, name)) is not None)
    yield from (("property", f"{name}: {value}") for name, value in letter.properties.items())
    yield from (("header", f"{name}: {in_words(value)}") for name, value in letter.headers)
    if letter.forwarded_at is not None:
        yield "forwarded", time_of(letter.forwarded_at)
    for each in redrives:
        ended = "" if each.ended_at is None else f" at {time_of(each.ended_at)}"
        other = "" if each.letter == letter.id else f", as letter {each.letter}"
        yield "redriven", f"{time_of(each.at)} by {each.by}{other}: {each.outcome}{ended}"
    yield "what to do", letter.hint


def _message(letter: DeadLetterDetail) -> Iterator[str]:
    if letter.traceback is not None:
        yield multiline(letter.traceback)
    if letter.emptied_at is not None:
        yield f"body        dropped at {time_of(letter.emptied_at)}, {letter.body_size} bytes"
    elif letter.tombstone:
        yield "body        none: a tombstone"
    else:
        encoding, body = _readable(letter.body)
        cut = f"the first {len(letter.body)} of " if len(letter.body) < letter.body_size else ""
        yield f"body        {cut}{letter.body_size} bytes, {encoding}, SHA-256 {letter.body_sha256.hex()}"
        yield multiline(body)


def letter_json(letter: DeadLetterDetail) -> Mapping[str, object]:
    """All of it; text as text, anything else in base64."""
    encoding, body = _readable(letter.body)
    fields: dict[str, object] = msgspec.structs.asdict(letter)
    key = None if letter.key is None else letter.key.hex()
    record_key = None if letter.record_key is None else either(letter.record_key)
    headers = [{"name": name, **either(value)} for name, value in letter.headers]
    given = {"key": key, "record_key": record_key, "headers": headers, "body_sha256": letter.body_sha256.hex()}
    return fields | given | {"body": body, "body_encoding": encoding, "hint": letter.hint}


def either(value: str | bytes) -> dict[str, str]:
    """Text as `text`, anything else as `base64`."""
    encoding, text = ("utf-8", value) if isinstance(value, str) else _readable(value)
    return {"text" if encoding == "utf-8" else "base64": text}


def in_words(value: object) -> str:
    """Text as it is, other bytes as base64."""
    if not isinstance(value, bytes):
        return str(value)
    encoding, text = _readable(value)
    return text if encoding == "utf-8" else f"base64 {text}"


def multiline(text: str) -> str:
    """Lines of text from elsewhere."""
    return "\n".join(map(printable, text.split("\n")))


def _readable(body: bytes) -> tuple[str, str]:
    try:
        return "utf-8", body.decode()
    except UnicodeDecodeError:
        return "base64", base64.b64encode(body).decode()
