"""Sagas that no worker will continue, because their handler, its version or their app is gone (L31). Also signals that
no saga waits for, because the name of the handler or of the signal may be wrong (L81)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

import msgspec

from idemconsumer.admin.sender import NamedRow, Statements
from idemconsumer.message import keys
from idemconsumer.rules.saga import ANY_VERSION


class WaitingSagas(msgspec.Struct, frozen=True, kw_only=True):
    """Sagas of one app, handler and version that have not ended and are not parked. Not `begun`: other sagas have
    started them, and their messages wait; these have no version yet."""

    app: str
    handler: str
    version: str | None
    sagas: int
    begun: bool = True


class Orphans(msgspec.Struct, frozen=True, kw_only=True):
    """Sagas that no worker will continue, as far as can be seen, and what to do about them."""

    waiting: WaitingSagas
    text: str


Sagas: TypeAlias = Mapping[tuple[str, str], str | None]


async def find_orphans(dsn: str, schema: str, app: str, sagas: Sagas) -> list[Orphans]:
    """The orphans of the schema. `sagas`: the versions of all saga handlers of `app`, by app and handler. Raises
    StoreUnavailable, and ConfigurationError if the schema is not migrated."""
    async with Statements(dsn, schema).sending() as send:
        groups = await send("waiting_sagas")
        children = await send("unbegun_children")
        alive = await send("live_workers")
    waiting = [WaitingSagas(**row | {"app": unquote(row["app"])}) for row in groups]
    waiting += [WaitingSagas(version=None, begun=False, **row) for row in children]
    return orphans(waiting, [row["runs"] for row in alive], app, sagas)


def orphans(waiting: Iterable[WaitingSagas], alive: Sequence[list[Any]], app: str, sagas: Sagas) -> list[Orphans]:
    """The orphans among the `waiting` sagas. `alive`: for each live worker, the sagas that it runs."""
    found = []
    for group in waiting:
        served = any(_runs(one, group) for each in alive for one in each)
        if (text := _problem(group, app, sagas, served=served)) is not None:
            found.append(Orphans(waiting=group, text=text))
    return found


def _runs(found: Any, group: WaitingSagas) -> bool:
    its = {"app": group.app, "handler": group.handler, "version": group.version}
    return bool(found == its if group.begun else {**found, "version": None} == its)


def _problem(group: WaitingSagas, app: str, sagas: Sagas, *, served: bool) -> str | None:
    known = (group.app, group.handler) in sagas
    named = f'name="{group.handler}"' if group.app == app else f'name="{group.handler}" in App("{group.app}")'
    renamed = f"if it was renamed, restore its name with {named}"
    if not group.begun:
        if served or known:
            return None
        return (
            f"{group.sagas} sagas of app {group.app!r}, started by other sagas, wait to begin, but no worker runs it; "
            f"{renamed}, or bring it back, since sagas that have not begun cannot be moved"
        )
    move = f"`idemconsumer sagas move {group.app}/{group.handler} APP/HANDLER` gives them to another handler"
    if group.app == app and not known:
        return (
            f"{group.sagas} sagas wait for it, but app {app!r} has no such handler of sagas; {renamed}, or bring it "
            f"back, or {move}, or `idemconsumer sagas abandon` ends them one by one"
        )
    if served or group.version == ANY_VERSION:
        return None
    if not known:
        return (
            f"{group.sagas} sagas of app {group.app!r} wait for it, but no worker runs it; start one, or {renamed}, or "
            f"{move}"
        )
    if group.version == sagas[group.app, group.handler]:
        return None
    return (
        f"{group.sagas} sagas began with version {group.version!r}, which no worker runs; start one, or they become "
        "dead letters (saga_changed) ten minutes after the last one left"
    )


async def find_unawaited(dsn: str, schema: str, app: str, sagas: Sagas) -> list[NamedRow]:
    """Signals that no saga waits for, one row per handler (with its app) and name. `signals`: how many there are;
    `begun`: how many of them are for sagas that have begun; `first_at`: the time of the first; `text`: the finding;
    `wrong`: whether something is wrong. `sagas` and errors as in `find_orphans`."""
    async with Statements(dsn, schema).sending() as send:
        rows = await send("unawaited_signals")
        alive = await send("live_workers")
        known = {*sagas, *((run["app"], run["handler"]) for row in alive for run in row["runs"])}
        found = []
        for row in rows:
            of, _, handler = keys.parts_of(row.pop("scope"))
            names = await send("awaited_names", handler=handler)
            text, wrong = _said(of, handler, row["name"], known, [each["name"] for each in names], row["begun"])
            if text:
                found.append(NamedRow(row, app=of, handler=handler, text=text, wrong=wrong))
    return found


def _said(
    app: str, handler: str, name: str, known: Iterable[tuple[str, str]], names: Sequence[str], begun: int
) -> tuple[str, bool]:
    """The text about such signals, empty if all is as it should be; and whether something is wrong."""
    if (app, handler) not in known:
        near = _near(handler, [its for of, its in known if of == app])
        return f"but no known saga of app {app!r} has this name{near}", True
    if name in names or (not names and not begun):
        return "", False
    return f"but no running saga waits for {name!r}{_near(name, names)}", bool(names)


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; is it {near[0]!r}?" if near else ""
