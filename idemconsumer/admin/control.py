"""The workers on record (O13), and what a person may want of them: pause, resume, drain (O14 to O16)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec

from idemconsumer.admin.sender import NamedRow, Statements
from idemconsumer.errors import ConfigurationError
from idemconsumer.message import keys
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.held_up import Condition

LOST: Final = 45.0  # seconds without a sign of life; a worker gives one every twelve
UNRECORDED: Final = "unrecorded"

Name: TypeAlias = tuple[str, str]  # app and handler


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of one of its handlers. `queues`: those in Postgres that are the handler's own. `lag`: by
    source, as far as the worker knows it. `paused`: it has noticed that. `running`: lanes that run something; `relays`:
    schemes to which it relays the outbox; `outcomes`: of deliveries, since the worker began; `conditions`: what
    holds it up (O34)."""

    sources: list[str] = []
    queues: list[str] = []
    lag: dict[str, Lag] = {}
    paused: bool = False
    lanes: int = 0
    running: int = 0
    relays: list[str] = []
    outcomes: dict[str, int] = {}
    conditions: list[Condition] = []


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process. `state`: running; draining; `lost`, if it gave no sign of life for 45 s; or `unrecorded`, if
    only its lease is known: a program that runs sagas itself, and `id` is None. `unseen`: seconds since the last sign;
    `place`: which of its launcher's workers it is. Times are the database's."""

    id: int | None
    app: str
    host: str
    pid: int
    place: int
    version: str
    state: str
    handlers: dict[str, Doing]
    started_at: datetime | None = None
    seen_at: datetime | None = None
    drain_at: datetime | None = None
    unseen: float = 0.0

    @property
    def live(self) -> bool:
        return self.state in ("running", "draining")


class Controls:
    """Of one schema, with a new connection for each call. Raises like `Admin`."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema)

    async def workers(self, app: str | None = None) -> list[WorkerLine]:
        """Those on record, and leases of sagas that belong to none of these."""
        recorded = [
            WorkerLine(**row | {"handlers": msgspec.json.decode(row["handlers"], type=dict[str, Doing])})
            for row in await self._sql.rows("processes", app=app, lost=LOST)
        ]
        return recorded + [
            line
            for row in await self._sql.rows("unrecorded_workers")
            for line in _unrecorded(row["name"], row["runs"])
            if app in (None, line.app)
        ]

    async def paused(self, app: str | None = None) -> list[NamedRow]:
        """Handlers that are paused: `paused_handlers` in `sql/control.sql`."""
        return await self._sql.rows("paused_handlers", app=app)

    async def audit(self, limit: int = 50) -> list[NamedRow]:
        """What somebody decided, the newest first: `audit` in `sql/control.sql`."""
        return await self._sql.rows("audit", limit=limit)

    async def pause(self, app: str, handler: str, *, by: str, reason: str | None = None) -> bool:
        """Nothing of the handler is fetched or begun any more, from about a second later on (O14). Returns whether it
        was not paused already; then who has paused it, and why, stays."""
        return await self._change("pause_handler", app=app, handler=handler, by=by, reason=reason)

    async def resume(self, app: str, handler: str, *, by: str, reason: str | None = None) -> bool:
        """Returns whether it was paused."""
        return await self._change("resume_handler", app=app, handler=handler, by=by, reason=reason)

    async def running(self, app: str, handler: str) -> list[WorkerLine]:
        """Workers on record, and leases, that have this handler."""
        return [line for line in await self.workers(app) if handler in line.handlers]

    async def drain(self, worker: int, *, by: str, reason: str | None = None) -> bool:
        """The worker with this id finishes what runs and leaves, and no other one takes its place (O15). Returns
        whether it was not asked already. Raises ConfigurationError where no such worker lives."""
        lines = {line.id: line for line in await self.workers() if line.live}
        if worker not in lines:
            known = ", ".join(str(each) for each in lines) or "none"
            raise ConfigurationError(
                f"no live worker has the id {worker}; live are: {known} (`idemconsumer workers list`)"
            )
        return await self._change("drain_process", id=worker, by=by, reason=reason)

    async def note_reload(self, target: str, *, by: str) -> None:
        """A launcher was told to start its workers again (O17)."""
        async with self._sql.changing() as send:
            await send("note_decision", by=by, what="reload", target=target)

    async def known(self) -> set[Name]:
        """App and name of each handler that a worker on record has, or that has records."""
        scopes = [keys.parts_of(row["name"]) for row in await self._sql.rows("scopes")]
        return {(app, name) for app, _, name in scopes} | {
            (line.app, name) for line in await self.workers() for name in line.handlers
        }

    async def app_of(self, handler: str) -> str:
        """The one app that has a handler of this name, as far as the database knows. Raises ConfigurationError."""
        apps = {app for app, name in await self.known() if name == handler}
        apps |= {each.app for each in await self.paused() if each.handler == handler}
        if len(apps) == 1:
            return apps.pop()
        if apps:
            raise ConfigurationError(
                f"several apps have a handler {handler!r}: {', '.join(sorted(apps))}; add --app NAME"
            )
        raise ConfigurationError(
            f"no handler {handler!r} is known; to pause one that has never run yet, add --app NAME"
        )

    async def _change(self, statement: str, **given: Any) -> bool:
        async with self._sql.changing() as send:
            (row,) = await send(statement, **given)
        return bool(row["changed"])


def _unrecorded(name: str, runs: str) -> list[WorkerLine]:
    """What is known of a process by its lease: a line for each app."""
    host, _, pid = name.rpartition(":")
    apps: dict[str, dict[str, Doing]] = {}
    for each in msgspec.json.decode(runs):
        apps.setdefault(each["app"], {})[each["handler"]] = Doing()
    return [
        WorkerLine(
            id=None, app=app, host=host, pid=int(pid or 0), place=0, version="unknown", state=UNRECORDED, handlers=its
        )
        for app, its in apps.items()
    ]
