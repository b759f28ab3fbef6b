"""`check`: finds every mistake that can be found before the first message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, Literal

from click import argument, option

from idemconsumer import certificates
from idemconsumer.admin.dead_letters import Admin
from idemconsumer.admin.doctor import examine_secrets
from idemconsumer.admin.orphans import find_orphans, find_unawaited
from idemconsumer.app.app import App
from idemconsumer.brokers.adapters import connect
from idemconsumer.cli.doctor_verb import leveled
from idemconsumer.cli.target import database_name, load_app, retention, sources
from idemconsumer.cli.verbs import Given, Output, need_dsn, verb
from idemconsumer.errors import ConfigurationError, Denied, IdemConsumerError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.handlers.scheduling import check_slots
from idemconsumer.message.sources import split_source
from idemconsumer.ports.broker import Broker, Finding
from idemconsumer.process.child import Exit
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings
from idemconsumer.stores.checks import check_database, is_exposed
from idemconsumer.stores.migrations import status
from idemconsumer.stores.server import advice, durability, narrowest
from idemconsumer.worker.capacity import most_connections, resting_connections
from idemconsumer.worker.source_findings import SharedSource, source_findings
from idemconsumer.worker.worker import longest_run, shortest_lease

_FORWARDING: Final = 60.0  # seconds that dead letters may wait to be forwarded before there is a warning


@verb(
    "check",
    argument("target", metavar="MODULE:APP"),
    option("--handlers", metavar="A,B", help="Check only these handlers of the app."),
)
def check(given: Given) -> Output:
    """Check the app, the database and the brokers.

    Exit code 0: no errors; there may be warnings. 1: at least one error. 2: wrong usage, or the app cannot be imported.

    Only reads. It finds a database that is unreachable or not migrated, in which the role lacks rights, or which is
    configured so that it can lose commits; sources that do not exist; brokers that drop messages after too many
    deliveries, or keep messages longer than their records are kept; key secrets that differ from the schema's, or can
    be removed; and destinations in App(publishes=[…]) that do not exist.
    """
    settings = given.settings
    app = load_app(given.target)

    async def collect() -> list[Finding]:
        return [finding async for finding in findings(app, settings)]

    found = asyncio.run(collect())
    wrong = any(each.level == "error" for each in found)
    return Output(found, leveled(found), code=Exit.ERROR if wrong else Exit.DONE)


class Checked:
    """The app, the settings and the connections that the checks use."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app = app
        self.handlers: Sequence[BoundHandler] = app.bound_handlers(settings)
        self.settings = settings
        self.brokers: dict[str, Broker] = {}

    @property
    def database(self) -> tuple[str, str]:
        return need_dsn(self.settings), self.settings.schema

    def broker(self, scheme: str) -> Broker:
        """One broker per scheme, kept so that it is closed at the end."""
        if scheme not in self.brokers:
            self.brokers[scheme] = connect(scheme, self.settings)
        return self.brokers[scheme]


async def findings(app: App, settings: Settings) -> AsyncIterator[Finding]:
    """All findings, in the order in which to fix them."""
    of = Checked(app, settings)
    for finding in (*_handlers(of), *_schedules(of), *_leases(of)):
        yield finding
    for look in _LOOKS:
        with suppress(IdemConsumerError):  # the check of the database has reported this already
            async for finding in look(of):
                yield finding
    try:
        for look in (_sources, _destinations, _together, _connections):
            async for finding in look(of):
                yield finding
    finally:
        for broker in of.brokers.values():
            await broker.close()


def _handlers(of: Checked) -> Iterator[Finding]:
    if not of.handlers and of.app.fronted:
        yield Finding("ok", of.app.name, "has a front door and no handlers, so web processes run it, and no workers")
    elif not of.handlers:
        text = "has no handlers; decorate a function with @app.idempotent_handler(…)"
        yield Finding("error", of.app.name, f"{text}, or name a module that makes its Idempotency too")
    for handler in of.handlers:
        text = f"{', '.join(sources(handler))}; key: {handler.key_rule}; records kept for {retention(handler)}"
        yield Finding("ok", f"handler {handler.name}", text)
        for path in handler.plan.unsure_paths:
            text = f"its payload's type does not show that {path!r} is always there; it is looked up in each message"
            yield Finding("warning", f"handler {handler.name}", text)


