"""Queries about dead letters and about messages that are not due yet, for the command line and for dashboards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from idemconsumer.admin.audit import Trace, counted
from idemconsumer.admin.hints import hint
from idemconsumer.admin.sender import PATIENCE, NamedRow, Statements
from idemconsumer.errors import ConfigurationError
from idemconsumer.message import keys
from idemconsumer.message.delivered import with_delivered
from idemconsumer.message.headers import decode_headers
from idemconsumer.message.message import Message
from idemconsumer.rules.request_keys import UNNAMED, asked_keys, is_unnamed
from idemconsumer.stores.agreed_hashing import may_hash

_PAGE = 500  # dead letters per statement
_WHOLE = 50  # dead letters per statement that reads bodies


class Which(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the dead letters that match everything given here.

    `error` is a part of the error's text. `since`: the last arrival was at most so many seconds ago; `until`: at least
    so many. `keys` are stored keys (`Admin.stored_keys`); `prefix` is hexadecimal digits with which a stored key
    begins. With `redriven`, dead letters that were redriven and have not failed again are included.
    """

    handler: str | None = None
    reason: str | None = None
    error: str | None = None
    app: str | None = None
    tenant: str | None = None
    since: float | None = None
    until: float | None = None
    keys: Sequence[bytes] | None = None
    prefix: str | None = None
    ids: Sequence[int] | None = None
    redriven: bool = False

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the statements that choose dead letters. Raises ConfigurationError for a wrong prefix."""
        low, high = (None, None) if self.prefix is None else key_range(self.prefix)
        app, tenant, _ = keys.scope_name(self.app or "", self.tenant, "").split("/")
        scope = {"app": self.app and app, "tenant": self.tenant and tenant}
        given = msgspec.structs.asdict(self) | {"low": low, "high": high} | scope
        del given["prefix"]
        return given | {name: None if given[name] is None else list(given[name]) for name in ("keys", "ids")}

    def counted(self, letters: int) -> str:
        """The text for the audit."""
        return counted(letters, "dead letters", app=self.app, handler=self.handler, reason=self.reason)


ALL: Final = Which()


class DeadLetterDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter in full, with everything that its broker delivered. Times are the database's.

    `arrivals` counts deliveries, including the first. `redriven_at`: when it was redriven, unless it has failed again
    since. `forwarded_at`: when it was forwarded to its handler's `dead_letter_to`, after it was last written.
    `traceback` is that of the exception; None if there was no exception, or if a worker of version 0.0 wrote the dead
    letter. `key` is the stored digest; None if the message had no key. `body` is the first `max_message_bytes` of a
    body of `body_size` bytes; `body_sha256` is of the whole body. `headers` are in their order, with repeated ones.
    `emptied_at`: when the body and the other contents were dropped, because its handler has a `retain_dead_body`.
    """

    id: int
    handler: str
    source: str
    position: str
    reason: str
    error: str
    attempts: int
    arrivals: int
    first_at: datetime
    last_at: datetime
    redriven_at: datetime | None = None
    forwarded_at: datetime | None = None
    scope: str
    key: bytes | None
    message_id: str | None
    record_key: bytes | None
    timestamp: datetime | None
    properties: Mapping[str, str | int]
    tombstone: bool
    headers: Sequence[tuple[str, str | bytes]]
    body: bytes
    body_size: int
    body_sha256: bytes
    emptied_at: datetime | None = None
    traceback: str | None = None

    @property
    def hint(self) -> str:
        """What a person can do about it."""
        return hint(self.reason)


class Redrive(msgspec.Struct, frozen=True, kw_only=True):
    """One redrive of a dead letter, or of another dead letter of its key: in which run, by whom and when.

    `outcome`: `waiting`; `applied`; `rejected`, by its handler; `dead`: it is a dead letter again; or `settled`: the
    dead letter has no key, so nothing more is known, unless it is a dead letter again.
    """

    id: int
    letter: int
    run: str
    by: str
    at: datetime
    outcome: str
    ended_at: datetime | None


