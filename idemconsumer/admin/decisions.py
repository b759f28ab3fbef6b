"""Decisions about sagas and keys, in transactions of the store: with its guard, seal and checked COMMIT."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from idemconsumer.admin.audit import note_saga
from idemconsumer.brokers.publishers import Publishers
from idemconsumer.errors import ConfigurationError, Contention, StoreUnavailable
from idemconsumer.handlers.arguments import Done, NotDone
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.saga import CANCELLED
from idemconsumer.rules.values import State, StepState
from idemconsumer.sql.queries import in_words
from idemconsumer.stores.agreed_hashing import settle_hashing
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.pool import Pool

_LONGEST: Final = 30.0  # seconds; no handler runs, and the wait for a lock is no longer than a claim's
_STATEMENTS: Final = {
    (StepState.INTENT, True): ("decide_done", "done"),
    (StepState.INTENT, False): ("decide_not_done", "not done"),
    (StepState.UNDO_INTENT, True): ("decide_undone", "undone"),
    (StepState.UNDO_INTENT, False): ("decide_not_undone", "not undone"),
}


class Deciding:
    """Transactions for decisions in one schema. Concurrent calls share a few connections; none is kept open (L57)."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema
        self._pools = Publishers(self._pool)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresClaims]:
        """A transaction that has begun; the caller completes it. Raises StoreUnavailable, also if another transaction
        holds a lock for too long, and ConfigurationError if the schema is not migrated."""
        async with self._pools.one() as pool:
            try:
                with in_words(self._schema):
                    async with transaction(pool, group=1) as claims:
                        await claims.begin()
                        yield claims
            except Contention as error:  # a rival holds a lock: nothing was written, so the call can be repeated
                raise StoreUnavailable(str(error)) from error

    async def _pool(self) -> Pool:
        """A pool of one connection, for one caller at a time."""
        pool = Pool(self._dsn, self._schema, connections=1, longest_run=_LONGEST)
        await pool.open()
        try:
            await settle_hashing(pool, self._schema)
        except BaseException:
            await pool.close()
            raise
        return pool


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request to cancel a saga.

    * `accepted`: the saga ends FAILED with the code `cancelled`, or has ended so; nothing can complete it any more.
    * `undo`: its finished steps are undone first. If there was an earlier request, its choice counts.
    * `state`: the state of its record before this request. None means that there is no record: the saga has not begun,
      is pruned, or its key is another one.

    If it is not accepted, nothing was changed, and `state` says why. COMPLETED and FAILED: the saga had ended before
    the request. UNDOING: the saga is being undone already, for another reason. DEAD: it became a dead letter while it
    was being undone, and a person decides.
    """

    accepted: bool
    state: State | None
    undo: bool = False


async def request_cancel(claims: PostgresClaims, key: bytes, *, undo: bool, by: str | None) -> Cancellation:
    """Cancel a saga that has not ended (L50), in a transaction that has begun and that the caller completes. `by`: the
    person who decides, or None.

    The saga's row is locked first, as a completion does, so that either the cancellation or the completion comes first.
    """
    if not await claims.send("lock_saga", {"key": key}):
        return await _ended(claims, key)
    ((phase, rejection, _, held, parked, requested),) = await claims.send("locked_saga", {"key": key})
    if State(phase) is State.UNDOING:
        return Cancellation(
            accepted=parked is None and _is_cancellation(rejection),
            state=State.UNDOING if parked is None else State.DEAD,
            undo=True,
        )
    undone = undo if requested is None else requested
    detail = "to be undone" if undone else "as it is"
    if by is not None and (requested is None or not held):
        await note_saga(claims, key, by, "cancel", detail)
    if requested is None:
        await claims.send("note", {"key": key, "what": "to be cancelled", "detail": detail})
        await claims.send("request_cancel", {"key": key, "undo": undo})
    if not held:  # this includes a parked saga, which any capable worker may now continue
        await claims.send("forget_dead", {"key": key})
        await set_free(claims, key, State.PROCESSING)
    return Cancellation(accepted=True, state=State.PROCESSING if parked is None else State.DEAD, undo=undone)


async def _ended(claims: PostgresClaims, key: bytes) -> Cancellation:
    for _, state, _, result in await claims.send("saga_record", {"key": key}):
        cancelled = State(state) is State.FAILED and _is_cancellation(result)
        return Cancellation(accepted=cancelled, state=State(state))
    return Cancellation(accepted=False, state=None)


def _is_cancellation(rejection: bytes | None) -> bool:
    return rejection is not None and codecs.decode_rejection(StoredResult(rejection)).code == CANCELLED


async def decide(
    claims: PostgresClaims, key: bytes, step: str, answer: Done[Any] | NotDone, attempt: int | None, by: str | None
) -> None:
    """Answer for a call of unknown outcome (L52), in a transaction that holds the saga's row and that the caller
    completes. If the undo of the call was begun, `answer` is about the undo. `by`: the person who decides, or None.
    Raises ConfigurationError if that step has no call of unknown outcome, or if another `attempt` of it is open, and
    TypeError if the result is not JSON."""
    rows = await claims.send("open_calls", {"key": key})
    open_calls = {name: (StepState(state), begun) for name, state, begun in rows}
    state, begun = open_calls.get(step, (None, 0))
    if state is None:
        there = ", ".join(map(repr, open_calls)) or "no step"
        raise ConfigurationError(
            f"saga {key.hex()[:12]}: step {step!r} is not a call of unknown outcome; these are: {there}"
        )
    if attempt is not None and attempt != begun:
        raise ConfigurationError(
            f"saga {key.hex()[:12]}: attempt {begun} of step {step!r} is open, not {attempt}, so the answer is out of "
            "date; ask the remote again"
        )
    done = answer if isinstance(answer, Done) else None
    if state is StepState.UNDO_INTENT and done is not None and done.result is not None:
        raise ConfigurationError(f"step {step!r} was being undone, and an undo has no output; write null")
    output = None if done is None else codecs.encode(done.result, "output", "give", compared=False)
    statement, word = _STATEMENTS[state, done is not None]
    body, content_type = (None, None) if output is None else (output.body, output.content_type)
    await claims.send("note", {"key": key, "what": "decided", "detail": f"step {step}: {word}"})
    if by is not None:
        await note_saga(claims, key, by, "decide", f"step {step}: {word}")
    await claims.send(statement, {"key": key, "name": step, "output": body, "content_type": content_type})


async def set_free(
    claims: PostgresClaims, key: bytes, state: State, *, version: str | None = None, rejection: bytes | None = None
) -> None:
    """Release the saga from its owner, and make it due now, in this phase and with all its attempts again."""
    params = {"key": key, "state": int(state), "version": version, "rejection": rejection}
    await claims.send("resume_saga", params)
    await claims.send("set_record", {"key": key, "state": int(state)})
