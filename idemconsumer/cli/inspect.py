"""`check`: every mistake that can be found before the first message."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import click

from idemconsumer import certificates
from idemconsumer.admin.dead_letters import Admin
from idemconsumer.admin.doctor import examine_secrets
from idemconsumer.admin.orphans import find_orphans, find_unawaited
from idemconsumer.app.app import App
from idemconsumer.brokers.connecting import connect
from idemconsumer.cli.banner import database_name, retention, sources
from idemconsumer.cli.options import as_json, database, need_dsn, print_json
from idemconsumer.cli.target import load_app
from idemconsumer.errors import ConfigurationError, Denied, IdemConsumerError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.handlers.scheduling import check_slots
from idemconsumer.message.message import Subscription
from idemconsumer.message.sources import split_source
from idemconsumer.ports.broker import Broker, Finding
from idemconsumer.process.child import Exit
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings, load
from idemconsumer.stores.checks import check_database, is_exposed
from idemconsumer.stores.migrations import status
from idemconsumer.stores.server import advice, durability, narrowest
from idemconsumer.worker.capacity import most_connections, resting_connections
from idemconsumer.worker.sources import Sharing, source_findings
from idemconsumer.worker.worker import longest_run, shortest_lease

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("error", "red")}


@click.command()
@click.argument("target", metavar="MODULE:APP")
@click.option("--handlers", metavar="A,B", help="Check only these handlers of the app.")
@database
@as_json
def check(target: str, as_json: bool, **flags: Any) -> None:
    """Check the app, the database and the brokers.

    Exit code 0: no errors; there may be warnings. 1: at least one error. 2: wrong usage, or the app cannot be imported.

    Only reads. It finds a database that is unreachable, not migrated, closed to the role or set to lose commits;
    sources that do not exist; brokers that drop messages after too many deliveries, or keep messages longer than their
    records are kept; key secrets that differ from the schema's, or can be removed; and destinations in
    App(publishes=[…]) that do not exist.
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
    if not handlers and app.fronted:
        yield Finding("ok", app.name, "has a front door and no handlers, so web processes run it, and no workers")
    elif not handlers:
        text = "has no handlers; decorate a function with @app.idempotent_handler(…)"
        yield Finding("error", app.name, f"{text}, or name a module that makes its Idempotency too")
    for handler in handlers:
        text = f"{', '.join(sources(handler))}; key: {handler.key_rule}; records kept for {retention(handler)}"
        yield Finding("ok", f"handler {handler.name}", text)
        for path in handler.plan.unsure_paths:
            text = f"its payload's type does not show that {path!r} is always there; it is looked up in each message"
            yield Finding("warning", f"handler {handler.name}", text)
    for schedule in app.schedules(handlers):
        now = datetime.now(UTC)
        try:
            check_slots(schedule, handlers, now)
        except ConfigurationError as error:
            yield Finding("error", app.name, str(error))
            continue
        text = f"{schedule.rule}, starts {schedule.handler}, catch_up {schedule.catch_up}"
        following = next(schedule.slots(now), None)
        yield Finding("ok", f"schedule {schedule.name}", f"{text}; next {following or 'never'}")
    for finding in _leases(handlers):
        yield finding
    for finding in await _database(handlers, settings):
        yield finding
    for finding in await _secrets(settings):
        yield finding
    for finding in await _redis(settings):
        yield finding
    for finding in _certificates(settings):
        yield finding
    for finding in await _retries(handlers, settings):
        yield finding
    for finding in await _unforwarded(app, settings):
        yield finding
    for finding in [*await _orphans(app, settings), *await _signals(app, settings)]:
        yield finding
    brokers: dict[str, Broker] = {}
    try:
        for handler in handlers:
            for subscription in handler.subscriptions:
                for finding in await _source(handler, subscription, brokers, settings):
                    yield finding
        letters = [handler.options.dead_letter_to for handler in handlers]
        for destination in dict.fromkeys((*app.publishes, *filter(None, letters))):
            yield await _destination(destination, brokers, settings)
        for scheme, broker in brokers.items():
            together = [each for handler in handlers for each in handler.subscriptions if each.scheme == scheme]
            for finding in await broker.check_together(together) if isinstance(broker, Sharing) else ():
                yield finding
        for finding in await _connections(handlers, settings):
            yield finding
    finally:
        for broker in brokers.values():
            await broker.close()


