"""A model of sagas that wait, are signalled, cancelled and decided about, and that workers of two builds share.

As in `leased`, an action is what is atomic in Postgres or outside of it, and a paused worker is one whose lease runs
out and who goes on late. What a worker does next is decided by the engine's own rules (`scripts`); what its statements
do to the rows is modelled. A saga has begun already; how it is claimed is in `leased`. There are two workers, and,
where a scenario has them, a sender of signals, somebody who cancels, somebody who says how a call ended, and a clock.

An error of a step may be the last one that is allowed, so attempts are not counted. Left out: branches, in which
several waits are open at once, and the delay before the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from idemconsumer.rules import saga as rules
from idemconsumer.rules.values import State, StepKind, StepState
from idemconsumer.rules.waiting import stays
from tests.model.explorer import Explored, walk
from tests.model.scripts import (
    NEVER,
    WAITING,
    Ask,
    Script,
    last_resort,
    next_undo,
    replay,
    unknown_call,
)

PROCESSING, UNDOING, COMPLETED, FAILED = (int(State[n]) for n in ("PROCESSING", "UNDOING", "COMPLETED", "FAILED"))
INTENT, DONE, REJECTED, UNDO_INTENT, UNDONE = (int(state) for state in StepState)
NONE: Final = 0
PARKED: Final = 9  # of an end: put aside
NOBODY, GONE = -1, -2
FORWARD: Final = ("do", "intend", "output", "rejected", "look")
STEP_WRITES: Final = (*FORWARD, "undo", "undo_intend", "undo_output")
ROW_AFTER: Final = {
    "do": DONE, "intend": INTENT, "output": DONE, "rejected": REJECTED,
    "undo": UNDONE, "undo_intend": UNDO_INTENT, "undo_output": UNDONE,
}  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """What the protocol keeps. Each one can be taken out, to see what it is for."""

    end_once: bool = True  # L40: when a wait ends is computed when it is first requested
    ending_once: bool = True  # L40: how it ended is recorded
    seen_by_older: bool = True  # L40: a handler that knows no waits finds a step that it does not request
    due_at_end: bool = True  # L41: the saga is due when its wait is over
    pause_fenced: bool = True  # L41: whoever gives it up holds it
    key_locked: bool = True  # L42: who gives up and who sends lock the saga's key
    look_after_lock: bool = True  # L42: ... and who gives up looks only then
    woken: bool = True  # L42: who sends makes due what waits
    taken_with_end: bool = True  # L42: a signal is taken in the commit that records the end of its wait
    ended_refused: bool = True  # L43: for a saga that has ended nothing is stored
    pruned_together: bool = True  # L43: signals go with their record
    signal_in_claim: bool = True  # L44: a message is a signal in the transaction of its claim
    request_seen: bool = True  # L50: no worker that does not know the request ends the saga
    request_locks: bool = True  # L50: a request locks the row, as a completion does
    calls_learnt: bool = True  # L50: how an open call ended is learnt first
    request_due: bool = True  # L50: what is to be cancelled does not wait
    nobody_asked: bool = True  # L50: not a person either, whom on_stale names
    earlier_refused: bool = True  # L51: no request while a worker lives that knows none
    earlier_kept: bool = True  # L51: such a worker does not take what is to be cancelled
    only_open: bool = True  # L52: only a call whose end is not known is decided about
    decided_alone: bool = True  # L52: not one that a worker took while the decision waited (L19)
    decision_recorded: bool = True  # L52: the answer stands for the outcome
    left_to_newer: bool = True  # L29: what an older worker does not know is left to a newer one
    newest_parks: bool = True  # L29: ... if there is one


@dataclass(frozen=True)
class Scenario:
    asks: tuple[Ask, ...]  # all steps of all builds, in the order of finishing
    scripts: tuple[Script, Script]  # the handler of each worker; the second worker started later
    faults: int = 2
    clock: int = 0  # the last time that there is
    messages: int = 0  # that are signals
    reused: bool = False  # its record is pruned after its end, and another saga begins under the key
    cancel: int = 0  # somebody cancels: 1 as it is, 2 with undo
    decides: bool = False  # somebody says how a call ended
    unsure: bool = False  # only a person can say how a call ended
    rejects: bool = False  # the handler may reject at its end
    review: bool = False  # on_stale="review"
    earlier: bool = False  # the first worker knows no cancellation; it is away at first


class Tx(NamedTuple):
    """An open transaction: what COMMIT will apply, and the lock on the saga's row. `seen`: what it found."""

    kind: str
    step: int
    worker: int
    lock: str
    seen: int = 0
    knows: int = 0  # the request that its worker knows of


