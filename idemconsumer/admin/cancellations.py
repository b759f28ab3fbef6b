"""Cancel a saga that has not ended (L50)."""

from __future__ import annotations

import msgspec

from idemconsumer.admin.audit import note_saga
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.saga import CANCELLED
from idemconsumer.rules.values import State
from idemconsumer.stores.claims import PostgresClaims


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request to cancel a saga.

    * `accepted`: the saga ends FAILED with the code `cancelled`, or has ended so; nothing can complete it any more.
    * `undo`: its finished steps are undone first. If there was an earlier request, its choice counts.
    * `state`: the state of its record before this request. None means that there is no record: the saga has not begun,
      is pruned, or its key is another one.

    If it is not accepted, nothing was changed, and `state` says why. COMPLETED and FAILED: the end came first. UNDOING:
    the saga is being undone already, for another reason. DEAD: it became a dead letter while it was being undone, and a
    person decides.
    """

    accepted: bool
    state: State | None
    undo: bool = False


async def request_cancel(claims: PostgresClaims, key: bytes, *, undo: bool, by: str | None) -> Cancellation:
    """In a transaction that has begun, and that the caller completes. `by`: the person who decides, if one does.

    The saga's row is locked first, as by a completion, so that one of the two comes first.
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
    state = State.PROCESSING if parked is None else State.DEAD
    undone = undo if requested is None else requested
    detail = "to be undone" if undone else "as it is"
    if by is not None and (requested is None or not held):
        await note_saga(claims, key, by, "cancel", detail)
    if requested is None:
        await claims.send("note", {"key": key, "what": "to be cancelled", "detail": detail})
        await claims.send("request_cancel", {"key": key, "undo": undo})
    if not held:  # also one that was put aside since: any worker that can is to go on with it
        await claims.send("forget_dead", {"key": key})
        params = {"key": key, "state": int(State.PROCESSING), "version": None, "rejection": None}
        await claims.send("resume_saga", params)
        await claims.send("set_record", {"key": key, "state": int(State.PROCESSING)})
    return Cancellation(accepted=True, state=state, undo=undone)


async def _ended(claims: PostgresClaims, key: bytes) -> Cancellation:
    rows = await claims.send("saga_record", {"key": key})
    if not rows:
        return Cancellation(accepted=False, state=None)
    ((_, state, _, result),) = rows
    cancelled = State(state) is State.FAILED and _is_cancellation(result)
    return Cancellation(accepted=cancelled, state=State(state))


def _is_cancellation(rejection: bytes | None) -> bool:
    return rejection is not None and codecs.decode_rejection(StoredResult(rejection)).code == CANCELLED
