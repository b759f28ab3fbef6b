"""`check`: every mistake that can be found before the first message."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

import click

from idemconsumer.app.app import App
from idemconsumer.brokers.connecting import connect
from idemconsumer.cli.banner import database_name, retention, sources
from idemconsumer.cli.options import as_json, database, need_dsn, print_json
from idemconsumer.cli.target import load_app
from idemconsumer.errors import IdemConsumerError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Broker, Finding
from idemconsumer.process.child import Exit
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings, load
from idemconsumer.stores.checks import check_database, is_exposed
from idemconsumer.stores.migrations import status

_SPARE_DELIVERIES = 10
_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("error", "red")}


@runtime_checkable
class Retaining(Protocol):
    """A broker that keeps messages for a known time, and could deliver them again within it."""

    async def retention_seconds(self, subscription: Subscription) -> float | None: ...


@runtime_checkable
class Redriving(Protocol):
    """A broker that may take a message away after too many deliveries."""

    async def max_receives(self, subscription: Subscription) -> int | None: ...


@click.command()
@click.argument("target", metavar="MODULE:APP")
@click.option("--handlers", metavar="A,B", help="Check only these handlers of the app.")
@database
@as_json
def check(target: str, as_json: bool, **flags: Any) -> None:
    """Check the app, the database and the brokers.

    Exit code 0: no errors; there may be warnings. 1: at least one error. 2: wrong usage, or the app cannot be
    imported.

    Only reads. It finds a database that is unreachable, not migrated, closed to the role or set to lose commits;
    sources that do not exist; and brokers that drop messages after too many deliveries, or keep messages longer than
    their records are kept.
    """
    settings = load(**flags)
    app = load_app(target)

    async def collect() -> list[Finding]:
        return [finding async for finding in findings(app, settings)]

    found = asyncio.run(collect())
    if as_json:
        print_json(found)
    else:
        for finding in found:
            mark, color = _MARKS[finding.level]
            click.echo(f"{click.style(mark.ljust(8), fg=color)} {finding.subject}: {finding.text}")
    if any(finding.level == "error" for finding in found):
        sys.exit(Exit.ERROR)


async def findings(app: App, settings: Settings) -> AsyncIterator[Finding]:
    """All findings, in the order in which to repair them."""
    handlers = app.bound_handlers(settings)
    if not handlers:
        yield Finding("error", app.name, "has no handlers; decorate a function with @app.idempotent_handler(…)")
    for handler in handlers:
        text = f"{', '.join(sources(handler))}; key: {handler.key_rule}; records kept for {retention(handler)}"
        yield Finding("ok", f"handler {handler.name}", text)
    for finding in _leases(handlers):
        yield finding
    for finding in await _database(settings):
        yield finding
    brokers: dict[str, Broker] = {}
    try:
        for handler in handlers:
            for subscription in handler.subscriptions:
                for finding in await _source(handler, subscription, brokers, settings):
                    yield finding
    finally:
        for broker in brokers.values():
            await broker.close()


def _leases(handlers: Sequence[BoundHandler]) -> list[Finding]:
    """One lease holds for all sagas of a worker, and cuts off transactions that their timeouts would allow."""
    leased = [handler for handler in handlers if handler.leased]
    shortest = min(leased, key=lambda handler: handler.options.lease, default=None)
    if shortest is None:
        return []
    lease = shortest.options.lease
    return [
        Finding(
            "warning",
            f"handler {handler.name}",
            f"its steps may take {handler.options.timeout:g} s (timeout), but those with saga.tx only {lease:g} s, "
            f"the shortest lease of the worker's sagas (that of {shortest.name}); "
            f'write timeout="{lease:g}s", or raise that lease',
        )
        for handler in leased
        if handler.options.timeout > lease
    ]


async def _database(settings: Settings) -> list[Finding]:
    subject = f"database {database_name(settings.dsn)}"
    try:
        dsn = need_dsn(settings)
        await check_database(dsn, settings.schema)
        await asyncio.to_thread(status, dsn, settings.schema)  # raises for a migration that is not the one applied
        exposed = await is_exposed(dsn)
    except IdemConsumerError as error:
        return [Finding("error", subject, error_text(error).removeprefix("database: "))]
    found = [Finding("ok", subject, f"reachable, schema {settings.schema} is up to date, commits are durable")]
    if exposed:
        text = "reached over a network without TLS; add sslmode=verify-full to the address, and sslrootcert"
        found.append(Finding("warning", subject, text))
    return found


async def _source(
    handler: BoundHandler, subscription: Subscription, brokers: dict[str, Broker], settings: Settings
) -> Sequence[Finding]:
    try:
        if subscription.scheme not in brokers:
            brokers[subscription.scheme] = connect(subscription.scheme, settings)
        broker = brokers[subscription.scheme]
        found = list(await broker.check(subscription))
        if isinstance(broker, Retaining) and all(finding.level != "error" for finding in found):
            found += _retention(handler, subscription, await broker.retention_seconds(subscription))
        if isinstance(broker, Redriving) and all(finding.level != "error" for finding in found):
            found += _redrive(handler, subscription, await broker.max_receives(subscription))
        return found
    except IdemConsumerError as error:
        return [Finding("error", subscription.source, error_text(error))]


def _retention(handler: BoundHandler, subscription: Subscription, kept: float | None) -> list[Finding]:
    """A message that outlives its record would count as new when it is redelivered."""
    if kept is None or math.isinf(kept) or kept <= handler.options.retain:
        return []
    days = math.ceil(kept / 86_400)
    text = (
        f"keeps messages for {kept / 86_400:g} days, but records are kept for {retention(handler)}; "
        f'write retain="{days}d"'
    )
    return [Finding("error", subscription.source, text)]


def _redrive(handler: BoundHandler, subscription: Subscription, most: int | None) -> list[Finding]:
    """Each worker that dies or drains costs the messages that it had fetched one delivery, so some must be spare."""
    needed = handler.options.max_attempts + _SPARE_DELIVERIES
    if most is None:
        return []
    if most >= needed:
        return [Finding("ok", subscription.source, f"its redrive policy removes a message after {most} receives")]
    text = (
        f"its redrive policy removes a message after {most} receives, perhaps before {handler.name} is done with it "
        f"(max_attempts={handler.options.max_attempts}, and each restart counts); set maxReceiveCount to {needed} "
        "or more"
    )
    return [Finding("warning", subscription.source, text)]
