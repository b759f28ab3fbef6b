"""LeaseStore on Postgres: sagas by lease and fence token.

Each write is one transaction that first locks the saga's row (`fence`, FOR SHARE) with its fence token, worker and
phase; takeover and everything that changes the phase lock it FOR UPDATE. So a former owner finds no row, and a
takeover waits for a saga that is still being written, or passes it over. The transactions are sealed like the joined
ones. Claims, intents, outputs and completions share a transaction with those of other sagas (`shared_commits`); the
function of a `tx` step has its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final, Protocol

from msgspec.structs import replace

from idemconsumer.errors import SIGNAL_TIMEOUT, Fenced, SagaCancelled
from idemconsumer.message import codecs, keys
from idemconsumer.message.delivered import encode_delivered, with_delivered
from idemconsumer.message.headers import decode_headers, encode_headers
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.message.origin import parent_of
from idemconsumer.ports.leases import Begun, Kinship, LeasedSaga, Look
from idemconsumer.ports.store import Claim, DeadLetter
from idemconsumer.rules.saga import ANY_VERSION, CANCELLED, CONFLICT
from idemconsumer.rules.values import Found, Record, State, StepKind, StepRow, StepState
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.columns import Statement, stored_row
from idemconsumer.stores.literals import clean
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.shared_commits import (
    BEGIN_SAGAS,
    BEGIN_STEPS,
    END_SAGAS,
    FINISH_STEPS,
    SharedCommits,
    Write,
    commit,
    send,
)
from idemconsumer.stores.shared_reads import SharedReads, step_row

_AHEAD: Final = 5.0  # seconds; what is due later is found by a later look
VERSION_GRACE: Final = 600.0  # seconds; a deployment that is taken back brings a version back
_ANY: Final[Mapping[tuple[str, str], str | None]] = MappingProxyType({})
_NOT_OURS: Final = "the saga has another owner, or another phase"
_ENDED: Final = "the step has already ended, so another worker has resumed the saga"


class Lease(Protocol):
    """The owner of these sagas: the id of this process's row in `worker`, replaced after a lost lease."""

    @property
    def worker(self) -> int: ...

    async def good(self, timeout: float) -> None:
        """Return when it is good for a step that may run for so many seconds (L59)."""
        ...


