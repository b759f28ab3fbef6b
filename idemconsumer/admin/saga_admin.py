"""Queries about sagas, and decisions about those that wait for a person.

A decision is one transaction of the store, with its guard, seal and checked COMMIT. It locks the saga's row first, so
it waits for an open step (L2). Meanwhile workers that search for sagas skip this one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal
from urllib.parse import unquote

from idemconsumer.admin.audit import Trace, note_saga
from idemconsumer.admin.dead_letters import Admin, only, unknown_handler
from idemconsumer.admin.decisions import Cancellation, Deciding, decide, request_cancel, set_free
from idemconsumer.admin.saga_views import SagaDetail, readable, step_line, word_of
from idemconsumer.admin.sender import NamedRow, Statements, readers
from idemconsumer.admin.timeline import timeline
from idemconsumer.errors import ConfigurationError, Contention, StoreUnavailable
from idemconsumer.handlers.arguments import Done, NotDone
from idemconsumer.message import codecs, keys
from idemconsumer.message.message import StoredResult
from idemconsumer.message.sources import own_source
from idemconsumer.rules.saga import ANY_VERSION
from idemconsumer.rules.values import Signalled, State
from idemconsumer.stores.claims import PostgresClaims
from idemconsumer.stores.signals import Signal

ABANDONED: Final = "abandoned"  # the code of the rejection
_MOST_FOUND: Final = 5
_CANCEL_TRIES: Final = 6  # of ten seconds each


class SagaAdmin:
    """Queries and decisions in one schema. Concurrent calls share a few connections, and none is kept open (L57).

    Raises StoreUnavailable, and ConfigurationError if the schema is not migrated, or if a saga does not exist or is not
    in a state that allows the decision.
    """

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema)
        self._letters = Admin(dsn, schema)
        self._shared = Statements(dsn, schema, shared=readers(dsn))
        self._deciding_in = Deciding(dsn, schema)

    # ---------------------------------------------------------------------------------------------------------- queries
    async def sagas(
        self,
        *,
        handler: str | None = None,
        state: Literal["processing", "undoing", "dead"] | None = None,
        stale: bool = False,
        limit: int = 50,
    ) -> list[NamedRow]:
        """Sagas that have not ended, newest first, at most `limit`."""
        given = {"key": None, "handler": handler, "state": state, "stale": stale, "limit": limit}
        return await self._sql.rows("saga_list", **given)

    async def find(self, *, prefix: str | None = None, handler: str | None = None, key: str | None = None) -> bytes:
        """The only stored key that begins with `prefix` (hex), or under which `handler` stores the text `key`, in any
        app and tenant."""
        if prefix is not None:
            found, what = await self._by_prefix(prefix), f"{prefix!r}"
        else:
            assert handler is not None
            assert key is not None
            stored = await self._letters.stored_keys(handler, key)
            found = [row["key"] for row in await self._sql.rows("read", keys=stored)]
            what = f"handler {handler!r} and this key"
        if not found:
            unknown = None if handler is None else await unknown_handler(self._sql.dsn, self._sql.schema, handler)
            raise ConfigurationError(
                unknown or f"there is no record for {what}; `idemconsumer sagas list` shows running sagas"
            )
        return only(found, what, "records")

    async def saga(self, key: bytes) -> SagaDetail:
        if (found := await self.look_up(key)) is None:
            raise ConfigurationError(f"there is no record {key.hex()[:12]}")
        return found

    async def look_up(self, key: bytes) -> SagaDetail | None:
        """A saga in full; None if there is no record."""
        async with self._shared.sending() as send:
            records = await send("saga_record", key=key)
            if not records:
                return None
            lines = await send("saga_list", key=key, handler=None, state=None, stale=False, limit=1)
            signals = await send("saga_signals", key=key)
            parents = await send("saga_parent", key=key)
            steps = await send("saga_steps", key=key)
            history = await send("saga_history", key=key)
        record, running = records[0], lines[0] if lines else None
        state = word_of(State(record.state))
        return SagaDetail(
            key=key.hex(),
            scope=record.scope,
            state=state,
            changed_at=record.changed_at,
            parent=parents[0].parent if parents else None,
            result=readable(record.result),
            running=running,
            steps=[step_line(record.scope, key, step) for step in steps],
            signals=signals,
            timeline=timeline(running, history, steps, (record.changed_at, state)),
        )

    async def handlers(self) -> list[str]:
        """The handlers with sagas that have not ended, as `app/handler`."""
        return [f"{unquote(row['app'])}/{row['handler']}" for row in await self._sql.rows("moveable_sagas")]

    async def _by_prefix(self, prefix: str) -> list[bytes]:
        try:
            low, high = (bytes.fromhex(prefix.ljust(64, fill)) for fill in "0f")
        except ValueError:
            raise ConfigurationError(
                f"{prefix!r} is not the beginning of a stored key; write hexadecimal digits as `sagas list` shows "
                "them, or --handler NAME --key TEXT"
            ) from None
        return [row["key"] for row in await self._sql.rows("saga_keys", low=low, high=high, limit=_MOST_FOUND)]

    # ------------------------------------------------------------------------------------------------------ decisions
    async def resume(self, key: bytes, *, by: str, accept_version: bool = False) -> None:
        """Make the saga due now, with all its attempts again: any worker continues it, or its undo.

        `accept_version`: continue it with the present version of its handler. Refused while a worker runs it.
        """
        async with self._deciding(key) as (claims, state, _):
            detail = "with the present handler" if accept_version else None
            await claims.send("note", {"key": key, "what": "resumed", "detail": detail})
            await note_saga(claims, key, by, "resume", detail)
            await set_free(claims, key, state, version=ANY_VERSION if accept_version else None)
            await claims.complete([], [])

    async def abandon(self, key: bytes, *, undo: bool, by: str) -> None:
        """End the saga as FAILED, with the rejection `abandoned`: at once, or after a worker has undone its finished
        steps. A call with an unknown outcome is not undone. Refused while a worker runs the saga."""
        abandoned = codecs.encode_rejection(ABANDONED, None)
        async with self._deciding(key) as (claims, _, rejection):
            detail = "to be undone" if undo else "as it is"
            await claims.send("note", {"key": key, "what": "abandoned", "detail": detail})
            await note_saga(claims, key, by, "abandon", detail)
            results = []
            if undo:  # undos come from a replay of the present handler; under its old version it would be parked
                await set_free(claims, key, State.UNDOING, version=ANY_VERSION, rejection=abandoned.body)
            else:
                await claims.send("set_record", {"key": key, "state": int(State.FAILED)})
                await claims.send("end_saga", {"key": key})
                results = [(key, StoredResult(rejection or abandoned.body, abandoned.content_type))]
            await claims.complete(results, [])

    async def decide(
        self, key: bytes, step: str, answer: Done[Any] | NotDone, *, by: str | None, attempt: int | None = None
    ) -> None:
        """Report how a call of unknown outcome ended, or its undo if the undo was begun. The saga is then due, with all
        its attempts again (L52). Refused while a worker runs it, or if another `attempt` of the step is open. `by` is
        None if code decides: the audit is about people."""
        async with self._deciding(key) as (claims, state, _):
            await decide(claims, key, step, answer, attempt, by)
            await set_free(claims, key, state)
            await claims.complete([], [])

    async def signal(self, key: bytes, name: str, payload: object, *, by: str) -> Signalled:
        """Send a signal to the saga under this stored key."""
        async with self._sql.changing() as send:
            records = await send("saga_record", key=key)
            if not records:
                raise ConfigurationError(f"there is no record {key.hex()[:12]}")
            signal = Signal(key, records[0]["scope"], name, codecs.encode(payload, "payload", "give"))
            ((answer,),) = [row.values() for row in await send("send_signal", **signal.params)]
            if answer != Signalled.ENDED:
                await Trace(by, "signal").write(send, f"saga {key.hex()[:12]}, {name}")
        return Signalled(answer)

    async def move(self, source: tuple[str, str], to: tuple[str, str], *, by: str) -> tuple[int, int]:
        """Give the sagas of one handler to another; both are pairs of app and handler. Returns how many were moved, and
        how many were not because live workers hold them (L31).

        They keep their keys, steps and version, so the other handler must request the same steps. Not guaranteed: that
        a message that arrives again is recognised, since its key at the new handler is another one.
        """
        (from_app, from_handler), (to_app, to_handler) = source, to
        params = {"detail": f"{from_app}/{from_handler} to {to_app}/{to_handler}"}
        for side, app, handler in (("from", from_app, from_handler), ("to", to_app, to_handler)):
            params |= {
                f"{side}_app": keys.scopes_of(app)[:-1],
                f"{side}_handler": handler,
                f"{side}_source": own_source(app, handler),
            }
        async with self._sql.changing() as send:
            (row,) = await send("move_sagas", **params)
            if row["moved"]:
                await Trace(by, "move").write(send, f"{row['moved']} sagas, {params['detail']}")
        return row["moved"], row["held"]

    async def cancel(self, key: bytes, *, undo: bool, by: str | None) -> Cancellation:
        """Cancel the saga, whatever its state (L50). Waits up to a minute for the end of a step that is a transaction.
        `by` is None if code decides."""
        for attempt in range(_CANCEL_TRIES):
            try:
                async with self._deciding_in.transaction() as claims:
                    answer = await request_cancel(claims, key, undo=undo, by=by)
                    await claims.complete([], [])
                    return answer
            except StoreUnavailable as error:
                if attempt == _CANCEL_TRIES - 1 or not isinstance(error.__cause__, Contention):
                    raise
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _deciding(self, key: bytes) -> AsyncIterator[tuple[PostgresClaims, State, bytes | None]]:
        """A transaction that holds the saga's row, with its phase and rejection; the caller completes it."""
        async with self._deciding_in.transaction() as claims:
            if not await claims.send("lock_saga", {"key": key}):
                raise ConfigurationError(f"saga {key.hex()[:12]} has ended; there is nothing to decide")
            ((phase, rejection, owner, held, *_),) = await claims.send("locked_saga", {"key": key})
            if held:
                raise ConfigurationError(
                    f"saga {key.hex()[:12]} is being run by {owner}; wait for it to end, or stop the worker"
                )
            await claims.send("forget_dead", {"key": key})
            yield claims, State(phase), rejection
