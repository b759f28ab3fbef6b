"""LeaseStore on Postgres: sagas by lease and token.

Each write is one transaction that first locks the saga's row (`fence`, FOR SHARE) with the holder's token, worker and
phase; takeover and everything that changes the phase lock it FOR UPDATE. So a zombie finds no row, and a takeover waits
for, or passes over, what is still being written. The transactions are sealed as the joined ones are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import psycopg

from idemconsumer import _headers
from idemconsumer._model import Found, Mark, Message, State, StepKind, StepState, StoredResult
from idemconsumer.errors import Fenced
from idemconsumer.ports import Claim, DeadLetter, Holding, StepRow
from idemconsumer.stores.postgres import PostgresClaims, PostgresStore, clean, translate


class Lease(Protocol):
    """Whose sagas these are: the id of this process's row in `worker`, replaced after a lost lease."""

    @property
    def worker(self) -> int: ...


class PostgresLeases:
    """See `ports.LeaseStore`."""

    def __init__(self, store: PostgresStore, lease: Lease) -> None:
        self._store = store
        self._lease = lease

    # -------------------------------------------------------------------------------------------------- who holds what
    async def begin(self, claim: Claim, message: Message, handler: str, version: str | None) -> Found | Holding:
        worker = self._lease.worker
        async with self._store.transaction(group=1) as claims:
            (found,) = await claims.claim([claim], state=State.PROCESSING)
            if found is not Mark.CLAIMED:
                return found
            (scope,) = await self._store.scope_ids(claims.connection, [claim])
            message_id = None if message.message_id is None else clean(message.message_id)
            rows = await claims.send(
                "begin_saga",
                {
                    "key": claim.key,
                    "scope": scope,
                    "handler": handler,
                    "worker": worker,
                    "version": version,
                    "source": clean(message.source),
                    "position": clean(message.position),
                    "message_id": message_id,
                    "body": message.body,
                    "headers": _headers.encode(message.headers),
                },
            )
            await claims.complete([], [])
        return Holding(
            key=claim.key, scope=claim.scope, handler=handler, token=rows[0][0], worker=worker, state=State.PROCESSING,
            attempt=1, version=version, rejection=None, stale=False, message=message,
        )  # fmt: skip

    async def take(
        self, handlers: Sequence[str], limit: int, *, held: Sequence[bytes] = (), key: bytes | None = None
    ) -> list[Holding]:
        worker = self._lease.worker
        params = {"handlers": list(handlers), "limit": limit, "key": key, "worker": worker, "held": list(held)}
        return [_holding(row, worker) for row in await self._store.alone("take_sagas", params)]

    async def retake(self, key: bytes, token: int | None) -> Holding | None:
        worker = self._lease.worker
        rows = await self._store.alone("retake_saga", {"key": key, "token": token, "worker": worker})
        return _holding(rows[0], worker) if rows else None

    async def steps(self, key: bytes) -> list[StepRow]:
        return [_step_row(*row) for row in await self._store.alone("steps", {"key": key})]

    # ------------------------------------------------------------------------------------------------- fenced writes
    @asynccontextmanager
    async def _fenced(self, holding: Holding, lock: str = "fence") -> AsyncIterator[PostgresClaims]:
        """A transaction that begins by locking the saga's row. Fenced when it is not ours any more."""
        async with self._store.transaction(group=1) as claims:
            try:
                await claims.begin()
            except psycopg.Error as error:
                raise translate(claims.connection, error, ours=True) from error
            params = {"key": holding.key, "token": holding.token, "worker": holding.worker, "state": int(holding.state)}
            if not await claims.send(lock, params):
                raise Fenced("the saga has another owner, or another phase")
            yield claims

    @asynccontextmanager
    async def step(self, holding: Holding, name: str, *, has_undo: bool, undo: bool) -> AsyncIterator[PostgresStep]:
        async with self._fenced(holding) as claims:
            state = StepState.UNDONE if undo else StepState.DONE
            await claims.send("begin_step", _step(holding, name, StepKind.TX, state, has_undo))
            yield PostgresStep(claims, holding, name, has_undo=has_undo, undo=undo)

    async def intend(self, holding: Holding, name: str, *, has_undo: bool, undo: bool) -> int:
        state = StepState.UNDO_INTENT if undo else StepState.INTENT
        async with self._fenced(holding) as claims:
            ((attempt,),) = await claims.send("begin_step", _step(holding, name, StepKind.CALL, state, has_undo))
            await claims.complete([], [])
        return int(attempt)

    async def record(
        self, holding: Holding, name: str, kind: StepKind, state: StepState, output: StoredResult | None,
        *, has_undo: bool, overlapped: bool,
    ) -> None:  # fmt: skip
        async with self._fenced(holding) as claims:
            if state is StepState.UNDONE:
                await claims.send("finish_undo", {"key": holding.key, "name": name, "token": holding.token})
            else:
                await claims.send("finish_step", _finished(holding, name, kind, state, output, has_undo, overlapped))
            await claims.complete([], [])

    async def complete(self, holding: Holding, state: State, result: StoredResult | None) -> None:
        async with self._fenced(holding, "own") as claims:
            await claims.send("set_record", {"key": holding.key, "state": int(state)})
            await claims.send("end_saga", {"key": holding.key})
            await claims.complete([] if result is None else [(holding.key, result)], [])

    async def undo(self, holding: Holding, rejection: StoredResult) -> Holding | None:
        async with self._fenced(holding, "own") as claims:
            ((open_intents,),) = await claims.send("open_intents", {"key": holding.key})
            if open_intents:
                return None
            await claims.send("set_undoing", {"key": holding.key, "rejection": rejection.body})
            await claims.send("set_record", {"key": holding.key, "state": int(State.UNDOING)})
            await claims.complete([], [])
        return replace(holding, state=State.UNDOING, rejection=rejection.body, attempt=1)

    async def release(self, holding: Holding, delay: float, error: str | None, *, count: bool) -> None:
        async with self._fenced(holding, "own") as claims:
            error = None if error is None else clean(error)
            params = {"key": holding.key, "delay": delay, "error": error, "back": 0 if count else 1}
            await claims.send("release_saga", params)
            await claims.complete([], [])

    async def park(self, holding: Holding, letter: DeadLetter) -> None:
        async with self._fenced(holding, "own") as claims:
            await claims.send("park_saga", {"key": holding.key, "reason": letter.reason, "error": clean(letter.error)})
            await claims.send("set_record", {"key": holding.key, "state": int(State.DEAD)})
            await claims.write_letter(letter, holding.key)
            await claims.complete([], [])