class Admin:
    """Queries about one schema, and deletion of dead letters, with a new connection for each call.

    Raises StoreUnavailable, or ConfigurationError if the schema is not migrated.
    """

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema)
        self._slow = Statements(dsn, schema, patience=PATIENCE)

    async def dead_letters(self, which: Which = ALL, *, before: int | None = None, limit: int = 50) -> list[NamedRow]:
        """Dead letters, newest first, at most `limit`; with `before`, only those with lower ids. The rows have the
        columns of a list: fewer than `DeadLetterDetail`."""
        return await self._sql.rows("dead_list", **which.params, before=before, limit=limit)

    async def dead_letter(self, number: int) -> DeadLetterDetail | None:
        """The dead letter with this id, or None."""
        which = Which(ids=[number], redriven=True)
        return next(map(_detail, await self._sql.rows("dead_show", **which.params, before=None, limit=1)), None)

    async def export(self, which: Which = ALL) -> AsyncIterator[DeadLetterDetail]:
        """All chosen dead letters in full, newest first, read page by page."""
        before: int | None = None
        async with self._slow.sending() as send:
            while page := await send("dead_show", **which.params, before=before, limit=_WHOLE):
                before = page[-1]["id"]
                for row in page:
                    yield _detail(row)

    async def causes(self, which: Which = ALL, *, by_tenant: bool = False) -> list[NamedRow]:
        """Causes, the most frequent first; with `by_tenant`, per app and tenant: `dead_groups` in `sql/admin.sql`."""
        found = []
        for row in await self._slow.rows("dead_groups", **which.params, by_tenant=by_tenant):
            app, tenant = (None, None) if (scope := row.pop("scope")) is None else keys.parts_of(scope)[:2]
            found.append(NamedRow(row, app=app, tenant=tenant))
        return found

    async def redrives(self, letter: DeadLetterDetail) -> list[Redrive]:
        """The redrives of this dead letter, and of others with its key, oldest first."""
        return await self._sql.values(Redrive, "dead_redrives", letter=letter.id, key=letter.key)

    async def stored_keys(
        self, handler: str, key: str, *, tenant: str | None = None, app: str | None = None
    ) -> list[bytes]:
        """The digests under which the text `key` is stored, in each app and tenant that has a handler or a route of
        this name. For a request, `handler` may also be the method and path that its client sent.

        `app`: only that app, even if the database has no scope of it. Raises ConfigurationError for a name that has no
        keys of its own, such as `POST *`.
        """
        if is_unnamed(handler):
            method = handler.partition(" ")[0]
            raise ConfigurationError(
                f"{handler!r} stands for all undeclared routes, whose keys are stored by path; write"
                f" the method and path of the request, such as '{method} /orders/7'"
            )
        scopes = [row["name"] for row in await self._sql.rows("scopes")]
        if not may_hash(await self._sql.rows("hashing"), self._sql.schema):
            return []
        if app is not None:
            unnamed = f"{handler.partition(' ')[0]} {UNNAMED}"
            scopes = [name for name in scopes if keys.parts_of(name)[0] == app]
            scopes += [keys.scope_name(app, tenant, name) for name in (handler, unnamed)]
        return asked_keys(scopes, handler, key, tenant)

    async def count(self, which: Which = ALL) -> tuple[int, int]:
        """How many dead letters are chosen, and how many of these belong to sagas that wait for a person."""
        (row,) = await self._slow.rows("count_chosen", **which.params)
        return row["letters"], row["of_sagas"]

    async def discard(self, which: Which, progress: Callable[[int], None] = lambda _: None, *, by: str) -> int:
        """Delete the chosen dead letters, page by page, and return their number. Their keys stay DEAD, so their
        messages do not run when they come again. Dead letters of sagas that wait for a person are not deleted."""
        discarded, after, trace = 0, 0, Trace(by, "discard")
        async with self._slow.sending() as send:
            ((last,),) = [row.values() for row in await send("dead_last")]
            while last is not None:
                async with send.connection.transaction():
                    gone = await send("discard_letters", **which.params, after=after, last=last, limit=_PAGE)
                    if not gone:
                        break
                    after, discarded = max(each["id"] for each in gone), discarded + len(gone)
                    await trace.write(send, which.counted(discarded))
                progress(len(gone))
        return discarded

    async def delayed(self) -> list[NamedRow]:
        """Messages that are not due yet, by queue: `delayed` in `sql/admin.sql`."""
        return await self._sql.rows("delayed")

    async def unforwarded(self, app: str) -> list[NamedRow]:
        """Dead letters that wait to be forwarded, by handler: `unforwarded` in `sql/admin.sql`."""
        return await self._sql.rows("unforwarded", scopes=keys.scopes_of(app))


async def unknown_handler(dsn: str, schema: str, handler: str) -> str | None:
    """A text for a handler's name under which nothing is stored. None if something is stored under it, or if nothing is
    stored at all. Raises like `Admin`."""
    known = sorted({keys.parts_of(row["name"])[2] for row in await Statements(dsn, schema).rows("scopes")})
    if handler in known or not known:
        return None
    return (
        f"nothing is stored under a handler {handler!r}, only under {', '.join(known)}; a handler is stored under its "
        "name=, which may differ from its function's name"
    )


def key_range(prefix: str) -> tuple[bytes, bytes]:
    """The first and the last stored key that begin with these hexadecimal digits. Raises ConfigurationError."""
    try:
        low, high = (bytes.fromhex(prefix.ljust(64, fill)) for fill in "0f")
    except ValueError:
        low = high = b""
    if len(low) != 32 or not prefix:
        raise ConfigurationError(
            f"{prefix!r} is not the beginning of a stored key; write up to 64 hexadecimal digits, or --handler NAME "
            "--key TEXT"
        )
    return low, high


def only(found: Sequence[bytes], what: str, things: str = "keys", more: str = "") -> bytes:
    """The only key in `found`. Raises ConfigurationError if there are several."""
    if len(found) > 1:
        several = ", ".join(each.hex()[:16] for each in found)
        raise ConfigurationError(f"{what} matches several {things}: {several}…; write more digits{more}")
    return found[0]


def _detail(row: Mapping[str, Any]) -> DeadLetterDetail:
    stored = Message(row["source"], row["body"], decode_headers(row["headers"]))
    message = with_delivered(stored, row["delivered"])
    given = {name: getattr(message, name) for name in ("message_id", "record_key", "timestamp", "tombstone")}
    given |= {"properties": dict(message.properties), "headers": message.all_headers}
    return DeadLetterDetail(**{name: value for name, value in row.items() if name != "delivered"} | given)