class Worker(NamedTuple):
    """What one worker knows."""

    at: str = "idle"
    step: int = 0
    token: int = 0
    phase: int = PROCESSING
    cancel: int = 0
    stale: bool = False
    view: tuple[int, ...] = ()
    looked: bool = False
    seen: int = 0
    tx: Tx | None = None


class Sender(NamedTuple):
    """`at`: idle, stored (not committed), woken (about to commit), unrecorded."""

    at: str = "idle"
    message: int = 0
    hit: bool = False
    nothing: bool = False


class World(NamedTuple):
    rows: tuple[int, ...]
    until: tuple[int, ...]
    done: tuple[int, ...]
    undone: tuple[int, ...]
    workers: tuple[Worker, Worker] = (Worker(), Worker())
    state: int = PROCESSING
    parked: bool = False
    token: int = 0
    owner: int = NOBODY
    due: int = 0
    waits: bool = False  # the saga says which signal makes it due
    stale: bool = False
    cancel: int = 0  # 0 none, 1 as it is, 2 with undo
    remote: tuple[int, int] = (NONE, NONE)  # what it remembers under the call's key and under its undo's
    clock: int = 0
    signals: int = 0
    inherited: int = 0  # of them, those for a former saga of this key
    sender: Sender = Sender()
    canceller: str = "idle"
    person: tuple[str, int, bool] = ("idle", 0, False)
    expired: tuple[bool, bool] = (False, False)
    left: tuple[bool, bool] = (False, False)
    limbo: tuple[Tx, ...] = ()
    faults: int = 0
    reborn: bool = False
    # What only the promises look at.
    began: int = -1  # when the first wait was requested
    answered: int = 0  # waits that a signal has ended
    accepted: bool = False  # somebody was told that it is cancelled
    stored_late: bool = False
    usurped: bool = False  # a worker that did not know the request ended it otherwise


Move = tuple[str, World]