def _schedules(of: Checked) -> Iterator[Finding]:
    for schedule in of.app.schedules(of.handlers):
        now = datetime.now(UTC)
        try:
            check_slots(schedule, of.handlers, now)
        except ConfigurationError as error:
            yield Finding("error", of.app.name, str(error))
            continue
        text = f"{schedule.rule}, starts {schedule.handler}, catch_up {schedule.catch_up}"
        following = next(schedule.slots(now), None)
        yield Finding("ok", f"schedule {schedule.name}", f"{text}; next {following or 'never'}")


def _leases(of: Checked) -> Iterator[Finding]:
    """A worker has one lease for all its sagas. It cuts off transactions of sagas whose `timeout` is longer."""
    leased = [handler for handler in of.handlers if handler.leased]
    shortest = min(leased, key=lambda handler: handler.options.lease, default=None)
    for handler in leased:
        if shortest is not None and handler.options.timeout > (lease := shortest.options.lease):
            yield Finding(
                "warning",
                f"handler {handler.name}",
                f"its steps may take {handler.options.timeout:g} s (timeout), but those with saga.tx only {lease:g} s, "
                f"the shortest lease of the worker's sagas (that of {shortest.name}); "
                f'write timeout="{lease:g}s", or raise that lease',
            )


async def _database(of: Checked) -> AsyncIterator[Finding]:
    handlers, settings, subject, reads = of.handlers, of.settings, f"database {database_name(of.settings.dsn)}", ""
    try:
        dsn, schema = of.database
        leased = [handler for handler in handlers if handler.leased]
        lease = shortest_lease(leased) if leased else None
        try:
            await check_database(
                dsn,
                schema,
                longest_run=longest_run(handlers),
                beside=lease,
                require_standby=settings.require_synchronous_standby,
                kind="worker" if handlers else "front-door",
            )
            if leased:
                await check_database(dsn, schema, longest_run=longest_run(leased), lease=lease)
        except Denied as denied:
            if not denied.reads:
                raise
            reads = "; this role may only read; run `check` as the workers' role to check the other rights"
        await asyncio.to_thread(status, dsn, schema)  # raises if an applied migration differs from this version's file
        exposed = await is_exposed(dsn)
        durable = await durability(dsn)
        advised = await advice(dsn, schema)
    except IdemConsumerError as error:
        yield Finding("error", subject, error_text(error).removeprefix("database: "))
        return
    yield Finding("ok", subject, f"reachable, schema {schema} is up to date, {durable.commits}{reads}")
    open_text = "reached over a network without TLS; add sslmode=verify-full to the address, and sslrootcert"
    for text in filter(None, (durable.warning, *advised, open_text if exposed else None)):
        yield Finding("warning", subject, text)


async def _secrets(of: Checked) -> AsyncIterator[Finding]:
    """Whether this process hashes keys as the database does, and whether a secret can be removed (R39)."""
    for finding in await examine_secrets(*of.database):
        yield finding


async def _redis(of: Checked) -> AsyncIterator[Finding]:
    """The Redis in which an app's requests are kept, or to which they are copied (H28)."""
    if of.settings.redis is None:
        return
    try:
        from idemconsumer.stores.redis.redis_checks import examine

        texts = await examine(of.settings.redis, of.settings.redis_replicas)
    except IdemConsumerError as error:
        yield Finding("error", "redis", error_text(error).removeprefix("redis: "))
        return
    yield Finding("ok", "redis", "reachable")
    for text in texts:
        yield Finding("warning", "redis", text)


async def _certificates(of: Checked) -> AsyncIterator[Finding]:
    """How long the client certificates of this process are still valid (K27)."""
    for server, file in certificates.ours(of.settings):
        level: Literal["ok", "warning", "error"] = "warning"
        text = f"{file} cannot be read as a PEM certificate"
        if (left := certificates.days_left(file)) is not None:
            days, until = left
            level = "ok" if days * 86_400 > certificates.SOON else "warning"
            text = f"{file} is valid for {days:.0f} days, until {until}"
            if days <= 0:
                level, text = "error", f"{file} expired on {until}; renew that file"
        yield Finding(level, f"certificate for {server}", text)


