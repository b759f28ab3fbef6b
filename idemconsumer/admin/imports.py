"""Takes over the keys that a hand-written table has (R31)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec

from idemconsumer.admin.dead_letters import PATIENCE, connected
from idemconsumer.admin.deciding import Begun, Deciding
from idemconsumer.admin.old_tables import Chosen, Table, read_table
from idemconsumer.errors import BadMessage
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.key_columns import KeyColumns, key_columns
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import State
from idemconsumer.sql.answering import AnsweringConnection
from idemconsumer.sql.queries import load
from idemconsumer.stores.claims import PostgresClaims

_TOGETHER: Final = 500  # rows of one transaction, each with a lock
_LOOKS: Final = 5.0  # transactions in a second, at least, where there is a rate
_EXAMPLES: Final = 20

Connection: TypeAlias = AnsweringConnection[dict[str, Any]]


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """A row that was not taken, by the columns of its primary key, and why."""

    row: Mapping[str, str]
    why: str


class Imported(msgspec.Struct, kw_only=True):
    """What became of the rows that were read. `there`: keys that had a record already, by its state; `not_done`: by
    what the row says; `too_old`: pruning would remove their records at once; `unusable`: no message can have such a
    key. `left` are some of the last three, and `resumed` says that an earlier run had read the rows before these."""

    rows: int = 0
    taken: int = 0
    there: Counter[str] = msgspec.field(default_factory=Counter)
    not_done: Counter[str] = msgspec.field(default_factory=Counter)
    too_old: int = 0
    unusable: int = 0
    left: list[Left] = msgspec.field(default_factory=list)
    resumed: bool = False

    def leave(self, row: Mapping[str, str], why: str) -> None:
        if len(self.left) < _EXAMPLES:
            self.left.append(Left(row=row, why=why))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record that is to be."""

    scope: str
    at: datetime | None
    result: StoredResult | None


class Imports:
    """Of one schema. Raises like `Admin`, and ConfigurationError for a table or columns that cannot be read so."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema
        self._queries = load(schema)
        self._deciding = Deciding(dsn, schema)

    async def run(
        self,
        handler: BoundHandler,
        chosen: Chosen,
        *,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[Imported], None] = lambda _: None,
    ) -> Imported:
        """Make a COMPLETED record of each row that is done, in the order of the table's primary key.

        Workers, and who writes to the table, may go on meanwhile. A run that was interrupted is gone on with; one that
        came to its end begins again, and finds what was added since. `rate`: rows in a second at most. `progress` is
        told how far it is.
        """
        async with connected(self._dsn, self._schema, patience=PATIENCE) as reading, self._deciding.in_a_row() as begun:
            table = await read_table(reading, self._queries, chosen, handler)
            of = {
                "app": handler.app,
                "handler": handler.name,
                "source": table.name,
                "chosen": chosen.as_text(),
            }
            position = None if dry_run else await self._position(reading, of)
            done = Imported(resumed=position is not None)
            run = _Run(self._queries, reading, begun, handler, table, done, dry_run=dry_run)
            began, together = time.monotonic(), _TOGETHER
            if rate is not None:
                together = max(1, min(_TOGETHER, int(rate / _LOOKS)))
            while rows := await table.page(reading, position, together):
                await run.take(rows)
                position = table.position(rows[-1])
                if not dry_run:
                    await self._send(reading, "import_note", of | {"position": position})
                progress(done)
                if rate is not None and not dry_run:
                    await asyncio.sleep(max(0.0, began + done.rows / rate - time.monotonic()))
            if not dry_run:
                await self._send(reading, "import_over", of)
            return done

    async def _position(self, reading: Connection, of: Mapping[str, Any]) -> list[str] | None:
        rows = await (await reading.execute(self._queries["import_stands"], of)).fetchall()
        return next((row["position"] for row in rows), None)

    async def _send(self, connection: Connection, name: str, given: Mapping[str, Any]) -> None:
        async with connection.transaction():
            await connection.execute(self._queries[name], given)


class _Run:
    """The rows of one table become records."""

    def __init__(
        self,
        queries: Mapping[str, bytes],
        reading: Connection,
        begun: Begun,
        handler: BoundHandler,
        table: Table,
        done: Imported,
        *,
        dry_run: bool,
    ) -> None:
        self._queries = queries
        self._reading = reading
        self._begun = begun
        self._handler = handler
        self._table = table
        self._done = done
        self._dry_run = dry_run
        self._key = key_columns(handler.key_spec)
        self._tenant: KeyColumns | None = None if handler.tenant_spec is None else key_columns(handler.tenant_spec)
        self._scopes: dict[str, int] = {}

    async def take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Each row that is done has a record when this returns."""
        entries: dict[bytes, _Entry] = {}
        for row in rows:
            if (found := self._entry(row)) is not None:
                entries.setdefault(*found)
        self._done.rows += len(rows)
        rest = entries if self._dry_run or not entries else await self._insert(entries)
        there = await self._states(rest)
        if self._dry_run:
            self._done.taken += len(rest) - len(there)
        # A rival held the key. He lets go of it with his transaction, and that may have ended either way.
        for key in [] if self._dry_run else [key for key in rest if key not in there]:
            there |= await self._states(await self._insert({key: rest[key]}, wait=True))
        self._done.there.update(State(state).name.lower() for state in there.values())

    def _entry(self, row: Mapping[str, Any]) -> tuple[bytes, _Entry] | None:
        table, handler, done = self._table, self._handler, self._done
        if not row["done"]:
            done.not_done[str(row["state"])] += 1
            done.leave(table.named(row), f"not done: {row['state']}")
            return None
        if row["old"]:
            done.too_old += 1
            done.leave(table.named(row), "older than the handler's retain")
            return None
        try:
            key = self._key.text(table.key(row))
            tenant = None if self._tenant is None else self._tenant.text(table.tenant(row))
        except BadMessage as error:
            done.unusable += 1
            done.leave(table.named(row), str(error))
            return None
        entry = _Entry(handler.identity.scope(tenant), row["at"], table.result(row))
        return handler.identity.digest(tenant, key), entry

    async def _insert(self, entries: Mapping[bytes, _Entry], *, wait: bool = False) -> Mapping[bytes, _Entry]:
        """Those that were not inserted: they have a record, or a rival holds the key. `wait` for him."""
        async with self._begun() as claims:
            if wait:
                for key in entries:
                    await claims.send("lock_key", {"key": key})
            given = {
                "keys": list(entries),
                "scopes": [await self._scope(claims, entry.scope) for entry in entries.values()],
                "times": [entry.at for entry in entries.values()],
            }
            taken = {key for (key,) in await claims.send("import_keys", given)}
            results = [
                (key, entry.result) for key, entry in entries.items() if key in taken and entry.result is not None
            ]
            await claims.complete(results, [])
        self._done.taken += len(taken)
        return {key: entry for key, entry in entries.items() if key not in taken}

    async def _scope(self, claims: PostgresClaims, name: str) -> int:
        if name not in self._scopes:
            given = {"names": [name], "retains": [self._handler.options.retain]}
            ((_, self._scopes[name]),) = await claims.send("meet_scopes", given)
        return self._scopes[name]

    async def _states(self, entries: Mapping[bytes, _Entry]) -> dict[bytes, int]:
        if not entries:
            return {}
        found = await self._reading.execute(self._queries["record_states"], {"keys": list(entries)})
        return {row["key"]: row["state"] for row in await found.fetchall()}