class PostgresLeases:
    """See `ports.LeaseStore`."""

    def __init__(
        self,
        pool: Pool,
        lease: Lease,
        versions: Mapping[tuple[str, str], str | None] = _ANY,
        *,
        grace: float = VERSION_GRACE,
        build: str = "",
    ) -> None:
        """`versions`: of what this process runs, by app and handler; others are taken whatever their version.
        `grace`: for how many seconds a version that no worker runs is waited for (L28). `build`: of this process's code
        (L29)."""
        self._pool = pool
        self._lease = lease
        self._versions = versions
        self._grace = grace
        self._build = build
        self._shared = SharedCommits(pool)
        self._reads = SharedReads(pool)

    # --------------------------------------------------------------------------------------------- claims and takeovers
    async def begin(self, claim: Claim, message: Message, handler: str, version: str | None) -> Found | LeasedSaga:
        worker = self._lease.worker
        row = {
            "handler": handler,
            "worker": worker,
            "version": version,
            "source": clean(message.source),
            "position": clean(message.position),
            "message_id": None if message.message_id is None else clean(message.message_id),
            "body": message.body,
            "headers": encode_headers(message.headers),
            "delivered": encode_delivered(message),
            "parent": parent_of(message),
        }
        write = Write(BEGIN_SAGAS, row, claim=claim)
        answer = await self._shared.write(write)
        if answer is None:
            async with transaction(self._pool, group=1) as claims:
                answer = (await commit(claims, [write]))[write]
        assert answer is not None
        if not isinstance(answer, int):
            return answer
        return LeasedSaga(
            key=claim.key, scope=claim.scope, handler=handler, token=answer, worker=worker, state=State.PROCESSING,
            attempt=1, version=version, rejection=None, stale=False, message=message, new=True,
            begun=time.monotonic(),
        )  # fmt: skip

    async def own(self, key: bytes | None = None) -> list[tuple[bytes, int]]:
        rows = await self._pool.alone("own_sagas", {"worker": self._lease.worker, "key": key})
        return [(key, token) for key, token in rows]

    async def look(self, app: str, handlers: Sequence[str], queues: Sequence[str] = ()) -> Look:
        asked = self._ours(app, handlers) | {"ahead": _AHEAD, "queues": list(queues)}
        rows = await self._pool.read("look_for_sagas" if queues else "look_for_sagas_alone", asked)
        own = [(key, token) for _, _, key, token, *_ in rows if key is not None]
        due = {handler: seconds for handler, seconds, *_ in rows if handler is not None}
        cancelled = [key for _, _, key, _, cancel, _ in rows if key is not None and cancel is not None]
        return Look(own, due, cancelled, {queue: seconds for _, seconds, *_, queue in rows if queue is not None})

    async def take(
        self,
        app: str,
        handlers: Sequence[str],
        limit: int,
        *,
        unheld: Sequence[tuple[bytes, int]] = (),
        key: bytes | None = None,
    ) -> list[LeasedSaga]:
        params = self._ours(app, handlers)
        params |= {"unheld": [key for key, _ in unheld], "tokens": [token for _, token in unheld]}
        statement, more = ("take_sagas", {"limit": limit}) if key is None else ("take_saga", {"key": key})
        rows = await self._pool.alone(statement, params | more)
        return [_leased_saga(row, params["worker"]) for row in rows]

    def _ours(self, app: str, handlers: Sequence[str]) -> dict[str, Any]:
        """What says which sagas this process may run."""
        return {
            "scopes": keys.scopes_of(app), "app": app, "worker": self._lease.worker, "grace": self._grace,
            "handlers": list(handlers), "versions": [self._version(app, handler) for handler in handlers],
        }  # fmt: skip

    def _version(self, app: str, handler: str) -> str:
        return (self._versions[app, handler] or "") if (app, handler) in self._versions else ANY_VERSION

    async def superseded(self, app: str, saga: LeasedSaga) -> bool:
        return bool(await self._pool.alone("left_to_others", self._others(app, saga)))

    def _others(self, app: str, saga: LeasedSaga) -> dict[str, Any]:
        its = {"key": saga.key, "app": app, "handler": saga.handler, "version": saga.version}
        return its | {"grace": self._grace, "build": self._build}

    async def leave(self, app: str, saga: LeasedSaga, error: str, delay: float) -> float | None:
        params = self._others(app, saga) | {"error": clean(error), "delay": delay, "stale": saga.stale}
        params |= {"token": saga.token, "worker": saga.worker, "heeded": saga.cancel is not None}
        async with self._locked(saga, ends=False) as claims:
            left = await claims.send("leave_saga", params)
            await claims.complete([], [])
        return None if not left else 0.0 if left[0][0] else delay

    async def retake(self, key: bytes, token: int | None) -> LeasedSaga | None:
        worker = self._lease.worker
        await self._pool.alone("await_saga", {"key": key, "worker": worker})
        rows = await self._pool.alone("retake_saga", {"key": key, "token": token, "worker": worker})
        return _leased_saga(rows[0], worker) if rows else None

    async def count(self, saga: LeasedSaga) -> None:
        async with self._locked(saga) as claims:
            await claims.complete([], [], more=[("count_saga", {"key": saga.key})])

    async def steps(self, key: bytes, window: int = 0) -> list[StepRow]:
        return await self._reads.steps(key, window)

    async def outputs(self, key: bytes, names: Sequence[str]) -> dict[str, StoredResult]:
        rows = await self._pool.alone("outputs", {"key": key, "names": list(names)})
        return {name: StoredResult(output, content_type or "") for name, output, content_type in rows}

    # ------------------------------------------------------------------------------------------------- fenced writes
    @asynccontextmanager
    async def _locked(self, saga: LeasedSaga, *, ends: bool = True) -> AsyncIterator[PostgresClaims]:
        """A transaction that begins by locking the saga's row FOR UPDATE. Raises Fenced when it is no longer ours, and
        SagaCancelled if it `ends` the saga or its phase, and is to be cancelled by now (L50)."""
        async with transaction(self._pool, group=1) as claims:
            (locked,) = await claims.begin(("fence_whole", _fence(saga)))
            _see_whole(locked, saga, ends=ends)
            yield claims

    async def _at_once(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """One statement that fences itself, as a whole transaction (L9): its rows."""
        async with transaction(self._pool, group=1) as claims:
            (answer,) = await claims.commit([(name, params)])
            return claims.rows(answer)

    @asynccontextmanager
    async def step(
        self,
        saga: LeasedSaga,
        name: str,
        *,
        has_undo: bool,
        undo: bool,
        timeout: float = 0.0,
        arguments: bytes | None = None,
    ) -> AsyncIterator[PostgresStep]:
        await self._lease.good(timeout)
        async with transaction(self._pool, group=1) as claims:
            await self._lease.good(timeout)  # a connection may have been waited for
            state = StepState.UNDO_INTENT if undo else StepState.DONE
            attempt = await claims.begin_step(_step(saga, name, StepKind.TX, state, has_undo, arguments))
            if attempt is None:
                raise Fenced(_NOT_OURS)
            if not attempt:
                raise Fenced(_ENDED)
            yield PostgresStep(claims, saga, name, undo=undo)

    async def intend(
        self,
        saga: LeasedSaga,
        name: str,
        *,
        has_undo: bool,
        undo: bool,
        overlapped: bool = False,
        timeout: float = 0.0,
        arguments: bytes | None = None,
    ) -> int:
        await self._lease.good(timeout)
        state = StepState.UNDO_INTENT if undo else StepState.INTENT
        row = _step(saga, name, StepKind.CALL, state, has_undo, arguments) | {"placed": not overlapped}
        attempt = await self._commit(saga, Write(BEGIN_STEPS, row))
        await self._lease.good(timeout)  # the commit may have been slow
        return attempt

    async def record(
        self, saga: LeasedSaga, name: str, kind: StepKind, state: StepState, output: StoredResult | None,
        *, has_undo: bool, overlapped: bool, arguments: bytes | None = None,
    ) -> int:  # fmt: skip
        row = _step(saga, name, kind, state, has_undo, arguments) | _finished(output, overlapped)
        return await self._commit(saga, Write(FINISH_STEPS, row))

    async def wait(
        self, saga: LeasedSaga, name: str, kind: StepKind, seconds: float, signal: str | None, *,
        child: bytes | None = None, overlapped: bool, closes: Sequence[str] = (),
    ) -> StepRow | float:  # fmt: skip
        timed_out = codecs.encode_rejection(SIGNAL_TIMEOUT, {"signal": signal})
        given = _fence(saga) | {"name": name, "seconds": seconds, "signal": signal, "overlapped": overlapped}
        given |= {"closes": list(closes)}
        given |= {"timed_out": timed_out.body, "timed_out_type": timed_out.content_type}
        if child is None:
            rows = await self._at_once("await_step", given)
        else:
            rows = await self._at_once("await_child", given | _conflict(child))
        if not rows:
            raise Fenced(_NOT_OURS)
        ((state, overlapped, position, output, content_type, left),) = rows
        if position is None:
            return float(left)
        return step_row(name, kind, state, False, overlapped, position, 1, output, content_type, 0)

    async def pause(self, saga: LeasedSaga, waits: Sequence[str], at_most: float | None) -> float:
        given = _fence(saga) | {"names": list(waits), "at_most": at_most}
        ((seconds,),) = await self._at_once("pause_saga", given)
        if seconds is None:
            raise Fenced(_NOT_OURS)
        return float(seconds)

    async def kinship(self, key: bytes, child: bytes) -> Kinship:
        (row,) = await self._pool.alone("kinship", {"key": key, "child": child})
        return Kinship(*row)

    async def stop_child(self, saga: LeasedSaga, child: bytes, scope: str, queued: tuple[str, str]) -> State:
        cancelled = codecs.encode_rejection(CANCELLED, None)
        given = {"child": child, "body": cancelled.body, "content_type": cancelled.content_type, "scope": scope}
        given |= {"queue": queued[0], "given": queued[1]}
        ((state,),) = await self._at_once("stop_child", _fence(saga) | given)
        if state is None:
            raise Fenced(_NOT_OURS)
        return State(state)

    async def pause_undo(self, saga: LeasedSaga, child: bytes) -> float:
        ((seconds,),) = await self._at_once("pause_undo", _fence(saga) | {"child": child})
        if seconds is None:
            raise Fenced(_NOT_OURS)
        return float(seconds)

    async def complete(self, saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        row = _fence(saga) | {"final": int(state), **stored_row(result)}
        await self._commit(saga, Write(END_SAGAS, row))

    async def _commit(self, saga: LeasedSaga, write: Write) -> int:
        """Commit it together with other sagas' writes, or alone if that left it out."""
        answer = await self._shared.write(write)
        if answer is None:
            async with transaction(self._pool, group=1) as claims:
                answer = await _alone(claims, saga, write)
                await claims.complete([], [])
        assert isinstance(answer, int)
        return answer

    async def undo(self, saga: LeasedSaga, rejection: StoredResult, added: Sequence[str] = ()) -> LeasedSaga | None:
        key = {"key": saga.key}
        more: list[Statement] = [("add_undos", key | {"names": list(added)})] if added else []
        more.append(("set_undoing", key | {"rejection": rejection.body}))
        more.append(("set_record", key | {"state": int(State.UNDOING)}))
        async with transaction(self._pool, group=1) as claims:
            locked, ((open_intents,),) = await claims.begin(("fence_whole", _fence(saga)), ("open_intents", key))
            _see_whole(locked, saga)
            if open_intents:
                return None
            await claims.complete([], [], more=more)
        return replace(saga, state=State.UNDOING, rejection=rejection.body, attempt=1, cancel=None)

    async def release(
        self, saga: LeasedSaga, delay: float, error: str | None, *, count: bool, held: bool = False
    ) -> None:
        async with self._locked(saga, ends=False) as claims:
            error = None if error is None else clean(error)
            params = {"key": saga.key, "delay": delay, "error": error, "back": 0 if count else 1}
            params |= {"token": saga.token, "worker": saga.worker, "stale": saga.stale}
            params |= {"heeded": saga.cancel is not None, "held": held}
            await claims.complete([], [], more=[("release_saga", params)])

    async def park(self, saga: LeasedSaga, letter: DeadLetter) -> int:
        async with self._locked(saga) as claims:
            params = {"key": saga.key, "reason": letter.reason, "error": clean(letter.error), "worker": saga.worker}
            dead = {"key": saga.key, "state": int(State.DEAD)}
            number = await claims.write_letter(letter, saga.key)
            await claims.complete([], [], more=[("park_saga", params), ("set_record", dead)])
            return number

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
        self.restore = claims.restore
        self.diagnose = claims.diagnose
        self.settled = claims.settled
        self.waits_for_lock = claims.waits_for_lock

    async def finish(self, result: StoredResult | None) -> None:
        note = {"key": self._key, "what": "reconciled", "detail": "done"}
        results = [] if result is None else [(self._key, result)]
        await self._claims.complete(results, [], more=[("note", note), ("end_saga", {"key": self._key})])


class PostgresStep:
    """See `ports.OpenStep`."""

    def __init__(self, claims: PostgresClaims, saga: LeasedSaga, name: str, *, undo: bool) -> None:
        self._claims = claims
        self._saga = saga
        self._name = name
        self._undo = undo
        self.tx = claims.tx
        self.check = claims.check
        self.restore = claims.restore
        self.diagnose = claims.diagnose
        self.settled = claims.settled
        self.waits_for_lock = claims.waits_for_lock

    async def start_child(self, claim: Claim, queued: tuple[str, str] | None) -> Begun:
        queue, given = queued or (None, None)
        its = {"child": claim.key, "fingerprint": claim.fingerprint, "canonical": claim.canonical}
        rows = await self._claims.send("start_child", its | {"key": self._saga.key, "queue": queue, "given": given})
        found = [Record(State(state), fingerprint, canonical=canonical) for state, fingerprint, canonical, *_ in rows]
        return Begun(found, *rows[0][3:])

    async def kinship(self, child: bytes) -> Kinship:
        (row,) = await self._claims.send("kinship", {"key": self._saga.key, "child": child})
        return Kinship(*row)

    async def finish(self, output: StoredResult | None, *, overlapped: bool) -> int:
        state = StepState.UNDONE if self._undo else StepState.DONE
        finished = {"key": self._saga.key, "token": self._saga.token, "name": self._name, "state": int(state)}
        return await self._claims.complete([], [], last=("finish_step", finished | _finished(output, overlapped)))


async def _alone(claims: PostgresClaims, saga: LeasedSaga, write: Write) -> int:
    """Write it in a transaction of its own. If it is left out, wait for the saga's row and repeat, or raise why."""
    await claims.begin()
    answer = await send(claims, write)
    if answer is None:
        if write.statement == END_SAGAS:
            _see_whole(await claims.send("fence_whole", _fence(saga)), saga)
        elif not await claims.send("fence", _fence(saga)):
            raise Fenced(_NOT_OURS)
        answer = await send(claims, write)
    if answer is None:
        raise Fenced(_ENDED)
    return answer


def _see_whole(locked: Sequence[tuple[Any, ...]], saga: LeasedSaga, *, ends: bool = True) -> None:
    """What `fence_whole` returned."""
    if not locked:
        raise Fenced(_NOT_OURS)
    if ends and locked[0][1] is not None and saga.cancel is None:
        raise SagaCancelled("it is to be cancelled")


def _fence(saga: LeasedSaga) -> dict[str, Any]:
    return {"key": saga.key, "token": saga.token, "worker": saga.worker, "phase": int(saga.state)}


def _conflict(child: bytes) -> dict[str, Any]:
    """What a wait for a child ends with whose key began with another payload."""
    conflict = codecs.encode_rejection(CONFLICT, {"child": child.hex()})
    return {"child": child, "conflict": conflict.body, "conflict_type": conflict.content_type}


def _step(
    saga: LeasedSaga, name: str, kind: StepKind, state: StepState, has_undo: bool, arguments: bytes | None
) -> dict[str, Any]:
    step = {"name": name, "kind": int(kind), "state": int(state), "has_undo": has_undo, "arguments": arguments}
    return _fence(saga) | step


def _finished(output: StoredResult | None, overlapped: bool) -> dict[str, Any]:
    return {
        "overlapped": overlapped,
        "output": None if output is None else output.body,
        "content_type": None if output is None else output.content_type,
    }


def _leased_saga(row: tuple[Any, ...], worker: int) -> LeasedSaga:
    (key, handler, token, state, attempt, version, rejection, source, position, message_id, body, headers, scope,
     stale, delivered, suspect, cancel, age) = row  # fmt: skip
    message = Message(source, body, decode_headers(headers), message_id=message_id, position=position)
    message = with_delivered(message, delivered)
    return LeasedSaga(
        key=key, scope=scope, handler=handler, token=token, worker=worker, state=State(state), attempt=attempt,
        version=version, rejection=rejection, stale=stale, message=message, suspect=suspect, cancel=cancel,
        begun=time.monotonic() - age,
    )  # fmt: skip
