"""The recorded workers (O13), and what a person can ask of them: pause, resume, drain (O14 to O16)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec

from idemconsumer.admin.sender import NamedRow, Statements
from idemconsumer.errors import ConfigurationError
from idemconsumer.message import keys
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.held_up import Condition

LOST: Final = 45.0  # seconds without a heartbeat; a worker sends one every twelve
UNRECORDED: Final = "unrecorded"

Name: TypeAlias = tuple[str, str]  # app and handler


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report about one of its handlers.

    `queues`: the handler's own queues in Postgres. `lag`: by source, as far as the worker knows it. `paused`: the
    worker has noticed a pause. `running`: lanes that run something; `relays`: schemes to which it relays the outbox;
    `outcomes`: of deliveries, since the worker started; `conditions`: what holds the handler up (O34).
    """

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
    """One worker process. Times are the database's.

    `state`: `running`; `draining`; `lost`, after 45 s without a heartbeat; or `unrecorded`, if only its lease is known:
    a program that runs sagas itself, whose `id` is None. `unseen`: seconds since the last heartbeat; `place`: its
    number among its launcher's workers.
    """

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
    """Queries and decisions about the workers of one schema, with a new connection for each call. Raises as `Admin`."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema)

    async def workers(self, app: str | None = None) -> list[WorkerLine]:
        """The recorded workers, and the leases of sagas that belong to none of them."""
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
        """The handlers that are paused: `paused_handlers` in `sql/control.sql`."""
        return await self._sql.rows("paused_handlers", app=app)

    async def audit(self, limit: int = 50) -> list[NamedRow]:
        """The decisions of people, newest first: `audit` in `sql/control.sql`."""
        return await self._sql.rows("audit", limit=limit)

    async def pause(self, app: str, handler: str, *, by: str, reason: str | None = None) -> bool:
        """Stop workers from fetching or beginning anything for the handler, within about a second (O14). Returns False
        if it was paused already; then the earlier `by` and `reason` stay."""
        return await self._change("pause_handler", app=app, handler=handler, by=by, reason=reason)

    async def resume(self, app: str, handler: str, *, by: str, reason: str | None = None) -> bool:
        """End the pause. Returns whether the handler was paused."""
        return await self._change("resume_handler", app=app, handler=handler, by=by, reason=reason)

    async def running(self, app: str, handler: str) -> list[WorkerLine]:
        """The recorded workers, and the leases, that have this handler."""
        return [line for line in await self.workers(app) if handler in line.handlers]

    async def drain(self, worker: int, *, by: str, reason: str | None = None) -> bool:
        """Have the worker with this id finish its runs and exit; no other worker takes its place (O15). Returns False
        if that was requested before. Raises ConfigurationError if there is no such live worker."""
        lines = {line.id: line for line in await self.workers() if line.live}
        if worker not in lines:
            known = ", ".join(str(each) for each in lines) or "none"
            raise ConfigurationError(
                f"no live worker has the id {worker}; live are: {known} (`idemconsumer workers list`)"
            )
        return await self._change("drain_process", id=worker, by=by, reason=reason)

    async def note_reload(self, target: str, *, by: str) -> None:
        """Record that a launcher was asked to restart its workers (O17)."""
        async with self._sql.changing() as send:
            await send("note_decision", by=by, what="reload", target=target)

    async def known(self) -> set[Name]:
        """App and name of each handler that a recorded worker runs, or that has records."""
        scopes = [keys.parts_of(row["name"]) for row in await self._sql.rows("scopes")]
        return {(app, name) for app, _, name in scopes} | {
            (line.app, name) for line in await self.workers() for name in line.handlers
        }

    async def app_of(self, handler: str) -> str:
        """The one app with this handler, as far as is known. Raises ConfigurationError unless there is exactly one."""
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
    """The lines, one per app, for a process of which only a lease is known."""
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
