"""Signals that are stored and that no saga waits for: their handler, or their name, may be another one (L81)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from idemconsumer.admin.dead_letters import connected
from idemconsumer.admin.orphans import Sagas
from idemconsumer.message import keys
from idemconsumer.sql.queries import load


class Unawaited(msgspec.Struct, frozen=True, kw_only=True):
    """Signals of one name to sagas of one handler. `begun`: how many of them are for sagas that have begun."""

    app: str
    handler: str
    name: str
    signals: int
    begun: int
    first_at: datetime
    text: str
    wrong: bool


async def find_unawaited(dsn: str, schema: str, app: str, sagas: Sagas) -> list[Unawaited]:
    """`sagas` as in `find_orphans`. Raises StoreUnavailable, and ConfigurationError when the schema is not migrated."""
    queries = load(schema)
    async with connected(dsn, schema) as connection:
        rows = await (await connection.execute(queries["unawaited_signals"])).fetchall()
        alive = await (await connection.execute(queries["live_workers"])).fetchall()
        known = {*sagas, *((run["app"], run["handler"]) for row in alive for run in row["runs"])}
        found = []
        for row in rows:
            of, _, handler = keys.parts_of(row.pop("scope"))
            names = await (await connection.execute(queries["awaited_names"], {"handler": handler})).fetchall()
            text, wrong = _said(of, handler, row["name"], known, [each["name"] for each in names], row["begun"])
            if text:
                found.append(Unawaited(app=of, handler=handler, text=text, wrong=wrong, **row))
    return found


def _said(
    app: str, handler: str, name: str, known: Iterable[tuple[str, str]], names: Sequence[str], begun: int
) -> tuple[str, bool]:
    """What to say of them, nothing where it is as it should be; and whether something is wrong."""
    if (app, handler) not in known:
        near = _near(handler, [its for of, its in known if of == app])
        return f"but no known saga of app {app!r} has this name{near}", True
    if name in names or (not names and not begun):
        return "", False
    return f"but no running saga waits for {name!r}{_near(name, names)}", bool(names)


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; is it {near[0]!r}?" if near else ""
