"""What a person may ask about sagas, and decide about those that wait for one."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final, Literal
from urllib.parse import unquote

import msgspec
import psycopg

from idemconsumer.admin.dead_letters import connected
from idemconsumer.admin.timeline import Event, timeline
from idemconsumer.errors import ConfigurationError
from idemconsumer.message import codecs, keys
from idemconsumer.rules.saga import ANY_VERSION
from idemconsumer.rules.values import State, StepKind, StepState
from idemconsumer.sql.queries import load

ABANDONED: Final = "abandoned"  # the rejection's code
_LOCK_TIMEOUT: Final = "10s"
_MOST_FOUND: Final = 5
_Connection = psycopg.AsyncConnection[dict[str, Any]]


class SagaLine(msgspec.Struct, frozen=True, kw_only=True):
    """A saga that has not ended. `state` is processing, undoing or dead (`parked` says why it waits for a person).

    `owner` is the worker that holds it, None between attempts; `stale`: that worker's lease is over. `attempt` counts
    takeovers since the last finished step, `token` grows with each owner.
    """

    key: str
    scope: str
    handler: str
    state: str
    parked: str | None
    owner: str | None
    token: int
    attempt: int
    due: datetime
    stale: bool
    recovery_point: str | None
    version: str | None
    error: str | None
    source: str
    position: str
    message_id: str | None
    started_at: datetime


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded step. `token` is of the owner that wrote it last; `attempts` are those of the step and of its undo;
    `seconds` from its first start to its end, `undo_seconds` the same for its undo.

    `intent` and `undo intent` are calls of which nobody knows yet how they ended.
    """

    name: str
    kind: str
    state: str
    has_undo: bool
    overlapped: bool
    token: int
    attempts: int
    started_at: datetime
    finished_at: datetime | None
    seconds: float | None
    undo_seconds: float | None
    output: str | None


class SagaDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A saga's record, its row while it has not ended, its steps by their start, and what happened to it in time."""

    key: str
    scope: str
    state: str
    changed_at: datetime
    result: str | None
    running: SagaLine | None
    steps: list[StepLine]
    timeline: list[Event]

    @property
    def open_intents(self) -> list[str]:
        """Steps that were called with nobody knowing how that ended; nothing undoes them."""
        return [step.name for step in self.steps if step.state == "intent"]