class PostgresStep:
    """See `ports.OpenStep`."""

    def __init__(self, claims: PostgresClaims, holding: Holding, name: str, *, has_undo: bool, undo: bool) -> None:
        self._claims = claims
        self._holding = holding
        self._name = name
        self._has_undo = has_undo
        self._undo = undo
        self.tx = claims.tx
        self.check = claims.check
        self.diagnose = claims.diagnose

    async def finish(self, output: StoredResult | None, *, overlapped: bool) -> None:
        holding, name = self._holding, self._name
        if self._undo:
            last = "finish_undo", {"key": holding.key, "name": name, "token": holding.token}
        else:
            done = _finished(holding, name, StepKind.TX, StepState.DONE, output, self._has_undo, overlapped)
            last = "finish_step", done
        await self._claims.complete([], [], last=last)


def _step(holding: Holding, name: str, kind: StepKind, state: StepState, has_undo: bool) -> dict[str, Any]:
    return {
        "key": holding.key, "name": name, "kind": int(kind), "state": int(state), "has_undo": has_undo,
        "token": holding.token,
    }  # fmt: skip


def _finished(
    holding: Holding, name: str, kind: StepKind, state: StepState, output: StoredResult | None, has_undo: bool,
    overlapped: bool,
) -> dict[str, Any]:  # fmt: skip
    return _step(holding, name, kind, state, has_undo) | {
        "overlapped": overlapped,
        "output": None if output is None else output.body,
        "content_type": None if output is None else output.content_type,
    }


def _step_row(
    name: str, kind: int, state: int, has_undo: bool, overlapped: bool, position: int | None, attempt: int,
    output: bytes | None, content_type: str | None,
) -> StepRow:  # fmt: skip
    stored = None if output is None else StoredResult(output, content_type or "")
    return StepRow(name, StepKind(kind), StepState(state), has_undo, overlapped, position, attempt, stored)


def _holding(row: tuple[Any, ...], worker: int) -> Holding:
    (key, handler, token, state, attempt, version, rejection, source, position, message_id, body, headers, scope,
     stale) = row  # fmt: skip
    message = Message(source, body, _headers.decode(headers), message_id=message_id, position=position)
    return Holding(
        key=key, scope=scope, handler=handler, token=token, worker=worker, state=State(state), attempt=attempt,
        version=version, rejection=rejection, stale=stale, message=message,
    )  # fmt: skip
