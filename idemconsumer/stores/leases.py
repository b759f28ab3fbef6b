"""LeaseStore on Postgres: sagas by lease and fence token.

Each write is one transaction that first locks the saga's row (`fence`, FOR SHARE) with its fence token, worker and
phase; takeover and everything that changes the phase lock it FOR UPDATE. So a former owner finds no row, and a
takeover waits for a saga that is still being written, or passes it over. The transactions are sealed like the joined
ones. Claims, intents, outputs and completions share a transaction with those of other sagas (`shared_commits`); the
function of a `tx` step has its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, Protocol

from idemconsumer.errors import Fenced
from idemconsumer.message import keys
from idemconsumer.message.headers import decode_headers, encode_headers
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.ports.store import Claim, DeadLetter
from idemconsumer.rules.values import Found, Mark, State, StepKind, StepRow, StepState
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.literals import clean
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.shared_commits import (
    BEGIN_SAGAS,
    BEGIN_STEPS,
    END_SAGAS,
    FINISH_STEPS,
    SharedCommits,
    Write,
    send,
)

_NOT_OURS: Final = "the saga has another owner, or another phase"
_ENDED: Final = "the step has already ended, so another worker has resumed the saga"


class Lease(Protocol):
    """The owner of these sagas: the id of this process's row in `worker`, replaced after a lost lease."""

    @property
    def worker(self) -> int: ...


