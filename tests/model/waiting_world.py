"""What the model of `waiting` is made of: rules, scenarios, and the world as its parties and the database see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from idemconsumer.rules.values import State, StepState
from tests.model.scripts import Ask, Script

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
    nobody_asked: bool = True  # L50: the handler's reconcile is not, nor a person
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
    asks_a_person: bool = False  # reconcile says Unknown()


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


def set_at(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def more_at(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return set_at(values, index, values[index] + 1)


def pair(values: tuple[bool, bool], me: int, value: bool) -> tuple[bool, bool]:
    return (value, values[1]) if me == 0 else (values[0], value)


def put(world: World, me: int, worker: Worker) -> World:
    return world._replace(workers=(worker, world.workers[1]) if me == 0 else (world.workers[0], worker))
