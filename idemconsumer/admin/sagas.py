"""Queries about sagas, and decisions about those that wait for a person.

A decision is one transaction of the store, with its guard, seal and checked COMMIT. It locks the saga's row first, so
it waits for an open step (L2), and meanwhile workers that look for sagas pass over this one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal
from urllib.parse import unquote

import psycopg

from idemconsumer.admin.dead_letters import connected
from idemconsumer.admin.saga_views import SagaDetail, SagaLine, detail
from idemconsumer.errors import ConfigurationError, Contention, StoreUnavailable
from idemconsumer.message import codecs, keys
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.saga import ANY_VERSION
from idemconsumer.rules.values import State
from idemconsumer.sql.queries import load, misconfigured
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.pool import Pool

ABANDONED: Final = "abandoned"  # the rejection's code
_LONGEST_DECISION: Final = 30.0  # seconds; it runs no handler, and waits for a lock no longer than any claim does
_MOST_FOUND: Final = 5
_Connection = psycopg.AsyncConnection[dict[str, Any]]


class SagaAdmin:
    """Queries and decisions in one schema, with a new connection for each call.

    Raises StoreUnavailable, and ConfigurationError when the schema is not migrated, or when a saga does not exist or is
    not in a state that allows a decision.
    """

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema
        self._queries = load(schema)

    # ---------------------------------------------------------------------------------------------------------- queries
    async def sagas(
        self,
        *,
        handler: str | None = None,
        state: Literal["processing", "undoing", "dead"] | None = None,
        stale: bool = False,
        limit: int = 50,
    ) -> list[SagaLine]:
        """Sagas that have not ended, newest first, at most `limit`."""
        async with connected(self._dsn, self._schema) as connection:
            return await self._lines(connection, handler=handler, state=state, stale=stale, limit=limit)

    async def find(self, *, prefix: str | None = None, handler: str | None = None, key: str | None = None) -> bytes:
        """The one stored key that begins with `prefix` (hex), or that `handler` stores for the text `key`, in any
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
            raise ConfigurationError(f"{what} matches several records: {several}…; write more digits")
        return found[0]

    async def saga(self, key: bytes) -> SagaDetail:
        async with connected(self._dsn, self._schema) as connection:
            records = await self._rows(connection, "saga_record", {"key": key})
            if not records:
                raise ConfigurationError(f"there is no record {key.hex()[:12]}")
            lines = await self._lines(connection, key=key)
            steps = await self._rows(connection, "saga_steps", {"key": key})
            history = await self._rows(connection, "saga_history", {"key": key})
        return detail(key, records[0], lines[0] if lines else None, steps, history)

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
        return [SagaLine(**row) for row in await self._rows(connection, "saga_list", params)]

    async def _by_prefix(self, connection: _Connection, prefix: str) -> list[bytes]:
        try:
            low, high = (bytes.fromhex(prefix.ljust(64, fill)) for fill in "0f")
        except ValueError:
            raise ConfigurationError(
                f"{prefix!r} is not the beginning of a stored key; write hexadecimal digits as `sagas list` shows "
                "them, or --handler NAME --key TEXT"
            ) from None
        rows = await self._rows(connection, "saga_keys", {"low": low, "high": high, "limit": _MOST_FOUND})
        return [row["key"] for row in rows]

    async def _by_text(self, connection: _Connection, handler: str, key: str) -> list[bytes]:
        scopes = [_scope_parts(row["name"]) for row in await self._rows(connection, "scopes", {})]
        digests = [keys.digest(app, tenant, name, key) for app, tenant, name in scopes if name == handler]
        return [row["key"] for row in await self._rows(connection, "read", {"keys": digests})]

    async def _rows(self, connection: _Connection, name: str, params: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        return await (await connection.execute(self._queries[name], params)).fetchall()

    # ------------------------------------------------------------------------------------------------------ decisions
    async def resume(self, key: bytes, *, accept_version: bool = False) -> None:
        """Make it due now, with all its attempts again: any worker continues it, or its undo.

        `accept_version`: with the steps and the version that its handler has now. Refused while a worker runs it.
        """
        async with self._deciding(key) as (claims, state, _):
            await _note(claims, key, "resumed", "with the present handler" if accept_version else None)
            await _set_free(claims, key, state, version=ANY_VERSION if accept_version else None)
            await claims.complete([], [])

    async def abandon(self, key: bytes, *, undo: bool) -> None:
        """The saga ends FAILED, with the rejection `abandoned`: at once, or after a worker has undone its finished
        steps. A call with an unknown outcome is not undone. Refused while a worker runs it."""
        abandoned = codecs.encode_rejection(ABANDONED, None)
        async with self._deciding(key) as (claims, _, rejection):
            await _note(claims, key, "abandoned", "to be undone" if undo else "as it is")
            results = []
            if undo:  # the undos come from a replay of the handler as it is now; without them it is parked again
                await _set_free(claims, key, State.UNDOING, version=ANY_VERSION, rejection=abandoned.body)
            else:
                await claims.send("set_record", {"key": key, "state": int(State.FAILED)})
                await claims.send("end_saga", {"key": key})
                results = [(key, StoredResult(rejection or abandoned.body, abandoned.content_type))]
            await claims.complete(results, [])

    @asynccontextmanager
    async def _deciding(self, key: bytes) -> AsyncIterator[tuple[PostgresClaims, State, bytes | None]]:
        """A transaction that holds the saga's row, with the saga's phase and rejection; the caller completes it."""
        pool = Pool(self._dsn, self._schema, connections=1, longest_run=_LONGEST_DECISION)
        await pool.open()
        try:
            async with transaction(pool, group=1) as claims:
                await claims.begin()
                if not await claims.send("lock_saga", {"key": key}):
                    raise ConfigurationError(f"saga {key.hex()[:12]} has ended; there is nothing to decide")
                ((phase, rejection, owner, held),) = await claims.send("locked_saga", {"key": key})
                if held:
                    raise ConfigurationError(
                        f"saga {key.hex()[:12]} is being run by {owner}; wait for it to end, or stop the worker"
                    )
                await claims.send("forget_dead", {"key": key})
                yield claims, State(phase), rejection
        except Contention as error:  # a rival holds a lock: nothing was written, so the decision can be retried
            raise StoreUnavailable(str(error)) from error
        except psycopg.Error as error:
            if (cause := misconfigured(error, self._schema)) is not None:
                raise cause from error
            raise
        finally:
            await pool.close()


async def _note(claims: PostgresClaims, key: bytes, what: str, detail: str | None) -> None:
    await claims.send("note", {"key": key, "what": what, "detail": detail})


async def _set_free(
    claims: PostgresClaims, key: bytes, state: State, *, version: str | None, rejection: bytes | None = None
) -> None:
    params = {"key": key, "state": int(state), "version": version, "rejection": rejection}
    await claims.send("resume_saga", params)
    await claims.send("set_record", {"key": key, "state": int(state)})


def _scope_parts(scope: str) -> tuple[str, str | None, str]:
    """App, tenant and handler of a scope's name: the inverse of `keys.scope_name`."""
    app, tenant, handler = scope.split("/")
    return unquote(app), None if tenant == "-" else unquote(tenant), unquote(handler)
