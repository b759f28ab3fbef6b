"""`publish` and `prune`: messages, and what is left of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import click
import psycopg

from idemconsumer.brokers.connecting import check_delay, connect, destination
from idemconsumer.brokers.sendable import check_sendable
from idemconsumer.cli.options import as_json, database, need_dsn, print_json
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings, load
from idemconsumer.sql.queries import misconfigured, takes_no_writes
from idemconsumer.worker.retention import prune_once

_BATCH = 500  # messages between two steps of the progress bar


@click.command()
@click.argument("source", metavar="SOURCE")
@click.argument("payload", required=False)
@click.option("--file", "lines", type=click.File("rb"), help="One message per line; - is standard input.")
@click.option("--key", help="Message id; in Kafka the record key. SQS FIFO queues drop a second message with it.")
@click.option("--header", "headers", multiple=True, metavar="K=V", help="Can be given several times.")
@click.option(
    "--times", type=click.IntRange(1), default=1, metavar="N", help="Publish each message N times.  [default: 1]"
)
@click.option("--delay", metavar="TIME", default="0s", help="Delay the arrival, e.g. 10m; postgres: and sqs: only.")
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
    for message in messages:
        check_sendable(scheme, name, message, settings.max_message_bytes)
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
            if (cause := misconfigured(error, settings.schema) or takes_no_writes(error)) is not None:
                raise cause from error
            raise
    if as_json:
        print_json({"pruned": pruned, "dry_run": dry_run})
    elif pruned is None:
        click.echo("another process is pruning this schema", err=True)
    else:
        click.echo(f"{'would prune' if dry_run else 'pruned'} {pruned} records")
