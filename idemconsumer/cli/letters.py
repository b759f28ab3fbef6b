"""A dead letter as it is shown to a person, and as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import datetime

import click
import msgspec

from idemconsumer.admin.dead_letters import DeadLetterDetail, Redrive
from idemconsumer.cli.options import printable

_SHOWN = (
    "id", "handler", "scope", "source", "position", "reason", "error", "attempts", "arrivals", "first_at", "last_at",
)  # fmt: skip
_GIVEN = ("message_id", "record_key", "timestamp")


def show(letter: DeadLetterDetail, redrives: Iterable[Redrive]) -> None:
    """In full, and what to do about it."""
    encoding, body = _readable(letter.body)
    for name in _SHOWN:
        click.echo(f"{name:<11} {printable(str(getattr(letter, name)))}")
    for name in _GIVEN:
        if (value := getattr(letter, name)) is not None:
            click.echo(f"{name:<11} {_value(value)}")
    for name, value in letter.properties.items():
        click.echo(f"property    {printable(name)}: {printable(str(value))}")
    for name, header in letter.headers:
        click.echo(f"header      {printable(name)}: {_value(header)}")
    if letter.forwarded_at is not None:
        click.echo(f"forwarded   {time_of(letter.forwarded_at)}")
    for each in redrives:
        ended = "" if each.ended_at is None else f" at {time_of(each.ended_at)}"
        other = "" if each.letter == letter.id else f", as letter {each.letter}"
        click.echo(f"redriven    {time_of(each.at)} by {printable(each.by)}{other}: {each.outcome}{ended}")
    click.echo(f"what to do  {letter.hint}")
    if letter.traceback is not None:
        click.echo(_multiline(letter.traceback))
    if letter.emptied_at is not None:
        click.echo(f"body        dropped at {time_of(letter.emptied_at)}, {letter.body_size} bytes")
        return
    if letter.tombstone:
        click.echo("body        none: a tombstone")
        return
    cut = f"the first {len(letter.body)} of " if len(letter.body) < letter.body_size else ""
    click.echo(f"body        {cut}{letter.body_size} bytes, {encoding}, SHA-256 {letter.body_sha256.hex()}")
    click.echo(_multiline(body))


def time_of(at: datetime) -> str:
    """To the second."""
    return f"{at:%Y-%m-%d %H:%M:%S}"


def _value(value: object) -> str:
    if isinstance(value, bytes):
        encoding, text = _readable(value)
        return printable(text) if encoding == "utf-8" else f"base64 {text}"
    return printable(str(value))


def _readable(body: bytes) -> tuple[str, str]:
    try:
        return "utf-8", body.decode()
    except UnicodeDecodeError:
        return "base64", base64.b64encode(body).decode()


def _multiline(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


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
