"""Of the model in `waiting`: who sends signals, who cancels, who says how a call ended, and who begins anew."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.waiting_rows import Rows
from tests.model.waiting_world import (
    COMPLETED,
    DONE,
    FAILED,
    INTENT,
    NOBODY,
    NONE,
    PROCESSING,
    UNDO_INTENT,
    UNDOING,
    UNDONE,
    Move,
    Sender,
    Worker,
    World,
    set_at,
)


class Others(Rows):
    """Those beside the workers."""

    def _sends(self, world: World) -> Iterator[Move]:
        """A message that is a signal: its claim and the signal are one transaction (L44)."""
        sender = world.sender
        late = world.state != PROCESSING
        match sender.at:
            case "idle" if sender.message < self.its.messages:
                nothing = late and self.rules.ended_refused
                yield (
                    "sender stores",
                    world._replace(
                        sender=sender._replace(at="stored", nothing=nothing), stored_late=late and not nothing
                    ),
                )
            case "stored" if sender.nothing:
                yield "sender is told that it has ended", self._recorded(world)
            case "stored":
                if self.rules.key_locked and self._pausing(world):
                    return
                hit = self.rules.woken and world.waits and world.owner == NOBODY and world.state == PROCESSING
                hit = hit and world.due > world.clock and not world.parked
                if not (hit and self._blocked(world, "X")):
                    yield "sender wakes", world._replace(sender=sender._replace(at="woken", hit=hit))
            case "woken":
                sent = world._replace(signals=world.signals + 1, due=world.clock if sender.hit else world.due)
                if self.rules.signal_in_claim:
                    yield "sender commits", self._recorded(sent)
                else:
                    unrecorded = sender._replace(at="unrecorded", hit=False)
                    yield "sender commits the signal alone", sent._replace(sender=unrecorded)
            case "unrecorded":
                yield "sender commits the message", self._recorded(world)
        if sender.at != "idle" and world.faults < self.its.faults:
            again = Sender(message=sender.message)  # the message comes again
            yield "sender crashes", world._replace(sender=again, faults=world.faults + 1)

    def _recorded(self, world: World) -> World:
        return world._replace(sender=Sender(message=world.sender.message + 1))

    def _cancels(self, world: World) -> Iterator[Move]:
        if world.canceller == "idle" and self.its.cancel:
            if not self.rules.request_locks:
                yield "canceller looks", world._replace(canceller="looked" if world.state == PROCESSING else "told")
            elif not self._blocked(world, "X"):
                yield "canceller locks", world._replace(canceller="locked")
        elif world.canceller in ("locked", "looked"):
            told = world._replace(canceller="told")
            if world.state == PROCESSING:
                told = told._replace(cancel=self.its.cancel, accepted=True)
                yield "canceller commits", told if self._held(world) else self._freed(told)
            else:
                yield "canceller is told", told._replace(accepted=world.canceller == "looked")

    def _decides(self, world: World) -> Iterator[Move]:
        """Somebody who has asked the remote while the saga was put aside. Assumed is that no call of a lost worker is
        still under way, and that they ask again if there was one since."""
        what, step, done = world.person
        calling = any(w.at in ("call", "undo_call") for me, w in enumerate(world.workers) if not self._holds(world, me))
        if what == "idle" and self.its.decides and world.parked and not calling:
            if world.rows[self.call] in (INTENT, UNDO_INTENT):
                memory = int(world.rows[self.call] == UNDO_INTENT)
                yield "somebody asks the remote", world._replace(person=("knows", memory, world.remote[memory] == DONE))
        elif what != "idle" and (calling or done != (world.remote[step] == DONE)):
            yield "somebody's answer is void", world._replace(person=("idle", 0, False))
        elif what == "knows" and not self._blocked(world, "X"):
            yield "somebody locks the saga", world._replace(person=("locked", step, done))
        elif what == "locked":
            yield "somebody answers", self._decided(world, undo=bool(step), done=done)

    def _decided(self, world: World, *, undo: bool, done: bool) -> World:
        told = world._replace(person=("idle", 0, False))
        if world.state not in (PROCESSING, UNDOING) or (self._held(world) and self.rules.decided_alone):
            return told
        if world.rows[self.call] != (UNDO_INTENT if undo else INTENT) and self.rules.only_open:
            return told
        if self.rules.decision_recorded:
            row = (UNDONE if done else DONE) if undo else (DONE if done else NONE)
            told = told._replace(rows=set_at(told.rows, self.call, row))
        return self._freed(told)

    def _begins_anew(self, world: World) -> Iterator[Move]:
        quiet = all(worker == Worker() for worker in world.workers) and not world.limbo
        quiet = quiet and world.sender == Sender(message=self.its.messages)
        if self.its.reused and not world.reborn and world.state in (COMPLETED, FAILED) and quiet:
            left = 0 if self.rules.pruned_together else world.signals
            yield (
                "the record is pruned, and a saga begins",
                self.start()._replace(
                    reborn=True,
                    signals=left,
                    inherited=left,
                    sender=world.sender,
                    token=world.token,
                    faults=world.faults,
                ),
            )
