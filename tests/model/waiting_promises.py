"""Of the model in `waiting`: what must hold in every step of every interleaving."""

from __future__ import annotations

from idemconsumer.rules.values import StepKind
from tests.model.scripts import WAITING, unknown_call
from tests.model.waiting_world import COMPLETED, DONE, FAILED, INTENT, REJECTED, UNDO_INTENT, UNDONE, Scenario, World


def broken(its: Scenario, before: World, after: World) -> str | None:
    if max(after.done) > 1 or max(after.undone) > 1:
        return "an effect happened twice"
    asleep = its.asks[0].kind is StepKind.SLEEP and after.rows[0] == WAITING
    if asleep and after.until[0] > after.began + its.asks[0].seconds:
        return "a sleep ends later than it was to"
    if after.answered > its.messages:
        return "one message answered two waits"
    if after.inherited < before.inherited:
        return "a signal for a former saga answered this one"
    if after.stored_late:
        return "a signal was stored for a saga that had ended"
    if after.accepted and after.state == COMPLETED:
        return "somebody was told that it is cancelled, and it completed"
    if after.usurped:
        return "it ended otherwise than was asked for before"
    if (
        after.parked
        and not before.parked
        and after.cancel
        and its.asks_a_person
        and unknown_call(its.asks, after.rows) is None
    ):
        return "put aside, though it was to be cancelled"
    if after.state == FAILED and not after.reborn:
        undone = after.undone if not after.accepted or its.cancel == 2 else after.done
        if after.done != undone or INTENT in after.rows:
            return "failed, and an effect survives or is not known"
    if after.state == COMPLETED and any(after.undone):
        return "completed, and something was undone"
    for old, new in zip(before.rows, after.rows, strict=True):
        if old in (DONE, REJECTED) and new not in (old, UNDO_INTENT, UNDONE) and after.reborn == before.reborn:
            return "how a step ended was changed"
    if after.parked and not before.parked:
        if its.scripts[0] is not its.scripts[1] and before.owner == 0 and not after.left[1]:
            return "put aside by an older worker, though a newer one lives"
        if its.scripts[0] is its.scripts[1] and all(ask.kind is not StepKind.CALL for ask in its.asks):
            return "put aside, though nothing has failed or changed"
    if (
        any(after.done[its.asks.index(ask)] for ask in its.asks if ask.name == "approved only")
        and WAITING in after.rows
    ):
        return "it went on without its wait"
    ended = before.state in (COMPLETED, FAILED) and after.reborn == before.reborn
    if ended and (before.done, before.undone) != (after.done, after.undone):
        return "an effect after the end"
    return None
