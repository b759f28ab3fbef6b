"""Present and future problems, as far as the database shows them, and what to do about each. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Final

from idemconsumer.admin.control import UNRECORDED, WorkerLine
from idemconsumer.admin.orphans import Sagas, find_orphans
from idemconsumer.admin.sender import Sender, Statements
from idemconsumer.admin.status import MOST, Status, in_words, status
from idemconsumer.errors import ConfigurationError
from idemconsumer.hashing import HASHING
from idemconsumer.message import keys
from idemconsumer.message.sources import retry_source
from idemconsumer.ports.broker import Finding
from idemconsumer.rules.held_up import HeldUp
from idemconsumer.rules.request_keys import is_route
from idemconsumer.stores import migrations
from idemconsumer.stores.agreed_hashing import learn_hashing

LONG: Final = 300.0  # seconds; a transaction that is open for longer is reported
_OVERDUE: Final = 60.0  # seconds
_NOT_VACUUMED: Final = 600.0  # seconds
_DEAD: Final = 10_000  # rows
_LARGE: Final = 16 * 1024 * 1024  # bytes
_TIMES: Final = 3  # a table that is this many times as large as its rows is reported
_UNPRUNED: Final = 172_800.0  # seconds
_TO_DO: Final[Mapping[HeldUp, str]] = {
    HeldUp.PAUSED: "`idemconsumer resume {handler} --app {app}` lets it go on",
    HeldUp.DATABASE_AWAY: "start it, make room, or check the network; nothing is lost meanwhile",
    HeldUp.SOURCE_AWAY: "the log of its workers says why; nothing is lost meanwhile",
    HeldUp.LOCKED: (
        "if that transaction is not needed, end it (SELECT pg_terminate_backend(pid)): waiting messages then run"
    ),
    HeldUp.FAILS: "fix what it depends on, or deploy; meanwhile it tries one at a time, and the log has the errors",
}


async def diagnose(dsn: str, schema: str, app: str | None = None, sagas: Sagas | None = None) -> list[Finding]:
    """The findings about all apps in the schema, or about one, and in any case about the server. `sagas` as in
    `find_orphans`. Raises StoreUnavailable, and ConfigurationError if the schema is not migrated."""
    found = await status(dsn, schema, app)
    orphans = await find_orphans(dsn, schema, app or "", sagas or {})
    async with Statements(dsn, schema).sending() as send:
        left = [each async for each in _left(send, app)]
        server = [each async for each in _server(send)]
        scopes = [row.name for row in await send("some_scopes", most=MOST)]
    subjects = ((each.waiting, each.text) for each in orphans)
    return [
        *_handlers(found),
        *_workers(found.workers),
        *left,
        *(_warning(f"sagas of {of.app}/{of.handler}", text) for of, text in subjects if app in (None, of.app)),
        *_sagas(found),
        *_queues(found),
        *_outbox(found),
        *server,
        *_scopes(scopes, found, app),
        *_secrets(await examine_secrets(dsn, schema) if HASHING.secrets else ()),
    ]


async def pending(dsn: str, schema: str) -> list[Finding]:
    """Whether an existing schema lacks migrations of this version. Raises like `diagnose`."""
    known = await asyncio.to_thread(migrations.status, dsn, schema)
    lacking = [str(each) for each in known if each.pending]
    if not lacking or len(lacking) == len(known):
        return []
    text = f"lacks {', '.join(lacking)}; run `idemconsumer migrate up`: no worker of this version starts before that"
    return [Finding("error", f"schema {schema}", text)]


def _warning(subject: str, text: str) -> Finding:
    return Finding("warning", subject, text)


def _handlers(found: Status) -> Iterator[Finding]:
    for line in found.handlers:
        for each in line.conditions:
            said = in_words(each, line, found.at)
            to_do = _TO_DO[each.by].format(handler=line.handler, app=line.app)
            yield _warning(f"handler {line.app}/{line.handler}", f"{said}; {to_do}")


def _workers(workers: Sequence[WorkerLine]) -> Iterator[Finding]:
    live = [line for line in workers if line.live]
    places = {(line.app, line.host, line.place) for line in live}
    for line in workers:
        who = f"worker {line.host}:{line.pid} of {line.app}"
        if line.state == UNRECORDED:
            yield _warning(
                who,
                "is not on record: it is a program that runs sagas itself, and `pause` and `drain` do not affect it",
            )
        elif not line.live and (line.app, line.host, line.place) not in places:
            yield _warning(
                who,
                f"has given no sign of life for {line.unseen:.0f} s, and no other worker has its place: it was killed "
                "with its launcher, or is cut off from the database",
            )
    for app in sorted({line.app for line in live}):
        versions = sorted({line.version for line in live if line.app == app})
        if len(versions) > 1:
            yield _warning(
                f"workers of {app}",
                f"run idemconsumer {' and '.join(versions)}, which is normal only during a deployment; finish the "
                "deployment",
            )


async def _left(send: Sender, app: str | None) -> AsyncIterator[Finding]:
    """Leases, sagas, requests and the like that lost processes have left."""
    for row in await send("stale_leases", most=MOST):
        over = "is unknown" if row.seconds is None else f"ended {row.seconds:.0f} s ago"
        yield _warning(
            f"lease of {row.name or row.worker}",
            f"{over}, and no worker has taken its {_counted(row.sagas)} sagas; start a worker that runs their "
            "handlers, or resume these",
        )
    for row in await send("abandoned_requests", most=MOST):
        of, _, handler = keys.parts_of(row.scope)
        if app in (None, of):
            yield _warning(
                f"requests of {of}/{handler}",
                f"{_counted(row.requests)} were begun by processes that have ended, the first at "
                f"{row.oldest:%Y-%m-%d %H:%M}, and clients have not sent them again; their outcome is unknown: "
                f"`idemconsumer keys list --handler {handler} --state processing` lists them, and "
                "`keys release` makes a key new",
            )


def _sagas(found: Status) -> Iterator[Finding]:
    for each in found.sagas:
        subject = f"sagas of {each.app}/{each.handler}"
        if each.review:
            yield _warning(
                subject,
                f"{_counted(each.review)} wait for a person; `idemconsumer sagas list --state dead --handler "
                f"{each.handler}` lists them",
            )
        if each.due and each.overdue is not None and each.overdue > _OVERDUE:
            yield _warning(
                subject,
                f"{_counted(each.due)} are due, the first for {each.overdue:.0f} s, and no worker takes them; start "
                "more workers of their version, or resume the handler",
            )


def _queues(found: Status) -> Iterator[Finding]:
    for each in found.queues:
        subject = f"postgres:{each.name}"
        messages = MOST + 1 if each.more else each.waiting + each.in_hand + each.delayed
        if each.handler is None:
            yield _warning(
                subject,
                f"{_counted(messages)} messages wait, and no live worker on record reads it; start one, or restore "
                "the handler in the code",
            )
        elif each.overdue is not None and each.overdue > _OVERDUE:
            yield _warning(
                subject,
                f"{each.handler} does not take messages that were due {each.overdue:.0f} s ago; its workers may be "
                "paused, cut off or too busy",
            )
        elif each.kind == "retries" and each.waiting and (each.oldest or 0.0) > _OVERDUE:
            yield _warning(
                subject,
                f"{_counted(each.waiting)} retries of {each.handler} are overdue, the first by {each.oldest:.0f} s; "
                "its workers may be paused or too busy",
            )


def _outbox(found: Status) -> Iterator[Finding]:
    for each in found.outbox:
        subject = f"outbox to {each.destination}"
        if each.parked:
            yield _warning(
                subject,
                f"{_counted(each.parked)} messages were refused and wait for a person; `idemconsumer outbox list "
                f"--parked --destination {each.destination}` says why",
            )
        if not each.relayed and (each.waiting or each.later):
            scheme = each.destination.partition(":")[0]
            instead = (
                "run a handler that forwards its dead letters there, or `idemconsumer outbox discard` them"
                if scheme == "postgres"
                else f"set IDEMCONSUMER_{scheme.upper()} for a worker"
            )
            yield _warning(
                subject,
                f"{_counted(each.waiting + each.later)} messages wait, and no live worker on record relays to "
                f"{scheme}; {instead}",
            )
        elif each.waiting and (each.oldest or 0.0) > _OVERDUE:
            yield _warning(
                subject,
                f"{_counted(each.waiting)} messages wait, the oldest for {each.oldest:.0f} s; the broker may be "
                "unreachable, or the destination missing: the log of the workers says why",
            )


async def _server(send: Sender) -> AsyncIterator[Finding]:
    """What grows in the database server, or cannot shrink."""
    for row in await send("old_transactions", seconds=LONG):
        prepared = row.state == "prepared"
        end = f"ROLLBACK PREPARED {row.who}" if prepared else f"SELECT pg_terminate_backend({row.who})"
        yield _warning(
            f"transaction of {row.role} ({row.program}, {row.state})",
            f"has been open for {row.seconds:.0f} s, and no row version deleted since can be vacuumed; end it if "
            f"it is not needed: {end}",
        )
    for row in await send("table_sizes"):
        dead, live, vacuumed, expected = row.dead, row.live, row.vacuumed, row.expected
        if dead > _DEAD and dead > live / 2 and (vacuumed is None or vacuumed > _NOT_VACUUMED):
            when = "never vacuumed" if vacuumed is None else f"last vacuumed {vacuumed:.0f} s ago"
            yield _warning(
                f"table {row.name}",
                f"has {dead:,} dead rows and {live:,} live ones, and was {when}; look for an old transaction, check "
                "that autovacuum runs, or VACUUM it",
            )
        if expected is not None and row.bytes > max(_LARGE, _TIMES * expected):
            yield _warning(
                f"table {row.name}",
                f"takes {row.bytes / 1e6:,.0f} MB, but its rows should take about {expected / 1e6:,.0f} MB; "
                "pg_repack frees the rest while workers run, VACUUM FULL while none does",
            )
    for row in await send("unpruned", unpruned=_UNPRUNED):
        yield _warning(
            "pruning",
            f"no pass has ended since {row.since:%Y-%m-%d %H:%M}, so rows past their retention stay; workers "
            "prune by themselves; where no worker runs, as with a front door alone, run `idemconsumer prune` once "
            "a day",
        )


def _scopes(names: Sequence[str], found: Status, app: str | None) -> Iterator[Finding]:
    """Handlers that have records but no worker. Their records are deleted after their retention; their name stays."""
    read = {queue for each in found.handlers for queue in each.queues}
    stored = {(of, handler) for of, _, handler in map(keys.parts_of, names)}
    for of, handler in sorted(stored):
        if app in (None, of) and not is_route(handler) and retry_source(of, handler) not in read:
            text = (
                "has records, but no live worker on record runs it; if it was renamed, restore its name with "
                f'name="{handler}"; if it is gone, its records are deleted after their retention'
            )
            yield Finding("note", f"handler {of}/{handler}", text)


async def examine_secrets(dsn: str, schema: str) -> list[Finding]:
    """Whether `key_secrets` are those of the schema, and whether some can be removed (R39). Raises like `Admin`."""
    rows = await Statements(dsn, schema).rows("hashing")
    if not rows:
        return []
    try:
        place = learn_hashing(bytes(rows[0]["wrapped"]), schema)
    except ConfigurationError as error:
        return [Finding("error", "key_secrets", str(error).removeprefix("database: "))]
    if place:
        text = f"the data key is wrapped by number {place + 1}; the next process that starts with this list fixes it"
        return [Finding("warning", "key_secrets", text)]
    if len(HASHING.secrets) > 1:
        text = "the data key is wrapped by the first one; once all processes have this list, leave the others out"
        return [Finding("ok", "key_secrets", text)]
    return []


def _secrets(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings about `key_secrets`, `ok` as `note`. A process without secrets only watches and gets none."""
    for each in findings:
        yield Finding("note" if each.level == "ok" else each.level, each.subject, each.text)


def _counted(count: int) -> str:
    return f"{count:,}" if count <= MOST else f"more than {MOST:,}"
