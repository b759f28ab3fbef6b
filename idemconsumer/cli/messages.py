"""`publish`, `dead` and `prune`: messages, and what is left of them."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import click
import msgspec
import psycopg

from idemconsumer.admin.dead_letters import Admin, DeadLetterDetail
from idemconsumer.brokers.connecting import check_delay, connect, destination
from idemconsumer.cli.banner import table
from idemconsumer.cli.options import as_json, database, need_dsn, print_json, printable
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings, load
from idemconsumer.sql.queries import misconfigured
from idemconsumer.worker.retention import prune_once

_BATCH = 500  # messages between two steps of the progress bar
_ERROR_WIDTH = 60
_SHOWN = (
    "id", "handler", "scope", "source", "position", "reason", "error", "attempts", "arrivals", "first_at", "last_at",
)  # fmt: skip


_GIVEN = ("message_id", "record_key", "timestamp")


@click.command()
@click.argument("source", metavar="SOURCE")
@click.argument("payload", required=False)
@click.option("--file", "lines", type=click.File("rb"), help="One message per line; - is standard input.")
@click.option("--key", help="Message id; in Kafka the record key. SQS FIFO queues drop a second message with it.")
@click.option("--header", "headers", multiple=True, metavar="K=V", help="Can be given several times.")
@click.option(
    "--times", type=click.IntRange(1), default=1, metavar="N", help="Publish each message N times.  [default: 1]"
)
@click.option("--delay", metavar="TIME", default="0s", help="Arrive so much later, e.g. 10m: postgres: and sqs: only.")
@database
def publish(
    source: str,
    payload: str | None,
    lines: BinaryIO | None,
    key: str | None,
    headers: Sequence[str],
    times: int,
    delay: str,
    **flags: Any,
) -> None:
    """Publish PAYLOAD, or the lines of a file, to SOURCE.

    SOURCE is kafka:topic, rabbitmq:queue, rabbitmq:exchange/routing.key, sqs:queue (a name, ARN or URL) or
    postgres:queue. A RabbitMQ queue with a / in its name is rabbitmq:/name. Returns once the broker has confirmed. The
    payload is sent unchanged.
    """
    if (payload is None) == (lines is None):
        raise click.UsageError("give either PAYLOAD or --file")
    bodies = [payload.encode()] if payload is not None else _bodies(lines)
    pairs = dict(_pair(header) for header in headers)
    seconds = parse_duration(delay)
    messages = [Outgoing(body, pairs, key, seconds) for body in bodies for _ in range(times)]
    asyncio.run(_publish(source, messages, load(**flags)))
    click.echo(f"published {len(messages)} to {source}")


async def _publish(source: str, messages: Sequence[Outgoing], settings: Settings) -> None:
    scheme, name = destination(source)
    if scheme == "memory":
        raise ConfigurationError(f"{source!r} exists only inside one process, for tests; use another source")
    check_delay(scheme, name, max((message.delay for message in messages), default=0.0))
    broker = connect(scheme, settings)
    try:
        with click.progressbar(length=len(messages), label="publishing", file=sys.stderr) as bar:
            for start in range(0, len(messages), _BATCH):
                batch = messages[start : start + _BATCH]
                await broker.publish(name, batch)
                bar.update(len(batch))
    except Exception:
        if bar.pos:
            click.echo(f"at least {bar.pos} of {len(messages)} were published before this error:", err=True)
        raise
    finally:
        await broker.close()


def _bodies(lines: BinaryIO | None) -> list[bytes]:
    return [body for line in lines or () if (body := line.strip())]


def _pair(header: str) -> tuple[str, str]:
    name, equals, value = header.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--header {header!r}: write NAME=VALUE")
    return name, value


@click.group()
def dead() -> None:
    """Dead letters: messages put aside for a person."""


@dead.command("list")
@click.option("--handler", help="Only dead letters of this handler.")
@click.option("--reason", help="Only dead letters with this reason.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=50, metavar="N", help="List at most N.  [default: 50]"
)
@database
@as_json
def dead_list(handler: str | None, reason: str | None, limit: int, as_json: bool, **flags: Any) -> None:
    """List dead letters, newest first."""
    settings = load(**flags)
    admin = Admin(need_dsn(settings), settings.schema)
    letters = asyncio.run(admin.dead_letters(handler=handler, reason=reason, limit=limit))
    if as_json:
        print_json(letters)
        return
    rows: list[tuple[str, ...]] = [("id", "last seen", "handler", "reason", "position", "arrivals", "error")]
    for each in letters:
        cells = (each.handler, each.reason, each.position, str(each.arrivals), each.error[:_ERROR_WIDTH])
        rows.append((str(each.id), f"{each.last_at:%Y-%m-%d %H:%M:%S}", *map(printable, cells)))
    click.echo(table(rows) if letters else "no dead letters")
    for count in asyncio.run(admin.dead_counts()) if len(letters) == limit else ():
        click.echo(f"{count.handler}: {count.letters} {count.reason}, {count.arrivals} arrivals")


@dead.command("show")
@click.argument("number", metavar="ID", type=int)
@database
@as_json
def dead_show(number: int, as_json: bool, **flags: Any) -> None:
    """Show one dead letter with all that its broker gave, and what to do about it."""
    settings = load(**flags)
    letter = asyncio.run(Admin(need_dsn(settings), settings.schema).dead_letter(number))
    if letter is None:
        raise ConfigurationError(f"there is no dead letter {number}; `idemconsumer dead list` lists them")
    encoding, body = _readable(letter.body)
    if as_json:
        print_json(_as_json(letter, encoding, body))
        return
    for name in _SHOWN:
        click.echo(f"{name:<11} {printable(str(getattr(letter, name)))}")
    for name in _GIVEN:
        if (value := getattr(letter, name)) is not None:
            click.echo(f"{name:<11} {_value(value)}")
    for name, value in letter.properties.items():
        click.echo(f"property    {printable(name)}: {printable(str(value))}")
    for name, header in letter.headers:
        click.echo(f"header      {printable(name)}: {_value(header)}")
    click.echo(f"what to do  {letter.hint}")
    if letter.tombstone:
        click.echo("body        none: a tombstone")
        return
    cut = f"the first {len(letter.body)} of " if len(letter.body) < letter.body_size else ""
    click.echo(f"body        {cut}{letter.body_size} bytes, {encoding}, SHA-256 {letter.body_sha256.hex()}")
    click.echo(_multiline(body))


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


def _as_json(letter: DeadLetterDetail, encoding: str, body: str) -> Mapping[str, object]:
    fields: dict[str, object] = msgspec.structs.asdict(letter)
    key = None if letter.key is None else letter.key.hex()
    record_key = None if letter.record_key is None else _either(letter.record_key)
    headers = [{"name": name, **_either(value)} for name, value in letter.headers]
    given = {"key": key, "record_key": record_key, "headers": headers, "body_sha256": letter.body_sha256.hex()}
    return fields | given | {"body": body, "body_encoding": encoding, "hint": letter.hint}


def _either(value: str | bytes) -> dict[str, str]:
    """Text as `text`, anything else as `base64`."""
    encoding, text = ("utf-8", value) if isinstance(value, str) else _readable(value)
    return {"text" if encoding == "utf-8" else "base64": text}


@click.command()
@click.option("--dry-run", is_flag=True, help="Only count; delete nothing.")
@database
@as_json
def prune(dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Delete final records past their retention. Workers also do this every minute."""
    settings = load(**flags)
    dsn = need_dsn(settings)
    with click.progressbar(length=1, label="pruning", file=sys.stderr) as bar:

        def progress(done: int, blocks: int) -> None:
            bar.length = blocks
            bar.update(done - bar.pos)

        try:
            pruned = asyncio.run(prune_once(dsn, settings.schema, dry_run=dry_run, progress=progress))
        except psycopg.Error as error:
            if (cause := misconfigured(error, settings.schema)) is not None:
                raise cause from error
            raise
    if as_json:
        print_json({"pruned": pruned, "dry_run": dry_run})
    elif pruned is None:
        click.echo("another process is pruning this schema", err=True)
    else:
        click.echo(f"{'would prune' if dry_run else 'pruned'} {pruned} records")
