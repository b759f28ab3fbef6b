"""Of the model in `waiting`: the two workers that share a saga."""

from __future__ import annotations

from collections.abc import Iterator

from idemconsumer.rules import saga as rules
from idemconsumer.rules.saga import stays
from idemconsumer.rules.values import State, StepKind
from tests.model.scripts import WAITING, last_resort, next_undo, replay, unknown_call
from tests.model.waiting_rows import Rows
from tests.model.waiting_world import (
    DONE,
    GONE,
    INTENT,
    NOBODY,
    NONE,
    PROCESSING,
    REJECTED,
    ROW_AFTER,
    STEP_WRITES,
    UNDOING,
    Move,
    Tx,
    Worker,
    World,
    more_at,
    pair,
    put,
    set_at,
)


class Workers(Rows):
    """What a worker does next, and how it fails."""

    def _works(self, world: World, me: int) -> Iterator[Move]:
        worker = world.workers[me]
        if world.expired[me]:
            yield "notices that its lease is over", self._gone(world, me)
        match worker.at:
            case "idle" if not world.expired[me]:
                yield from self._takes(world, me)
            case "idle":
                return
            case "read":
                read = worker._replace(at="go", view=world.rows, looked=False)
                yield "reads the steps", put(world, me, read)
            case "go":
                yield from self._goes(world, me)
            case "open":
                tx = worker.tx
                assert tx is not None
                yield f"commits {tx.kind}", put(self._apply(world, tx), me, self._after(worker, tx))
            case "call":
                yield from self._calls(world, me)
            case "undo_call":
                after = put(world, me, worker._replace(at="undo_output"))
                if world.remote[1] == NONE:
                    after = after._replace(undone=more_at(world.undone, self.call), remote=(world.remote[0], DONE))
                yield "undoes the call", after
            case "take_signal":  # only with `taken_with_end` taken out: the signal goes first, in a commit of its own
                taken = self._take_signal(world)
                yield "takes the signal", put(taken, me, worker._replace(at="look", seen=DONE))
            case "doubt":
                yield from self._retakes(world, me)
            case kind:
                yield from self._opens(world, me, kind, worker.step)
        knows = worker.phase == PROCESSING and not worker.cancel and worker.tx is None
        if world.cancel and knows and worker.at in ("go", "call", "pause"):
            yield "hears of the request", put(world, me, worker._replace(at="release"))

    def _takes(self, world: World, me: int) -> Iterator[Move]:
        owner = world.owner
        stale = owner == GONE or (owner in (0, 1) and owner != me and world.expired[owner])
        free = owner == NOBODY and world.due <= world.clock
        if world.state not in (PROCESSING, UNDOING) or world.parked or not (stale or free) or self._blocked(world, "X"):
            return
        taken = world._replace(token=world.token + 1, owner=me, waits=False, stale=world.stale or stale)
        yield "takes the saga", put(taken, me, self._taken(taken, me))

    def _taken(self, world: World, me: int) -> Worker:
        return Worker(at="read", token=world.token, phase=world.state, cancel=world.cancel, stale=world.stale)

    def _goes(self, world: World, me: int) -> Iterator[Move]:
        worker, its = world.workers[me], self.its
        if worker.phase == UNDOING:
            step = next_undo(its.asks, worker.view)
            if step is None:
                yield from self._opens(world, me, "fail", 0)
            else:
                yield from self._opens(world, me, "undo_intend" if step == self.call else "undo", step)
            return
        if worker.cancel:
            step = unknown_call(its.asks, worker.view)
            if step is not None and self.rules.calls_learnt:
                yield from self._opens(world, me, "intend", step)
                return
        start = rules.start(
            stale=worker.stale, phase=State.PROCESSING, reconciles=its.asks_a_person, suspect=False, attempt=1,
            max_attempts=1, begun_with=None, version=None, cancelled=bool(worker.cancel) and self.rules.nobody_asked,
        )  # fmt: skip
        if start is rules.Start.RECONCILE:  # and nobody can tell
            yield from self._opens(world, me, "park", 0)
            return
        if worker.cancel:
            yield from self._opens(world, me, "undoing" if worker.cancel == 2 else "fail", 0)
            return
        view = worker.view
        if not self.rules.seen_by_older:
            view = tuple(NONE if row == WAITING and me == 0 else row for row in view)
        what, step = replay(its.scripts[me], its.asks, view)
        if what == "changed":
            newer = me == 0 and (not world.left[1] or not self.rules.newest_parks)
            kind = "release" if newer and self.rules.left_to_newer else "park"
            yield from self._opens(world, me, kind, 0)
        elif what == "run":
            yield from self._begins(world, me, step)
        else:
            yield from self._opens(world, me, "undoing" if what == "rejected" else "complete", 0)
            if what == "complete" and its.rejects:
                yield "is rejected by its handler", put(world, me, worker._replace(at="undoing"))

    def _begins(self, world: World, me: int, step: int) -> Iterator[Move]:
        worker, kind = world.workers[me], self.its.asks[step].kind
        if kind is StepKind.CALL and worker.view[step] == INTENT and self.its.unsure:
            yield from self._opens(world, me, "park", step)
        elif kind in (StepKind.TX, StepKind.CALL):
            yield from self._opens(world, me, "do" if kind is StepKind.TX else "intend", step)
        elif worker.looked and not stays(steps=False, branches=False, main=False, quiet=0.0, patience=1.0):
            seen = 0 if self.rules.look_after_lock else self._due(world, step)
            yield "has nothing left but waits", put(world, me, worker._replace(at="pause", step=step, seen=seen))
        elif not self.rules.taken_with_end and self._wait(world, step) == DONE:
            yield "finds a signal", put(world, me, worker._replace(at="take_signal", step=step))
        else:
            yield from self._opens(world, me, "look", step)

    def _opens(self, world: World, me: int, kind: str, step: int) -> Iterator[Move]:
        worker = world.workers[me]
        lock = "S" if kind in STEP_WRITES else "X"
        if self._blocked(world, lock) or (kind == "pause" and self.rules.key_locked and world.sender.at == "woken"):
            return
        ours = (world.state, world.token, world.parked) == (worker.phase, worker.token, False)
        if not ours and (kind != "pause" or self.rules.pause_fenced):
            yield f"is fenced at {kind}", put(world, me, Worker())
            return
        unheard = kind in ("complete", "undoing", "park") and world.cancel not in (0, worker.cancel)
        if unheard and self.rules.request_seen:
            yield "finds the request", put(world, me, worker._replace(at="release"))
            return
        if kind == "undoing" and self.rules.calls_learnt and unknown_call(self.its.asks, world.rows) is not None:
            yield "finds an open intent", put(world, me, worker._replace(at="park"))
            return
        seen = 0
        if kind == "look":
            seen = worker.seen or self._wait(world, step)
        elif kind == "pause":
            seen = self._due(world, step) if self.rules.look_after_lock else worker.seen
        tx = Tx(kind, step, me, lock, seen, worker.cancel)
        yield f"opens {kind}", put(world, me, worker._replace(at="open", step=step, seen=0, tx=tx))

    def _after(self, worker: Worker, tx: Tx) -> Worker:
        """A worker whose COMMIT was answered."""
        worker = worker._replace(tx=None, step=tx.step)
        match tx.kind:
            case "look":
                return worker._replace(at="go", view=set_at(worker.view, tx.step, tx.seen), looked=tx.seen == WAITING)
            case "intend":
                return worker._replace(at="call", view=set_at(worker.view, tx.step, INTENT))
            case "undo_intend":
                return worker._replace(at="undo_call")
            case "undoing":
                return worker._replace(at="read", phase=UNDOING, cancel=0)
            case "do" | "output" | "rejected" | "undo" | "undo_output":
                return worker._replace(at="go", view=set_at(worker.view, tx.step, ROW_AFTER[tx.kind]))
        return Worker()

    def _calls(self, world: World, me: int) -> Iterator[Move]:
        worker = world.workers[me]
        if world.remote[0] == NONE:
            did = world._replace(done=more_at(world.done, self.call), remote=(DONE, world.remote[1]))
            yield "calls the remote", put(did, me, worker._replace(at="output"))
            refused = world._replace(remote=(REJECTED, world.remote[1]))
            yield "is refused by the remote", put(refused, me, worker._replace(at="rejected"))
        else:
            again = "output" if world.remote[0] == DONE else "rejected"
            yield "gets the remembered answer", put(world, me, worker._replace(at=again))

    def _retakes(self, world: World, me: int) -> Iterator[Move]:
        worker = world.workers[me]
        if self._blocked(world, "X"):
            return
        live = world.state in (PROCESSING, UNDOING) and not world.parked
        if live and world.owner == me and worker.token == world.token:
            taken = world._replace(token=world.token + 1)
            yield "takes over from itself", put(taken, me, self._taken(taken, me)._replace(stale=worker.stale))
        else:
            yield "finds that it is not its own", put(world, me, Worker())

    # ---------------------------------------------------------------------------------------------------------- faults
    def _fails(self, world: World, me: int) -> Iterator[Move]:
        worker = world.workers[me]
        if self.its.scripts[0] is not self.its.scripts[1] and not any(world.left):
            yield "leaves for good", self._gone(world, me)._replace(left=pair(world.left, me, True))
        if worker.at == "idle":
            return
        yield "crashes", self._gone(world, me)
        if not world.expired[me]:
            yield "is paused beyond its lease", world._replace(expired=pair(world.expired, me, True))
        if worker.tx is not None:
            lost = world._replace(limbo=(*world.limbo, worker.tx))
            yield f"loses the answer to {worker.tx.kind}", put(lost, me, worker._replace(at="doubt", tx=None))
        elif worker.at == "call":
            resort = last_resort(self.its.asks, world.rows)
            last = "undoing" if resort is rules.LastResort.UNDO else "park"
            for at in ("release", last):
                yield f"fails in its call: {at}", put(world, me, worker._replace(at=at))
        elif worker.at == "go":
            yield "is drained", put(world, me, worker._replace(at="release"))
        elif worker.at == "undo_call":
            yield "fails to undo, for the last time", put(world, me, worker._replace(at="park"))

    def _gone(self, world: World, me: int) -> World:
        limbo = tuple(tx._replace(worker=GONE) if tx.worker == me else tx for tx in world.limbo)
        owner = GONE if world.owner == me else world.owner
        gone = world._replace(expired=pair(world.expired, me, False), limbo=limbo, owner=owner)
        return put(gone, me, Worker())
