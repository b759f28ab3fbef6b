"""Sagas in Postgres: leases, fence tokens and checkpoints.

Each write is one transaction that first locks the saga's row (`fence`, FOR SHARE) with its fence token, worker and
phase; a takeover and each change of the phase lock it FOR UPDATE. So a former owner finds no row, and a takeover waits
for a saga that is still being written, or skips it. The transactions are sealed like the joined ones. Claims, intents,
outputs and completions share a transaction with those of other sagas (`shared_commits`); the function of a `tx` step
has its own (`open_steps`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final, Protocol

from msgspec.structs import replace

from idemconsumer.errors import SIGNAL_TIMEOUT, Fenced
from idemconsumer.message import codecs, keys
from idemconsumer.message.delivered import encode_delivered, with_delivered
from idemconsumer.message.headers import decode_headers, encode_headers
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.message.origin import parent_of
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.saga import ANY_VERSION, CANCELLED, CONFLICT
from idemconsumer.rules.values import Found, State, StepKind, StepRow, StepState
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.columns import NewDeadLetter, Statement, stored_row
from idemconsumer.stores.leased_saga import DueLook, Kinship, LeasedSaga
from idemconsumer.stores.literals import clean
from idemconsumer.stores.open_steps import PostgresCompletion, PostgresStep, finished
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.shared_commits import (
    BEGIN_SAGAS,
    BEGIN_STEPS,
    END_SAGAS,
    ENDED,
    FINISH_STEPS,
    NOT_OURS,
    SharedCommits,
    Write,
    fence,
    see_whole,
)
from idemconsumer.stores.shared_reads import SharedReads, step_row

_AHEAD: Final = 5.0  # seconds; what is due later is found by a later query
VERSION_GRACE: Final = 600.0  # seconds; the rollback of a deployment brings its version back
_ANY: Final[Mapping[tuple[str, str], str | None]] = MappingProxyType({})


class SagaLeaseHolder(Protocol):
    """The owner of these sagas: the id of this process's row in `worker`, a new one after a lost lease."""

    @property
    def worker(self) -> int: ...

    async def good(self, timeout: float) -> None:
        """Return when the lease is good for a step that may run for so many seconds (L59)."""
        ...