class SagaAdmin:
    """Reads and decides in one schema, a connection each time. Raises StoreUnavailable, and ConfigurationError when
    the schema is not migrated, a saga is not there, or is not in a state in which a person may decide."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema
        self._queries = load(schema)

    async def sagas(
        self,
        *,
        handler: str | None = None,
        state: Literal["processing", "undoing", "dead"] | None = None,
        stale: bool = False,
        limit: int = 50,
    ) -> list[SagaLine]:
        """Those that have not ended, the newest ones first, at most `limit`."""
        async with connected(self._dsn, self._schema) as connection:
            return await self._lines(connection, handler=handler, state=state, stale=stale, limit=limit)

    async def find(self, *, prefix: str | None = None, handler: str | None = None, key: str | None = None) -> bytes:
        """The one stored key that begins with `prefix` (hex), or that `handler` stores for the text `key`, whatever
        app and tenant."""
        async with connected(self._dsn, self._schema) as connection:
            if prefix is not None:
                found = await self._by_prefix(connection, prefix)
                what = f"{prefix!r}"
            else:
                assert handler is not None
                assert key is not None
                found = await self._by_text(connection, handler, key)
                what = f"handler {handler!r} and this key"
        if not found:
            raise ConfigurationError(f"there is no record for {what}; `idemconsumer sagas list` shows what runs")
        if len(found) > 1:
            several = ", ".join(each.hex()[:16] for each in found)
            raise ConfigurationError(f"{what} fits several records: {several}…; write more of the one you mean")
        return found[0]

    async def saga(self, key: bytes) -> SagaDetail:
        async with connected(self._dsn, self._schema) as connection:
            rows = await self._send(connection, "saga_record", {"key": key})
            if not rows:
                raise ConfigurationError(f"there is no record {key.hex()[:12]}")
            lines = await self._lines(connection, key=key)
            steps = await self._send(connection, "saga_steps", {"key": key})
            history = await self._send(connection, "saga_history", {"key": key})
        record, running = rows[0], lines[0] if lines else None
        state = _word(State(record["state"]))
        return SagaDetail(
            key=key.hex(),
            scope=record["scope"],
            state=state,
            changed_at=record["changed_at"],
            result=_text(record["result"]),
            running=running,
            steps=[_step(row) for row in steps],
            timeline=timeline(
                None if running is None else msgspec.structs.asdict(running),
                history,
                steps,
                (record["changed_at"], state),
            ),
        )

    async def resume(self, key: bytes, *, accept_version: bool = False) -> None:
        """Due now, with all attempts before it: any worker goes on with it, undoing if it was.

        `accept_version`: with whatever steps and version its handler has now. Refused while a worker runs it.
        """
        async with self._deciding(key) as (connection, saga):
            state = State(saga["state"])
            version = ANY_VERSION if accept_version else None
            await self._note(connection, key, "resumed", "whatever its handler is now" if accept_version else None)
            await self._free(connection, key, state, version, None)

    async def abandon(self, key: bytes, *, undo: bool) -> None:
        """The saga ends FAILED, with the rejection `abandoned`: at once, or after a worker has undone its finished
        steps. A call of which nobody knows how it ended is not undone. Refused while a worker runs it."""
        rejection = codecs.encode_rejection(ABANDONED, None)
        async with self._deciding(key) as (connection, saga):
            await self._note(connection, key, "abandoned", "to be undone" if undo else "as it is")
            if undo:  # the undos come from a replay of the handler as it is now; what it does not meet is parked again
                await self._free(connection, key, State.UNDOING, ANY_VERSION, rejection.body)
                return
            body = saga["rejection"] or rejection.body
            await self._send(connection, "set_record", {"key": key, "state": int(State.FAILED)})
            results = {"keys": [key], "bodies": [body], "types": [rejection.content_type]}
            await self._send(connection, "store_results", results)
            await self._send(connection, "end_saga", {"key": key})

    # ------------------------------------------------------------------------------------------------------ the tables
    @asynccontextmanager
    async def _deciding(self, key: bytes) -> AsyncIterator[tuple[_Connection, dict[str, Any]]]:
        """A sealed transaction that holds the saga's row."""
        seal = secrets.token_hex(8)
        async with connected(self._dsn, self._schema) as connection:
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            async with connection.transaction():
                await self._send(connection, "open", {"seal": seal, "lock_timeout": _LOCK_TIMEOUT})
                if not await self._send(connection, "lock_saga", {"key": key}):
                    raise ConfigurationError(f"saga {key.hex()[:12]} has ended; there is nothing left to decide")
                (saga,) = await self._send(connection, "locked_saga", {"key": key})
                if saga["held"]:
                    raise ConfigurationError(
                        f"saga {key.hex()[:12]} is run by {saga['owner']} now; wait for its end, or stop that worker"
                    )
                yield connection, saga
                await self._send(connection, "forget_dead", {"key": key})
                await self._send(connection, "seal", {"seal": seal})

    async def _free(
        self, connection: _Connection, key: bytes, state: State, version: str | None, rejection: bytes | None
    ) -> None:
        params = {"key": key, "state": int(state), "version": version, "rejection": rejection}
        await self._send(connection, "resume_saga", params)
        await self._send(connection, "set_record", {"key": key, "state": int(state)})

    async def _note(self, connection: _Connection, key: bytes, what: str, detail: str | None) -> None:
        await self._send(connection, "note", {"key": key, "what": what, "detail": detail})

    async def _lines(
        self,
        connection: _Connection,
        *,
        key: bytes | None = None,
        handler: str | None = None,
        state: str | None = None,
        stale: bool = False,
        limit: int = 1,
    ) -> list[SagaLine]:
        params = {"key": key, "handler": handler, "state": state, "stale": stale, "limit": limit}
        return [SagaLine(**row) for row in await self._send(connection, "saga_list", params)]

    async def _by_prefix(self, connection: _Connection, prefix: str) -> list[bytes]:
        try:
            low, high = (bytes.fromhex(prefix.ljust(64, fill)) for fill in "0f")
        except ValueError:
            raise ConfigurationError(
                f"{prefix!r} is not the beginning of a stored key; write hexadecimal digits as `sagas list` shows "
                "them, or --handler NAME --key TEXT"
            ) from None
        rows = await self._send(connection, "saga_keys", {"low": low, "high": high, "limit": _MOST_FOUND})
        return [row["key"] for row in rows]

    async def _by_text(self, connection: _Connection, handler: str, key: str) -> list[bytes]:
        scopes = [_scope_parts(row["name"]) for row in await self._send(connection, "scopes", {})]
        digests = [keys.digest(app, tenant, name, key) for app, tenant, name in scopes if name == handler]
        return [row["key"] for row in await self._send(connection, "read", {"keys": digests})]

    async def _send(self, connection: _Connection, name: str, params: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        cursor = await connection.execute(self._queries[name], params)
        return await cursor.fetchall() if cursor.description else []


def _scope_parts(scope: str) -> tuple[str, str | None, str]:
    """App, tenant and handler of a scope's name: the inverse of `keys.scope_name`."""
    app, tenant, handler = scope.split("/")
    return unquote(app), None if tenant == "-" else unquote(tenant), unquote(handler)


def _step(row: Mapping[str, Any]) -> StepLine:
    return StepLine(
        name=row["name"],
        kind=_word(StepKind(row["kind"])),
        state=_word(StepState(row["state"])),
        has_undo=row["has_undo"],
        overlapped=row["overlapped"],
        token=row["token"],
        attempts=row["attempt"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        seconds=_seconds(row["started_at"], row["finished_at"]),
        undo_seconds=_seconds(row["undo_at"], row["undone_at"]),
        output=_text(row["output"]),
    )


def _seconds(began: datetime | None, ended: datetime | None) -> float | None:
    return None if began is None or ended is None else (ended - began).total_seconds()


def _word(value: State | StepKind | StepState) -> str:
    return value.name.lower().replace("_", " ")


def _text(body: bytes | None) -> str | None:
    return None if body is None else body.decode("utf-8", "backslashreplace")