async def _connections(handlers: Sequence[BoundHandler], settings: Settings) -> list[Finding]:
    """R45. Of web processes nobody knows here how many there are."""
    subject, most = f"database {database_name(settings.dsn)}", most_connections(handlers, settings)
    kind, processes, who = "worker", settings.workers, f"{settings.workers} workers"
    if not handlers:  # H56
        kind, processes, who = "web", 1, "a web process"
    text = (
        f"each {kind} process opens at most {most} connections, and a few more for a moment; with nothing to do it "
        f"holds {resting_connections(handlers)}"
    )
    try:
        limit = await narrowest(need_dsn(settings))
    except IdemConsumerError:
        return [Finding("ok", subject, text)]  # said of the database already
    if limit.most is None:
        return [Finding("ok", subject, f"{text}; {limit.what} cannot be seen, and should be as much for each process")]
    if (needed := most * processes) <= limit.most:
        return [Finding("ok", subject, f"{text}; there is room for {limit.most // most} ({limit.what}: {limit.most})")]
    few = (
        f"{who} may need {needed} connections, and there are {limit.most} ({limit.what}); raise "
        f"that, or lower {'`workers` or ' if handlers else ''}`concurrency`"
    )
    return [Finding("ok", subject, text), Finding("warning", subject, few)]


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


async def _database(handlers: Sequence[BoundHandler], settings: Settings) -> list[Finding]:
    subject, reads = f"database {database_name(settings.dsn)}", ""
    try:
        dsn = need_dsn(settings)
        leased = [handler for handler in handlers if handler.leased]
        lease = shortest_lease(leased) if leased else None
        try:
            await check_database(
                dsn,
                settings.schema,
                longest_run=longest_run(handlers),
                beside=lease,
                require_standby=settings.require_synchronous_standby,
                kind="worker" if handlers else "front-door",
            )
            if leased:
                await check_database(dsn, settings.schema, longest_run=longest_run(leased), lease=lease)
        except Denied as denied:
            if not denied.reads:
                raise
            reads = "; this role may only read, so what else workers need is seen as their role"
        await asyncio.to_thread(status, dsn, settings.schema)  # raises for a migration that is not the one applied
        exposed = await is_exposed(dsn)
        durable = await durability(dsn)
        advised = await advice(dsn, settings.schema)
    except IdemConsumerError as error:
        return [Finding("error", subject, error_text(error).removeprefix("database: "))]
    found = [Finding("ok", subject, f"reachable, schema {settings.schema} is up to date, {durable.commits}{reads}")]
    if durable.warning is not None:
        found.append(Finding("warning", subject, durable.warning))
    found += [Finding("warning", subject, text) for text in advised]
    if exposed:
        text = "reached over a network without TLS; add sslmode=verify-full to the address, and sslrootcert"
        found.append(Finding("warning", subject, text))
    return found


async def _secrets(settings: Settings) -> list[Finding]:
    """Whether keys are hashed as in the database, and whether a secret can go (R39)."""
    try:
        return await examine_secrets(need_dsn(settings), settings.schema)
    except IdemConsumerError:
        return []  # said of the database already


async def _redis(settings: Settings) -> list[Finding]:
    """What the requests of an app are kept in, or copied to (H28)."""
    if settings.redis is None:
        return []
    try:
        from idemconsumer.stores.redis.checks import examine

        return [
            Finding("ok", "redis", "reachable"),
            *(Finding("warning", "redis", text) for text in await examine(settings.redis, settings.redis_replicas)),
        ]
    except IdemConsumerError as error:
        return [Finding("error", "redis", error_text(error).removeprefix("redis: "))]