async def _retries(of: Checked) -> AsyncIterator[Finding]:
    """Messages that are stored until their next attempt (D18)."""
    delayed = {each.name: each for each in await Admin(*of.database).delayed()}
    for handler in of.handlers:
        if (waiting := delayed.get(handler.retry_source.partition(":")[2])) is not None:
            until = f"{waiting.due_at:%F %T %Z}"
            text = f"{waiting.messages} messages wait for their next attempt, the first one until {until}"
            yield Finding("ok", f"handler {handler.name}", text)


async def _unforwarded(of: Checked) -> AsyncIterator[Finding]:
    """Dead letters that have not been forwarded to `dead_letter_to` yet (O19)."""
    for each in await Admin(*of.database).unforwarded(of.app.name):
        text = f"{each.letters} dead letters are to be forwarded, the first one for {each.seconds:.0f} s"
        yield Finding("warning" if each.seconds > _FORWARDING else "ok", f"handler {each.handler}", text)


async def _orphans(of: Checked) -> AsyncIterator[Finding]:
    """Sagas that no worker will continue (L31)."""
    for each in await find_orphans(*of.database, of.app.name, of.app.sagas):
        yield Finding("warning", f"sagas of {each.waiting.app}/{each.waiting.handler}", each.text)


async def _signals(of: Checked) -> AsyncIterator[Finding]:
    """Signals that no saga waits for (L81)."""
    for each in await find_unawaited(*of.database, of.app.name, of.app.sagas):
        text = f"{each.signals} named {each.name!r} have been stored since {each.first_at:%F %T %Z}, {each.text}"
        yield Finding("warning" if each.wrong else "ok", f"signals of {each.app}/{each.handler}", text)


_LOOKS: Final = (_database, _secrets, _redis, _certificates, _retries, _unforwarded, _orphans, _signals)


async def _sources(of: Checked) -> AsyncIterator[Finding]:
    for handler in of.handlers:
        for subscription in handler.subscriptions:
            try:
                for finding in await source_findings(handler, subscription, of.broker(subscription.scheme)):
                    yield finding
            except IdemConsumerError as error:
                yield Finding("error", subscription.source, error_text(error))


async def _destinations(of: Checked) -> AsyncIterator[Finding]:
    """Whether the destinations exist. Only publishing can tell whether one accepts a message."""
    letters = [handler.options.dead_letter_to for handler in of.handlers]
    for destination in dict.fromkeys((*of.app.publishes, *filter(None, letters))):
        scheme, name = split_source(destination)
        try:
            await of.broker(scheme).check_destination(name)
        except IdemConsumerError as error:
            yield Finding("error", destination, f"cannot be published to: {error_text(error)}")
        else:
            yield Finding("ok", destination, "can be published to")


async def _together(of: Checked) -> AsyncIterator[Finding]:
    for scheme, broker in of.brokers.items():
        together = [each for handler in of.handlers for each in handler.subscriptions if each.scheme == scheme]
        for finding in await broker.check_together(together) if isinstance(broker, SharedSource) else ():
            yield finding


async def _connections(of: Checked) -> AsyncIterator[Finding]:
    """R45: whether the connection limit suffices. The number of web processes is not known here."""
    subject, most = f"database {database_name(of.settings.dsn)}", most_connections(of.handlers, of.settings)
    kind, processes, who = "worker", of.settings.workers, f"{of.settings.workers} workers"
    if not of.handlers:  # H56
        kind, processes, who = "web", 1, "a web process"
    text = (
        f"each {kind} process opens at most {most} connections, and a few more for a moment; with nothing to do it "
        f"holds {resting_connections(of.handlers)}"
    )
    limit = None
    with suppress(IdemConsumerError):  # the check of the database has reported this already
        limit = await narrowest(need_dsn(of.settings))
    if limit is None:
        yield Finding("ok", subject, text)
    elif limit.most is None:
        unread = f"{limit.what} cannot be read; it should allow this number for each process"
        yield Finding("ok", subject, f"{text}; {unread}")
    elif (needed := most * processes) <= limit.most:
        yield Finding("ok", subject, f"{text}; there is room for {limit.most // most} ({limit.what}: {limit.most})")
    else:
        yield Finding("ok", subject, text)
        few = f"{who} may need {needed} connections, but only {limit.most} are allowed ({limit.what})"
        less = f"raise that, or lower {'`workers` or ' if of.handlers else ''}`concurrency`"
        yield Finding("warning", subject, f"{few}; {less}")