class PostgresLeases:
    """See `ports.LeaseStore`."""

    def __init__(self, pool: Pool, lease: Lease) -> None:
        self._pool = pool
        self._lease = lease
        self._shared = SharedCommits(pool)

    # --------------------------------------------------------------------------------------------- claims and takeovers
    async def begin(self, claim: Claim, message: Message, handler: str, version: str | None) -> Found | LeasedSaga:
        worker = self._lease.worker
        row = {
            "key": claim.key,
            "scope": claim.scope,
            "handler": handler,
            "worker": worker,
            "version": version,
            "source": clean(message.source),
            "position": clean(message.position),
            "message_id": None if message.message_id is None else clean(message.message_id),
            "body": message.body,
            "headers": encode_headers(message.headers),
        }
        write = Write(BEGIN_SAGAS, row, claim=claim)
        answer = await self._shared.write(write)
        if answer is None:
            async with transaction(self._pool, group=1) as claims:
                (found,) = await claims.claim([claim], state=State.PROCESSING)
                if found is not Mark.CLAIMED:
                    return found
                answer = (await send(claims, [write]))[write]
                await claims.complete([], [])
        if not isinstance(answer, int):
            return answer
        return LeasedSaga(
            key=claim.key, scope=claim.scope, handler=handler, token=answer, worker=worker, state=State.PROCESSING,
            attempt=1, version=version, rejection=None, stale=False, message=message, new=True,
        )  # fmt: skip

    async def own(self, key: bytes | None = None) -> list[tuple[bytes, int]]:
        rows = await self._pool.alone("own_sagas", {"worker": self._lease.worker, "key": key})
        return [(key, token) for key, token in rows]

    async def take(
        self,
        app: str,
        handlers: Sequence[str],
        limit: int,
        *,
        unheld: Sequence[tuple[bytes, int]] = (),
        key: bytes | None = None,
    ) -> list[LeasedSaga]:
        worker = self._lease.worker
        params = {
            "scopes": keys.scopes_of(app), "handlers": list(handlers), "limit": limit, "key": key, "worker": worker,
            "unheld": [key for key, _ in unheld], "tokens": [token for _, token in unheld],
        }  # fmt: skip
        return [_leased_saga(row, worker) for row in await self._pool.alone("take_sagas", params)]

    async def retake(self, key: bytes, token: int | None) -> LeasedSaga | None:
        worker = self._lease.worker
        await self._pool.alone("await_saga", {"key": key, "worker": worker})
        rows = await self._pool.alone("retake_saga", {"key": key, "token": token, "worker": worker})
        return _leased_saga(rows[0], worker) if rows else None

    async def steps(self, key: bytes) -> list[StepRow]:
        return [_step_row(*row) for row in await self._pool.alone("steps", {"key": key})]

    # ------------------------------------------------------------------------------------------------- fenced writes
    @asynccontextmanager
    async def _locked(self, saga: LeasedSaga) -> AsyncIterator[PostgresClaims]:
        """A transaction that begins by locking the saga's row FOR UPDATE. Raises Fenced when it is no longer ours."""
        async with transaction(self._pool, group=1) as claims:
            await claims.begin()
            await _lock(claims, "fence_whole", saga)
            yield claims

    @asynccontextmanager
    async def step(self, saga: LeasedSaga, name: str, *, has_undo: bool, undo: bool) -> AsyncIterator[PostgresStep]:
        async with transaction(self._pool, group=1) as claims:
            state = StepState.UNDO_INTENT if undo else StepState.DONE
            attempt = await claims.begin_step(_step(saga, name, StepKind.TX, state, has_undo))
            if attempt is None:
                raise Fenced(_NOT_OURS)
            if not attempt:
                raise Fenced(_ENDED)
            yield PostgresStep(claims, saga, name, undo=undo)

    async def intend(self, saga: LeasedSaga, name: str, *, has_undo: bool, undo: bool) -> int:
        state = StepState.UNDO_INTENT if undo else StepState.INTENT
        return await self._commit(saga, Write(BEGIN_STEPS, _step(saga, name, StepKind.CALL, state, has_undo)))

    async def record(
        self, saga: LeasedSaga, name: str, kind: StepKind, state: StepState, output: StoredResult | None,
        *, has_undo: bool, overlapped: bool,
    ) -> None:  # fmt: skip
        row = _step(saga, name, kind, state, has_undo) | _finished(output, overlapped)
        await self._commit(saga, Write(FINISH_STEPS, row))

    async def complete(self, saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        write = Write(END_SAGAS, _fence(saga) | {"final": int(state)}, result=result)
        await self._commit(saga, write)

    async def _commit(self, saga: LeasedSaga, write: Write) -> int:
        """Commit it together with other sagas' writes, or alone if that left it out."""
        answer = await self._shared.write(write)
        if answer is None:
            async with transaction(self._pool, group=1) as claims:
                answer = await _alone(claims, saga, write)
                await claims.complete([] if write.result is None else [(saga.key, write.result)], [])
        assert isinstance(answer, int)
        return answer

    async def undo(self, saga: LeasedSaga, rejection: StoredResult) -> LeasedSaga | None:
        async with self._locked(saga) as claims:
            ((open_intents,),) = await claims.send("open_intents", {"key": saga.key})
            if open_intents:
                return None
            await claims.send("set_undoing", {"key": saga.key, "rejection": rejection.body})
            await claims.send("set_record", {"key": saga.key, "state": int(State.UNDOING)})
            await claims.complete([], [])
        return replace(saga, state=State.UNDOING, rejection=rejection.body, attempt=1)

    async def release(self, saga: LeasedSaga, delay: float, error: str | None, *, count: bool) -> None:
        async with self._locked(saga) as claims:
            error = None if error is None else clean(error)
            params = {"key": saga.key, "delay": delay, "error": error, "back": 0 if count else 1}
            await claims.send("release_saga", params | {"worker": saga.worker, "stale": saga.stale})
            await claims.complete([], [])

    async def park(self, saga: LeasedSaga, letter: DeadLetter) -> None:
        async with self._locked(saga) as claims:
            params = {"key": saga.key, "reason": letter.reason, "error": clean(letter.error)}
            await claims.send("park_saga", params | {"worker": saga.worker})
            await claims.send("set_record", {"key": saga.key, "state": int(State.DEAD)})
            await claims.write_letter(letter, saga.key)
            await claims.complete([], [])

    async def note(self, key: bytes, what: str, detail: str | None) -> None:
        detail = None if detail is None else clean(detail)
        await self._pool.alone("note", {"key": key, "what": what, "detail": detail})

    @asynccontextmanager
    async def completion(self, saga: LeasedSaga) -> AsyncIterator[PostgresCompletion]:
        async with self._locked(saga) as claims:
            # First, so that a COMMIT inside the function fails at the guard.
            await claims.send("set_record", {"key": saga.key, "state": int(State.COMPLETED)})
            yield PostgresCompletion(claims, saga)


class PostgresCompletion:
    """See `ports.OpenCompletion`."""

    def __init__(self, claims: PostgresClaims, saga: LeasedSaga) -> None:
        self._claims = claims
        self._key = saga.key
        self.tx = claims.tx
        self.check = claims.check
        self.diagnose = claims.diagnose

    async def finish(self, result: StoredResult | None) -> None:
        self._claims.end()
        await self._claims.send("note", {"key": self._key, "what": "reconciled", "detail": "done"})
        await self._claims.send("end_saga", {"key": self._key})
        await self._claims.complete([] if result is None else [(self._key, result)], [])


class PostgresStep:
    """See `ports.OpenStep`."""

    def __init__(self, claims: PostgresClaims, saga: LeasedSaga, name: str, *, undo: bool) -> None:
        self._claims = claims
        self._saga = saga
        self._name = name
        self._undo = undo
        self.tx = claims.tx
        self.check = claims.check
        self.diagnose = claims.diagnose

    async def finish(self, output: StoredResult | None, *, overlapped: bool) -> None:
        state = StepState.UNDONE if self._undo else StepState.DONE
        finished = {"key": self._saga.key, "token": self._saga.token, "name": self._name, "state": int(state)}
        await self._claims.complete([], [], last=("finish_step", finished | _finished(output, overlapped)))


async def _alone(claims: PostgresClaims, saga: LeasedSaga, write: Write) -> int:
    """Write it in a transaction of its own. If it is left out, wait for the saga's row and repeat, or raise why."""
    await claims.begin()
    answer = (await send(claims, [write])).get(write)
    if answer is None:
        await _lock(claims, "fence_whole" if write.statement == END_SAGAS else "fence", saga)
        answer = (await send(claims, [write])).get(write)
    if answer is None:
        raise Fenced(_ENDED)
    return answer


async def _lock(claims: PostgresClaims, lock: str, saga: LeasedSaga) -> None:
    if not await claims.send(lock, _fence(saga)):
        raise Fenced(_NOT_OURS)


def _fence(saga: LeasedSaga) -> dict[str, Any]:
    return {"key": saga.key, "token": saga.token, "worker": saga.worker, "phase": int(saga.state)}


def _step(saga: LeasedSaga, name: str, kind: StepKind, state: StepState, has_undo: bool) -> dict[str, Any]:
    return _fence(saga) | {"name": name, "kind": int(kind), "state": int(state), "has_undo": has_undo}


def _finished(output: StoredResult | None, overlapped: bool) -> dict[str, Any]:
    return {
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


def _leased_saga(row: tuple[Any, ...], worker: int) -> LeasedSaga:
    (key, handler, token, state, attempt, version, rejection, source, position, message_id, body, headers, scope,
     stale) = row  # fmt: skip
    message = Message(source, body, decode_headers(headers), message_id=message_id, position=position)
    return LeasedSaga(
        key=key, scope=scope, handler=handler, token=token, worker=worker, state=State(state), attempt=attempt,
        version=version, rejection=rejection, stale=stale, message=message,
    )  # fmt: skip