def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _more(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return _set(values, index, values[index] + 1)


def _pair(values: tuple[bool, bool], me: int, value: bool) -> tuple[bool, bool]:
    return (value, values[1]) if me == 0 else (values[0], value)


def _put(world: World, me: int, worker: Worker) -> World:
    return world._replace(workers=(worker, world.workers[1]) if me == 0 else (world.workers[0], worker))


class Model:
    def __init__(self, rules: Rules, scenario: Scenario) -> None:
        self.rules = rules
        self.its = scenario
        self.call = next((i for i, ask in enumerate(scenario.asks) if ask.kind is StepKind.CALL), -1)

    def start(self) -> World:
        nothing = (0,) * len(self.its.asks)
        return World(nothing, nothing, nothing, nothing, left=(self.its.earlier, False))

    def successors(self, world: World) -> Iterator[Move]:
        for place, tx in enumerate(world.limbo):
            rest = world._replace(limbo=world.limbo[:place] + world.limbo[place + 1 :])
            yield f"server applies the lost {tx.kind}", self._apply(rest, tx)
            yield f"server drops the lost {tx.kind}", rest
        ends = [end for row, end in zip(world.rows, world.until, strict=True) if row == WAITING and end != NEVER]
        if any(end > world.clock for end in ends) and world.clock < self.its.clock:
            yield "time passes", world._replace(clock=world.clock + 1)
        yield from self._sends(world)
        yield from self._cancels(world)
        yield from self._decides(world)
        yield from self._begins_anew(world)
        faults = world.faults < self.its.faults
        worse = world._replace(faults=world.faults + 1)
        for me in (0, 1):
            if world.left[me]:
                if self.its.earlier and me == 0 and faults:
                    yield "A starts", worse._replace(left=_pair(world.left, me, False))
                continue
            for label, after in self._works(world, me):
                yield f"{'AB'[me]} {label}", after
            if faults:
                for label, after in self._fails(worse, me):
                    yield f"{'AB'[me]} {label}", after

    # ----------------------------------------------------------------------------------------------------------- locks
    def _open(self, world: World) -> Iterator[Tx]:
        yield from (worker.tx for worker in world.workers if worker.tx is not None)
        yield from world.limbo

    def _blocked(self, world: World, lock: str) -> bool:
        """Whether the saga's row cannot be locked now."""
        if world.canceller == "locked" or world.person[0] == "locked" or world.sender.hit:
            return True
        return any("X" in (lock, tx.lock) for tx in self._open(world) if tx.lock)

    def _pausing(self, world: World) -> bool:
        return any(tx.kind == "pause" for tx in self._open(world))

    # ---------------------------------------------------------------------------------------------------------- writes
    def _apply(self, world: World, tx: Tx) -> World:
        """What COMMIT makes true."""
        kind, step = tx.kind, tx.step
        if kind == "look":
            return self._looked(world, tx)
        if kind in STEP_WRITES:
            world = world._replace(rows=_set(world.rows, step, ROW_AFTER[kind]))
            if kind == "do":
                return world._replace(done=_more(world.done, step))
            return world._replace(undone=_more(world.undone, step)) if kind == "undo" else world
        usurped = world.usurped or (kind in ("park", "undoing") and world.cancel not in (0, tx.knows))
        if kind == "undoing":
            return world._replace(state=UNDOING, cancel=0, usurped=usurped)
        world = world._replace(owner=NOBODY, usurped=usurped)
        if kind == "park":
            return world._replace(parked=True)
        if kind == "release":
            return world._replace(due=world.clock, stale=False)
        if kind == "pause":
            waits = self.its.asks[step].kind is StepKind.WAIT
            return world._replace(due=tx.seen, stale=False, waits=waits)
        return world._replace(state=COMPLETED if kind == "complete" else FAILED, cancel=0)

    def _looked(self, world: World, tx: Tx) -> World:
        """`seen`: how the wait ended, or WAITING."""
        step, ask = tx.step, self.its.asks[tx.step]
        if world.rows[step] == NONE or not self.rules.end_once:
            until = ask.seconds if ask.seconds == NEVER else world.clock + ask.seconds
            world = world._replace(until=_set(world.until, step, until))
            if world.began < 0:
                world = world._replace(began=world.clock)
        if tx.seen == WAITING or not self.rules.ending_once:
            return world._replace(rows=_set(world.rows, step, WAITING))
        world = world._replace(rows=_set(world.rows, step, tx.seen))
        if ask.kind is StepKind.WAIT and tx.seen == DONE:
            world = world._replace(answered=world.answered + 1)
            if self.rules.taken_with_end:
                return self._take_signal(world)
        return world

    def _take_signal(self, world: World) -> World:
        return world._replace(signals=max(0, world.signals - 1), inherited=max(0, world.inherited - 1))

    def _wait(self, world: World, step: int) -> int:
        """What a look finds now."""
        ask = self.its.asks[step]
        begun = world.rows[step] == WAITING and self.rules.end_once
        until = world.until[step] if begun else min(NEVER, world.clock + ask.seconds)
        if ask.kind is StepKind.WAIT and world.signals:
            return DONE
        if until <= world.clock:
            return DONE if ask.kind is StepKind.SLEEP else REJECTED
        return WAITING

    # ------------------------------------------------------------------------------------------------------ one worker
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
                yield "reads the steps", _put(world, me, read)
            case "go":
                yield from self._goes(world, me)
            case "open":
                tx = worker.tx
                assert tx is not None
                yield f"commits {tx.kind}", _put(self._apply(world, tx), me, self._after(worker, tx))
            case "call":
                yield from self._calls(world, me)
            case "undo_call":
                after = _put(world, me, worker._replace(at="undo_output"))
                if world.remote[1] == NONE:
                    after = after._replace(undone=_more(world.undone, self.call), remote=(world.remote[0], DONE))
                yield "undoes the call", after
            case "take_signal":  # only with `taken_with_end` taken out: the signal goes first, in a commit of its own
                taken = self._take_signal(world)
                yield "takes the signal", _put(taken, me, worker._replace(at="look", seen=DONE))
            case "doubt":
                yield from self._retakes(world, me)
            case kind:
                yield from self._opens(world, me, kind, worker.step)
        knows = self._aware(me) and worker.phase == PROCESSING and not worker.cancel and worker.tx is None
        if world.cancel and knows and worker.at in ("go", "call", "pause"):
            yield "hears of the request", _put(world, me, worker._replace(at="release"))

    def _aware(self, me: int) -> bool:
        return not (self.its.earlier and me == 0)

    def _takes(self, world: World, me: int) -> Iterator[Move]:
        owner = world.owner
        stale = owner == GONE or (owner in (0, 1) and owner != me and world.expired[owner])
        free = owner == NOBODY and world.due <= world.clock
        if world.state not in (PROCESSING, UNDOING) or world.parked or not (stale or free) or self._blocked(world, "X"):
            return
        if world.cancel and not self._aware(me) and self.rules.earlier_kept:
            return
        taken = world._replace(token=world.token + 1, owner=me, waits=False, stale=world.stale or stale)
        yield "takes the saga", _put(taken, me, self._taken(taken, me))

    def _taken(self, world: World, me: int) -> Worker:
        cancel = world.cancel if self._aware(me) else 0
        return Worker(at="read", token=world.token, phase=world.state, cancel=cancel, stale=world.stale)

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
            stale=worker.stale, phase=State.PROCESSING, reconciles=False, review=its.review, suspect=False, attempt=1,
            max_attempts=1, begun_with=None, version=None, cancelled=bool(worker.cancel) and self.rules.nobody_asked,
        )  # fmt: skip
        if start is rules.Start.REVIEW:
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
                yield "is rejected by its handler", _put(world, me, worker._replace(at="undoing"))

    def _begins(self, world: World, me: int, step: int) -> Iterator[Move]:
        worker, kind = world.workers[me], self.its.asks[step].kind
        if kind is StepKind.CALL and worker.view[step] == INTENT and self.its.unsure:
            yield from self._opens(world, me, "park", step)
        elif kind in (StepKind.TX, StepKind.CALL):
            yield from self._opens(world, me, "do" if kind is StepKind.TX else "intend", step)
        elif worker.looked and not stays(steps=False, branches=False, main=False, quiet=0.0, patience=1.0):
            seen = 0 if self.rules.look_after_lock else self._due(world, step)
            yield "has nothing left but waits", _put(world, me, worker._replace(at="pause", step=step, seen=seen))
        elif not self.rules.taken_with_end and self._wait(world, step) == DONE:
            yield "finds a signal", _put(world, me, worker._replace(at="take_signal", step=step))
        else:
            yield from self._opens(world, me, "look", step)

    def _due(self, world: World, step: int) -> int:
        """When a saga that is given up now is due again."""
        if world.cancel and self.rules.request_due:
            return world.clock
        if self.its.asks[step].kind is StepKind.WAIT and world.signals:
            return world.clock
        return world.until[step] if self.rules.due_at_end else NEVER

    def _opens(self, world: World, me: int, kind: str, step: int) -> Iterator[Move]:
        worker = world.workers[me]
        lock = "S" if kind in STEP_WRITES else "X"
        if self._blocked(world, lock) or (kind == "pause" and self.rules.key_locked and world.sender.at == "woken"):
            return
        ours = (world.state, world.token, world.parked) == (worker.phase, worker.token, False)
        if not ours and (kind != "pause" or self.rules.pause_fenced):
            yield f"is fenced at {kind}", _put(world, me, Worker())
            return
        unheard = kind in ("complete", "undoing", "park") and world.cancel not in (0, worker.cancel)
        if unheard and self._aware(me) and self.rules.request_seen:
            yield "finds the request", _put(world, me, worker._replace(at="release"))
            return
        if kind == "undoing" and self.rules.calls_learnt and unknown_call(self.its.asks, world.rows) is not None:
            yield "finds an open intent", _put(world, me, worker._replace(at="park"))
            return
        seen = 0
        if kind == "look":
            seen = worker.seen or self._wait(world, step)
        elif kind == "pause":
            seen = self._due(world, step) if self.rules.look_after_lock else worker.seen
        tx = Tx(kind, step, me, lock, seen, worker.cancel)
        yield f"opens {kind}", _put(world, me, worker._replace(at="open", step=step, seen=0, tx=tx))

    def _after(self, worker: Worker, tx: Tx) -> Worker:
        """A worker whose COMMIT was answered."""
        worker = worker._replace(tx=None, step=tx.step)
        match tx.kind:
            case "look":
                return worker._replace(at="go", view=_set(worker.view, tx.step, tx.seen), looked=tx.seen == WAITING)
            case "intend":
                return worker._replace(at="call", view=_set(worker.view, tx.step, INTENT))
            case "undo_intend":
                return worker._replace(at="undo_call")
            case "undoing":
                return worker._replace(at="read", phase=UNDOING, cancel=0)
            case "do" | "output" | "rejected" | "undo" | "undo_output":
                return worker._replace(at="go", view=_set(worker.view, tx.step, ROW_AFTER[tx.kind]))
        return Worker()

    def _calls(self, world: World, me: int) -> Iterator[Move]:
        worker = world.workers[me]
        if world.remote[0] == NONE:
            did = world._replace(done=_more(world.done, self.call), remote=(DONE, world.remote[1]))
            yield "calls the remote", _put(did, me, worker._replace(at="output"))
            refused = world._replace(remote=(REJECTED, world.remote[1]))
            yield "is refused by the remote", _put(refused, me, worker._replace(at="rejected"))
        else:
            again = "output" if world.remote[0] == DONE else "rejected"
            yield "gets the remembered answer", _put(world, me, worker._replace(at=again))

    def _retakes(self, world: World, me: int) -> Iterator[Move]:
        worker = world.workers[me]
        if self._blocked(world, "X"):
            return
        live = world.state in (PROCESSING, UNDOING) and not world.parked
        if live and world.owner == me and worker.token == world.token:
            taken = world._replace(token=world.token + 1)
            yield "takes over from itself", _put(taken, me, self._taken(taken, me)._replace(stale=worker.stale))
        else:
            yield "finds that it is not its own", _put(world, me, Worker())

    # ---------------------------------------------------------------------------------------------------------- faults
    def _fails(self, world: World, me: int) -> Iterator[Move]:
        worker = world.workers[me]
        if self.its.scripts[0] is not self.its.scripts[1] and not any(world.left):
            yield "leaves for good", self._gone(world, me)._replace(left=_pair(world.left, me, True))
        if worker.at == "idle":
            if self.its.earlier and me == 0:
                yield "leaves", world._replace(left=(True, False))
            return
        yield "crashes", self._gone(world, me)
        if not world.expired[me]:
            yield "is paused beyond its lease", world._replace(expired=_pair(world.expired, me, True))
        if worker.tx is not None:
            lost = world._replace(limbo=(*world.limbo, worker.tx))
            yield f"loses the answer to {worker.tx.kind}", _put(lost, me, worker._replace(at="doubt", tx=None))
        elif worker.at == "call":
            resort = last_resort(self.its.asks, world.rows)
            last = "undoing" if resort is rules.LastResort.UNDO else "park"
            for at in ("release", last):
                yield f"fails in its call: {at}", _put(world, me, worker._replace(at=at))
        elif worker.at == "go":
            yield "is drained", _put(world, me, worker._replace(at="release"))
        elif worker.at == "undo_call":
            yield "fails to undo, for the last time", _put(world, me, worker._replace(at="park"))

    def _gone(self, world: World, me: int) -> World:
        limbo = tuple(tx._replace(worker=GONE) if tx.worker == me else tx for tx in world.limbo)
        owner = GONE if world.owner == me else world.owner
        gone = world._replace(expired=_pair(world.expired, me, False), limbo=limbo, owner=owner)
        return _put(gone, me, Worker())

    # --------------------------------------------------------------------------------------------------- other parties
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

    def _holds(self, world: World, me: int) -> bool:
        return world.owner == me and not world.expired[me]

    def _held(self, world: World) -> bool:
        return self._holds(world, 0) or self._holds(world, 1)

    def _freed(self, world: World) -> World:
        token = world.token + 1
        return world._replace(token=token, owner=NOBODY, parked=False, stale=False, due=world.clock, waits=False)

    def _cancels(self, world: World) -> Iterator[Move]:
        if world.canceller == "idle" and self.its.cancel:
            if self.its.earlier and not world.left[0] and self.rules.earlier_refused:
                return
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
            told = told._replace(rows=_set(told.rows, self.call, row))
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


# --------------------------------------------------------------------------------------------------------- the promises
def _broken(its: Scenario, before: World, after: World) -> str | None:
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
        and its.review
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


def _same(world: World) -> World:
    """The same state with small numbers, as in `leased`."""
    first, second = (
        worker if worker.token == 0 else worker._replace(token=int(worker.token == world.token))
        for worker in world.workers
    )
    return world._replace(token=min(world.token, 1), workers=(first, second))


def explore(rules: Rules, scenario: Scenario) -> Explored:
    model = Model(rules, scenario)

    def end(world: World) -> int | None:
        if world.parked and not (scenario.decides and {INTENT, UNDO_INTENT} & set(world.rows)):
            return PARKED
        if world.reborn:
            return COMPLETED
        return world.state if world.state in (COMPLETED, FAILED) else None

    return walk(
        model.start(),
        model.successors,
        broken=lambda before, after: _broken(scenario, before, after),
        same=_same,
        end=end,
    )