def _certificates(settings: Settings) -> list[Finding]:
    """Until when ours are valid (K27)."""
    found = list[Finding]()
    for server, file in certificates.ours(settings):
        if (left := certificates.days_left(file)) is None:
            found.append(Finding("warning", f"certificate for {server}", f"{file} cannot be read as a PEM certificate"))
            continue
        days, until = left
        level: Literal["ok", "warning", "error"] = "ok" if days * 86_400 > certificates.SOON else "warning"
        text = f"{file} is valid for {days:.0f} days, until {until}"
        if days <= 0:
            level, text = "error", f"{file} expired on {until}; renew that file"
        found.append(Finding(level, f"certificate for {server}", text))
    return found


async def _retries(handlers: Sequence[BoundHandler], settings: Settings) -> list[Finding]:
    """What is stored until its next attempt (D18)."""
    try:
        delayed = {each.name: each for each in await Admin(need_dsn(settings), settings.schema).delayed()}
    except IdemConsumerError:
        return []  # said of the database already
    return [
        Finding(
            "ok",
            f"handler {handler.name}",
            f"{waiting.messages} messages wait for their next attempt, the first one until {waiting.due_at:%F %T %Z}",
        )
        for handler in handlers
        if (waiting := delayed.get(handler.retry_source.partition(":")[2])) is not None
    ]


async def _unforwarded(app: App, settings: Settings) -> list[Finding]:
    """Dead letters that are not where `dead_letter_to` says (O19)."""
    try:
        found = await Admin(need_dsn(settings), settings.schema).unforwarded(app.name)
    except IdemConsumerError:
        return []  # said of the database already
    return [
        Finding(
            "warning" if each.tries > 1 else "ok",
            f"handler {each.handler}",
            f"{each.letters} dead letters are to be forwarded, after up to {each.tries} tries",
        )
        for each in found
    ]


async def _orphans(app: App, settings: Settings) -> list[Finding]:
    """Sagas that nobody continues (L31)."""
    try:
        found = await find_orphans(need_dsn(settings), settings.schema, app.name, app.sagas)
    except IdemConsumerError:
        return []  # said of the database
    return [Finding("warning", f"sagas of {each.waiting.app}/{each.waiting.handler}", each.text) for each in found]


async def _signals(app: App, settings: Settings) -> list[Finding]:
    """Signals that no saga waits for (L81)."""
    try:
        found = await find_unawaited(need_dsn(settings), settings.schema, app.name, app.sagas)
    except IdemConsumerError:
        return []  # said of the database
    return [
        Finding(
            "warning" if each.wrong else "ok",
            f"signals of {each.app}/{each.handler}",
            f"{each.signals} named {each.name!r} have been stored since {each.first_at:%F %T %Z}, {each.text}",
        )
        for each in found
    ]


async def _source(
    handler: BoundHandler, subscription: Subscription, brokers: dict[str, Broker], settings: Settings
) -> Sequence[Finding]:
    try:
        return await source_findings(handler, subscription, _broker(subscription.scheme, brokers, settings))
    except IdemConsumerError as error:
        return [Finding("error", subscription.source, error_text(error))]


async def _destination(destination: str, brokers: dict[str, Broker], settings: Settings) -> Finding:
    """Whether it exists. Whether it takes what is published, only publishing can tell."""
    scheme, name = split_source(destination)
    try:
        await _broker(scheme, brokers, settings).check_destination(name)
    except IdemConsumerError as error:
        return Finding("error", destination, f"cannot be published to: {error_text(error)}")
    return Finding("ok", destination, "can be published to")


def _broker(scheme: str, brokers: dict[str, Broker], settings: Settings) -> Broker:
    if scheme not in brokers:
        brokers[scheme] = connect(scheme, settings)
    return brokers[scheme]