class PostgresLeases:
    """The sagas of one process, held by lease and token.

    Every write is fenced: it locks the saga's row FOR SHARE with the holder's token and phase, in the writing
    transaction, and raises Fenced when there is no such row. After CommitUnknown call `retake`; never read again with
    the old token. Every method raises StoreUnavailable when the database is unreachable. `step` and `intend` wait while
    the lease could not be renewed in time (L38).
    """

    def __init__(
        self,
        pool: Pool,
        lease: SagaLeaseHolder,
        versions: Mapping[tuple[str, str], str | None] = _ANY,
        *,
        grace: float = VERSION_GRACE,
        build: str = "",
    ) -> None:
        """`versions`: those that this process runs, by app and handler; sagas of other handlers are taken whatever
        their version. `grace`: for how many seconds a version that no worker runs is waited for (L28). `build`: that of
        this process's code (L29)."""
        self._pool = pool
        self._lease = lease
        self._versions = versions
        self._grace = grace
        self._build = build
        self._shared = SharedCommits(pool)
        self._reads = SharedReads(pool)

    # --------------------------------------------------------------------------------------------- claims and takeovers
    async def begin(self, claim: Claim, message: Message, handler: str, version: str | None) -> Found | LeasedSaga:
        """Claim the key and store the message with it, committed on return. If it was not claimed, the claim result."""
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
        answer = await self._shared.begin(Write(BEGIN_SAGAS, row, claim=claim))
        if not isinstance(answer, int):
            return answer
        return LeasedSaga(
            key=claim.key, scope=claim.scope, handler=handler, token=answer, worker=worker, state=State.PROCESSING,
            attempt=1, version=version, rejection=None, stale=False, message=message, new=True,
            begun=time.monotonic(),
        )  # fmt: skip

    async def own(self, key: bytes | None = None) -> list[tuple[bytes, int]]:
        """Key and token of each saga that is ours in the database; with `key`, of that one alone.

        If a saga is not in flight in this process *after* this returned, a lost answer or a failed release has left it:
        each run registers its saga as in flight before it claims it.
        """
        rows = await self._pool.alone("own_sagas", {"worker": self._lease.worker, "key": key})
        return [(key, token) for key, token in rows]

    async def look(self, app: str, handlers: Sequence[str], queues: Sequence[str] = ()) -> DueLook:
        """Query whether there is anything to take, in one statement that changes nothing (L32); also from these
        Postgres queues (L61). Without queues it waits for no lock on their tables (L67)."""
        asked = self._ours(app, handlers) | {"ahead": _AHEAD, "queues": list(queues)}
        rows = await self._pool.read("look_for_sagas" if queues else "look_for_sagas_alone", asked)
        own = [(key, token) for _, _, key, token, *_ in rows if key is not None]
        due = {handler: seconds for handler, seconds, *_ in rows if handler is not None}
        cancelled = [key for _, _, key, _, cancel, _ in rows if key is not None and cancel is not None]
        return DueLook(own, due, cancelled, {queue: seconds for _, seconds, *_, queue in rows if queue is not None})

    async def take(
        self,
        app: str,
        handlers: Sequence[str],
        limit: int,
        *,
        unheld: Sequence[tuple[bytes, int]] = (),
        key: bytes | None = None,
    ) -> list[LeasedSaga]:
        """Take over sagas that are due or stale, up to `limit` of each handler, each with a new token. Skips those that
        are being written to.

        If the store knows a handler's version, it takes only sagas of that version, sagas that a person has released
        for any version, and those of a version that is gone: for ten minutes no worker has lived that runs it (L28). A
        lost worker costs an attempt only after `count`. `unheld` are those of `own` that are not in flight here: they
        are taken too, without costing an attempt, unless they have another token by now. With `key`, only that saga.
        """
        params = self._ours(app, handlers)
        params |= {"unheld": [key for key, _ in unheld], "tokens": [token for _, token in unheld]}
        statement, more = ("take_sagas", {"limit": limit}) if key is None else ("take_saga", {"key": key})
        rows = await self._pool.alone(statement, params | more)
        return [_leased_saga(row, params["worker"]) for row in rows]

    def _ours(self, app: str, handlers: Sequence[str]) -> dict[str, Any]:
        """The parameters that say which sagas this process may run."""
        versions = [self._versions.get((app, handler), ANY_VERSION) or "" for handler in handlers]
        return {
            "scopes": keys.scopes_of(app), "app": app, "worker": self._lease.worker, "grace": self._grace,
            "handlers": list(handlers), "versions": versions,
        }  # fmt: skip

    async def superseded(self, app: str, saga: LeasedSaga) -> bool:
        """Whether a worker of another build runs the handler in the same version, or did so within the last ten
        minutes. Builds that were unable to continue the saga do not count (L29)."""
        return bool(await self._pool.alone("left_to_others", self._others(app, saga)))

    def _others(self, app: str, saga: LeasedSaga) -> dict[str, Any]:
        its = {"key": saga.key, "app": app, "handler": saga.handler, "version": saga.version}
        return its | {"grace": self._grace, "build": self._build}

    async def leave(self, app: str, saga: LeasedSaga, error: str, delay: float) -> float | None:
        """Release a saga that this build cannot continue, without costing an attempt: at once if there is a live worker
        as in `superseded`, or for `delay` seconds if there is none now. Returns in how many seconds it can be taken.
        None: there is no such worker, and the saga is still ours."""
        params = self._others(app, saga) | {"error": clean(error), "delay": delay, "stale": saga.stale}
        params |= {"token": saga.token, "worker": saga.worker, "heeded": saga.cancel is not None}
        async with self._locked(saga, ends=False) as claims:
            left = await claims.send("leave_saga", params)
            await claims.complete([], [])
        return None if not left else 0.0 if left[0][0] else delay

    async def retake(self, key: bytes, token: int | None) -> LeasedSaga | None:
        """After CommitUnknown: a new token for a saga that this worker holds, once all writes in flight have ended.
        None: it is not ours.

        `token` None: the claim's token is not known, since its answer was lost.
        """
        worker = self._lease.worker
        await self._pool.alone("await_saga", {"key": key, "worker": worker})
        rows = await self._pool.alone("retake_saga", {"key": key, "token": token, "worker": worker})
        return _leased_saga(rows[0], worker) if rows else None

    async def count(self, saga: LeasedSaga) -> None:
        """Record that it is about to run alone: if this worker dies before the next step is finished, that counts as an
        attempt. Counting it again changes nothing."""
        async with self._locked(saga) as claims:
            await claims.complete([], [], more=[("count_saga", {"key": saga.key})])

    async def steps(self, key: bytes, window: int = 0) -> list[StepRow]:
        """The steps in the order in which they finished. Outputs are included up to `window` bytes in all, and each one
        of at most 64 bytes; the others are left in the store (L55)."""
        return await self._reads.steps(key, window)

    async def outputs(self, key: bytes, names: Sequence[str]) -> dict[str, StoredResult]:
        """The outputs of finished steps, by name."""
        rows = await self._pool.alone("outputs", {"key": key, "names": list(names)})
        return {name: StoredResult(output, content_type or "") for name, output, content_type in rows}

    # ------------------------------------------------------------------------------------------------- fenced writes
    @asynccontextmanager
    async def _locked(self, saga: LeasedSaga, *, ends: bool = True) -> AsyncIterator[PostgresClaims]:
        """A transaction that begins by locking the saga's row FOR UPDATE. Raises as `see_whole`."""
        async with transaction(self._pool, group=1) as claims:
            (locked,) = await claims.begin(("fence_whole", fence(saga)))
            see_whole(locked, saga, ends=ends)
            yield claims

    async def _at_once(self, statement: str, saga: LeasedSaga, /, **given: Any) -> tuple[Any, ...]:
        """Run one statement that fences itself, as a whole transaction (L9); returns its row."""
        async with transaction(self._pool, group=1) as claims:
            (answer,) = await claims.commit([(statement, fence(saga) | given)])
            rows = claims.rows(answer)
        if not rows or rows[0][0] is None:
            raise Fenced(NOT_OURS)
        return rows[0]

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
        """A `tx` step, or its undo: fence and checkpoint come before the function's first statement (L3). It begins
        under a lease that is good for its `timeout`, in seconds (L59). `arguments`: as in `StepRow`."""
        await self._lease.good(timeout)
        async with transaction(self._pool, group=1) as claims:
            await self._lease.good(timeout)  # the wait for a connection may have been long
            state = StepState.UNDO_INTENT if undo else StepState.DONE
            attempt = await claims.begin_step(_step(saga, name, StepKind.TX, state, has_undo, arguments))
            if attempt is None:
                raise Fenced(NOT_OURS)
            if not attempt:
                raise Fenced(ENDED)
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
        """Commit that the remote service is about to be called, under a lease that is good for `timeout` seconds (L59).
        Returns the number of this call. `overlapped`: the call has no fixed place among the steps (L24)."""
        await self._lease.good(timeout)
        state = StepState.UNDO_INTENT if undo else StepState.INTENT
        row = _step(saga, name, StepKind.CALL, state, has_undo, arguments) | {"placed": not overlapped}
        attempt = await self._shared.write(saga, Write(BEGIN_STEPS, row))
        await self._lease.good(timeout)  # the commit may have been slow
        return attempt

    async def record(
        self, saga: LeasedSaga, name: str, kind: StepKind, state: StepState, output: StoredResult | None,
        *, has_undo: bool, overlapped: bool, arguments: bytes | None = None,
    ) -> int:  # fmt: skip
        """Commit a call's output, a step's rejection, or that a call was undone; returns its position."""
        row = _step(saga, name, kind, state, has_undo, arguments) | finished(output, overlapped)
        return await self._shared.write(saga, Write(FINISH_STEPS, row))

    async def wait(
        self, saga: LeasedSaga, name: str, kind: StepKind, seconds: float, signal: str | None, *,
        child: bytes | None = None, overlapped: bool, closes: Sequence[str] = (),
    ) -> StepRow | float:  # fmt: skip
        """Begin a wait, or check whether one that was begun is over: its end was computed at its beginning, by the
        database's clock (L40). The oldest signal of its name is taken in the commit that records the end. Returns a
        float if it is not over: the seconds left. With `child`, the stored key of a child saga, it waits for that
        saga's end. When the wait is over, the waits of `closes` are deleted (L74)."""
        timed_out = codecs.encode_rejection(SIGNAL_TIMEOUT, {"signal": signal})
        given = {"name": name, "seconds": seconds, "overlapped": overlapped, "closes": list(closes), "signal": signal}
        given |= {"timed_out": timed_out.body, "timed_out_type": timed_out.content_type}
        given |= dict.fromkeys(("conflict", "conflict_type"))
        if child is not None:
            conflict = codecs.encode_rejection(CONFLICT, {"child": child.hex()})  # its key began with another payload
            given |= {"conflict": conflict.body, "conflict_type": conflict.content_type}
        row = await self._at_once("await_step", saga, **given)
        state, overlapped, position, output, content_type, left = row
        if position is None:
            return float(left)
        return step_row(name, kind, state, False, overlapped, position, 1, output, content_type, 0)

    async def pause(self, saga: LeasedSaga, waits: Sequence[str], at_most: float | None) -> float:
        """Release it, without costing an attempt, until one of these waits is over, or for `at_most` seconds (L58).
        Returns the most seconds that it takes. It is due at once if one of their signals has come meanwhile (L42)."""
        return float((await self._at_once("pause_saga", saga, names=list(waits), child=None, at_most=at_most))[0])

    async def kinship(self, key: bytes, child: bytes) -> Kinship:
        """How the saga under `child` is related to the one under `key` (L65)."""
        (row,) = await self._pool.alone("kinship", {"key": key, "child": child})
        return Kinship(*row)

    async def stop_child(self, saga: LeasedSaga, child: bytes, scope: str, queued: tuple[str, str]) -> State:
        """End a child saga that is to be undone. Returns how it has ended: COMPLETED, or FAILED if it left nothing to
        undo, or is not this saga's to undo (L80); PROCESSING if it has not ended. A child that has not begun is kept
        from beginning (L49). `queued`: queue and key of its message."""
        cancelled = codecs.encode_rejection(CANCELLED, None)
        given = {"child": child, "body": cancelled.body, "content_type": cancelled.content_type, "scope": scope}
        return State((await self._at_once("stop_child", saga, **given, queue=queued[0], given=queued[1]))[0])

    async def pause_undo(self, saga: LeasedSaga, child: bytes) -> float:
        """As `pause`, until this child has ended."""
        return float((await self._at_once("pause_saga", saga, names=[], child=child, at_most=None))[0])

    async def complete(self, saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        """Store COMPLETED or FAILED and the result, and delete the saga's row, in one commit."""
        row = fence(saga) | {"final": int(state), **stored_row(result)}
        await self._shared.write(saga, Write(END_SAGAS, row))

    async def undo(self, saga: LeasedSaga, rejection: StoredResult, added: Sequence[str] = ()) -> LeasedSaga | None:
        """Commit UNDOING. None when an intent is open: it is not known yet what there is to undo (L7). `added`: steps
        that were recorded without an undo and have one now, which is recorded in the same commit (L25)."""
        key = {"key": saga.key}
        more: list[Statement] = [("add_undos", key | {"names": list(added)})] if added else []
        more.append(("set_undoing", key | {"rejection": rejection.body}))
        more.append(("set_record", key | {"state": int(State.UNDOING)}))
        async with transaction(self._pool, group=1) as claims:
            locked, ((open_intents,),) = await claims.begin(("fence_whole", fence(saga)), ("open_intents", key))
            see_whole(locked, saga)
            if open_intents:
                return None
            await claims.complete([], [], more=more)
        return replace(saga, state=State.UNDOING, rejection=rejection.body, attempt=1, cancel=None)

    async def release(
        self, saga: LeasedSaga, delay: float, error: str | None, *, count: bool, held: bool = False
    ) -> None:
        """Release it: any worker may take it after `delay` seconds. With `count=False` this attempt does not count (a
        drain). `held`: a function that it needs fails in all sagas (D17), which is noted once for as long as that
        lasts."""
        async with self._locked(saga, ends=False) as claims:
            error = None if error is None else clean(error)
            params = {"key": saga.key, "delay": delay, "error": error, "back": 0 if count else 1}
            params |= {"token": saga.token, "worker": saga.worker, "stale": saga.stale}
            params |= {"heeded": saga.cancel is not None, "held": held}
            await claims.complete([], [], more=[("release_saga", params)])

    async def park(self, saga: LeasedSaga, letter: NewDeadLetter) -> int:
        """Store the record as DEAD, the dead letter, and park the saga's row for a person, in one commit. Returns the
        dead letter's id."""
        async with self._locked(saga) as claims:
            params = {"key": saga.key, "reason": letter.reason, "error": clean(letter.error), "worker": saga.worker}
            dead = {"key": saga.key, "state": int(State.DEAD)}
            number = await claims.write_letter(letter, saga.key)
            await claims.complete([], [], more=[("park_saga", params), ("set_record", dead)])
            return number

    async def note(self, key: bytes, what: str, detail: str | None) -> None:
        """Add to the history of a saga that has not ended. Not fenced, since nothing depends on it."""
        detail = None if detail is None else clean(detail)
        await self._pool.alone("note", {"key": key, "what": what, "detail": detail})

    @asynccontextmanager
    async def completion(self, saga: LeasedSaga) -> AsyncIterator[PostgresCompletion]:
        """A transaction in which to find out whether the saga is done. Leaving without `finish` rolls back."""
        async with self._locked(saga) as claims:
            # First, so that a COMMIT inside the function fails at the guard.
            await claims.send("set_record", {"key": saga.key, "state": int(State.COMPLETED)})
            yield PostgresCompletion(claims, saga)


def _step(
    saga: LeasedSaga, name: str, kind: StepKind, state: StepState, has_undo: bool, arguments: bytes | None
) -> dict[str, Any]:
    step = {"name": name, "kind": int(kind), "state": int(state), "has_undo": has_undo, "arguments": arguments}
    return fence(saga) | step


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
