"""`publish`, `prune`, `skip` and `kafka`: messages at their brokers, and their records and offsets in the database."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import click
import psycopg
from click import argument, option

from idemconsumer.admin.stops import Stops
from idemconsumer.brokers.adapters import check_delay, connect, destination
from idemconsumer.brokers.sendable import check_sendable
from idemconsumer.cli.flags import count, database, deciding, uncounted
from idemconsumer.cli.layout import listed
from idemconsumer.cli.verbs import Given, Output, Verbs, verb
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from idemconsumer.sql.queries import misconfigured, takes_no_writes
from idemconsumer.worker.retention import prune_once

_BATCH = 500  # messages per step of the progress bar


@verb(
    "publish",
    argument("source", metavar="SOURCE"),
    argument("payload", required=False),
    option("--file", "lines", type=click.File("rb"), help="One message per line; - is standard input."),
    option(
        "--key",
        help="Message id; in Kafka the record key. An SQS FIFO queue drops a second message with the same id.",
    ),
    option("--header", "headers", multiple=True, metavar="K=V", help="Can be given several times."),
    count("--times", "Publish each message N times.", 1, most=None),
    option("--delay", metavar="TIME", default="0s", help="Delay the arrival, e.g. 10m; postgres: and sqs: only."),
    ends=database,
)
def publish(given: Given) -> Output:
    """Publish PAYLOAD, or the lines of a file, to SOURCE.

    SOURCE is kafka:topic, rabbitmq:queue, rabbitmq:exchange/routing.key, sqs:queue (a name, ARN or URL) or
    postgres:queue. A RabbitMQ queue with a / in its name is rabbitmq:/name. The command returns once the broker has
    confirmed the messages. The payload is sent unchanged.
    """
    if (given.payload is None) == (given.lines is None):
        raise click.UsageError("give either PAYLOAD or --file")
    stripped = (line.strip() for line in given.lines or ())
    bodies = [*filter(None, stripped)] if given.payload is None else [given.payload.encode()]
    headers, delay = dict(map(_pair, given.headers)), parse_duration(given.delay)
    messages = [Outgoing(body, headers, given.key, delay) for body in bodies for _ in range(given.times)]
    asyncio.run(_publish(given.source, messages, given.settings))
    return Output(text=f"published {len(messages)} to {given.source}")


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


def _pair(header: str) -> tuple[str, str]:
    name, equals, value = header.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--header {header!r}: write NAME=VALUE")
    return name, value


@verb("prune", uncounted)
def prune(given: Given) -> Output:
    """Delete final records past their retention. Workers also do this every minute."""
    dsn, schema = given.database
    with click.progressbar(length=1, label="pruning", file=sys.stderr) as bar:

        def progress(done: int, blocks: int) -> None:
            bar.length = blocks
            bar.update(done - bar.pos)

        try:
            pruned = asyncio.run(prune_once(dsn, schema, dry_run=given.dry_run, progress=progress))
        except psycopg.Error as error:
            if (cause := misconfigured(error, schema) or takes_no_writes(error)) is not None:
                raise cause from error
            raise
    answer = {"pruned": pruned, "dry_run": given.dry_run}
    if pruned is None:
        return Output(answer, notes=["another process is pruning this schema"])
    return Output(answer, f"{'would prune' if given.dry_run else 'pruned'} {pruned} records")


@verb(
    "skip",
    argument("place", metavar="[kafka:TOPIC/PARTITION@OFFSET]", required=False),
    option("--group", help="The consumer group, if several have stopped at that place."),
    deciding,
)
async def skip(given: Given) -> Output:
    """Skip a Kafka record or batch that workers cannot read: it is stored as a dead letter, and its partition goes on.

    A record or batch with a wrong checksum, compression or structure stops its partition; the worker logs its place
    each minute. Workers notice the decision within seconds. Without an argument, list the places where partitions have
    stopped.
    """
    stops = Stops(*given.database)
    if given.place is not None:
        stop = await stops.skip(given.place, given.group, by=given.by)
        return Output(stop, f"{stop.place} will be skipped up to {stop.next - 1} in group {stop.group}")
    found = await stops.stopped(given.group)
    rows = ((each.place, each.group, each.since, each.seen_at, each.error) for each in found)
    return Output(found, listed("place, group, since, last seen, error", rows, "no partition is blocked"))


kafka = Verbs("kafka", help="Kafka: where a consumer group begins to read.")


@kafka.verb(
    "reset",
    argument("place", metavar="kafka:TOPIC[/PARTITION]"),
    option("--group", required=True, help="The consumer group."),
    option("--to", required=True, metavar="WHERE", help="earliest, latest, an offset, or 2026-01-31T12:00+00:00."),
    deciding,
)
async def reset(given: Given) -> Output:
    """Set the position from which a consumer group continues: its offsets in Kafka and in the database.

    None of its workers may run: a group with live members is refused, and so is an offset that the log does not have. A
    record that is read again is a duplicate as long as its key is on record. Deleting or losing the offsets in Kafka
    alone changes nothing, since the database still has them.
    """
    from idemconsumer.admin import resets  # an optional driver

    dsn, _ = given.database
    moved = await resets.reset(dsn, given.settings, given.place, given.group, given.to, by=given.by)
    rows = (
        (f"kafka:{each.topic}/{each.partition}", "none" if each.before is None else each.before, each.offset)
        for each in moved
    )
    return Output(moved, listed("place, before, now", rows))
