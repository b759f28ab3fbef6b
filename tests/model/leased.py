"""A small model of the leased protocol. `explorer` walks through every interleaving of it; `waiting` models the rest.

Two workers, one key, three steps (transaction, call, transaction), each with an undo. One action of the model is what
is atomic in Postgres or outside of it: a statement that locks the saga's row, a COMMIT, one read, one call of the
remote. A transaction therefore holds its lock over other actors' actions, and a COMMIT whose answer was lost stays in
*limbo*, with its locks, until the server applies or drops it. A paused worker needs no action of its own: its lease
runs out and it goes on, late, with what it knew.

Faults (crash, lease over, lost COMMIT, broken connection, redelivery, error, drain, COMMIT inside a step) share one
budget; everything else may happen at any time. Giving way to another message (L23) is a drain. Left out: attempt counts
(any error may be the last one), time, and the worker's id in the fence, since the token alone must do.

The workers may be of two versions of the handler, as in a deployment (L28). Then a worker may also leave for good,
which stands for the grace after which its version is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tests.model.explorer import Explored, walk

ABSENT, PROCESSING, UNDOING, COMPLETED, FAILED, DEAD = range(6)
NONE, INTENT, DONE, REJECTED, UNDO_INTENT, UNDONE = range(6)  # of a step's row, as in StepState
STEPS: Final = range(3)
CALL: Final = 1  # the step that calls the remote; the others are transactions
NOBODY, GONE = -1, -2  # a saga that is due; one whose worker's lease has ended for good

STEP_WRITES: Final = ("do", "intend", "output", "rejected", "undo", "undo_intend", "undo_output")


@dataclass(frozen=True)
class Rules:
    """What the protocol keeps. Each one can be taken out, to see what it is for."""

    token: bool = True  # a fenced write needs the holder's token
    fence_lock: bool = True  # ... and locks the saga's row until COMMIT
    fence_counted: bool = True  # ... and stops when the lock found no row
    checkpoint_first: bool = True  # a step's row is written before its function runs
    intent: bool = True  # a call is announced in a commit of its own
    undoing_first: bool = True  # UNDOING is committed before the first undo
    undo_key: bool = True  # an undo has a key of its own
    same_key: bool = True  # every attempt of a call has the same key
    new_token: bool = True  # after an unknown COMMIT the saga is taken over from oneself
    doubt_kept: bool = True  # ... also when the database was away in between
    unheld_taken: bool = True  # what is a worker's own and not in its hands is taken again
    told_if_stored: bool = True  # a lost lease settles no message whose claim is not known to be committed
    own_version: bool = True  # a worker takes only sagas of its version
    gone_taken: bool = True  # ... and those of one that nobody runs any more
    version_checked: bool = True  # ... which it puts aside


class Tx(NamedTuple):
    """An open transaction: what COMMIT will apply, and the lock on the saga's row: S, X, A (the claim's), or none."""

    kind: str
    step: int
    worker: int
    lock: str


class Worker(NamedTuple):
    """What one worker knows. `at`: idle, read, go, open, call, undo_call, failed, doubt, claim_doubt, or a kind of
    transaction that it is about to open. `delivery`: a broker waits for its settlement."""

    at: str = "idle"
    step: int = 0
    token: int = 0
    phase: int = PROCESSING
    view: tuple[int, ...] = (NONE,) * 3
    delivery: bool = False
    tx: Tx | None = None


class World(NamedTuple):
    record: int = ABSENT
    token: int = 0
    owner: int = NOBODY
    rows: tuple[int, ...] = (NONE,) * 3
    done: tuple[int, ...] = (0, 0, 0)  # effects of the steps, the remote's in the middle
    undone: tuple[int, ...] = (0, 0, 0)
    remote: tuple[int, int] = (NONE, NONE)  # what it remembers under the step's key and under the undo's
    told: bool = False  # the broker has its settlement
    expired: tuple[bool, bool] = (False, False)  # lease over, and the worker has not noticed
    workers: tuple[Worker, Worker] = (Worker(), Worker())
    limbo: tuple[Tx, ...] = ()
    faults: int = 0
    version: int = 0  # the one that it began with
    left: tuple[bool, bool] = (False, False)  # for so long that its version is gone
    robbed: bool = False  # taken by another version, although a worker of its own lives
    mixed: bool = False  # run by another version


Step = tuple[str, World]


def _same(world: World) -> World:
    """The same state with small numbers: a token that is not the saga's will never be it again."""
    workers = [w if w.token == 0 else w._replace(token=int(w.token == world.token)) for w in world.workers]
    return world._replace(token=min(world.token, 1), workers=(workers[0], workers[1]))


# --------------------------------------------------------------------------------------------------------------- locks
def _open(world: World) -> Iterator[Tx]:
    yield from (worker.tx for worker in world.workers if worker.tx is not None)
    yield from world.limbo


def _blocked(world: World, tx: Tx) -> bool:
    """Whether opening `tx` has to wait: for the saga's row, or for a step's row that another one has written."""
    for other in _open(world):
        if tx.lock and other.lock and "A" not in (tx.lock, other.lock) and "X" in (tx.lock, other.lock):
            return True
        if tx.kind in STEP_WRITES and other.kind in STEP_WRITES and tx.step == other.step:
            return True
    return False


def _row_locked(world: World) -> bool:
    return any(tx.lock in ("S", "X") for tx in _open(world))


# -------------------------------------------------------------------------------------------------------------- writes
def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _effect(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return _set(values, index, values[index] + 1)


_ROW_AFTER: Final = {
    "do": DONE, "intend": INTENT, "output": DONE, "rejected": REJECTED,
    "undo": UNDONE, "undo_intend": UNDO_INTENT, "undo_output": UNDONE,
}  # fmt: skip
_RECORD_AFTER: Final = {"undoing": UNDOING, "complete": COMPLETED, "fail": FAILED, "park": DEAD}


def _apply(world: World, tx: Tx) -> World:
    """What COMMIT makes true."""
    if tx.kind in STEP_WRITES:
        world = world._replace(rows=_set(world.rows, tx.step, _ROW_AFTER[tx.kind]))
        if tx.kind == "do":
            return world._replace(done=_effect(world.done, tx.step))
        if tx.kind == "undo":
            return world._replace(undone=_effect(world.undone, tx.step))
        return world
    if tx.kind == "begin":
        return world._replace(record=PROCESSING, token=1, owner=tx.worker, version=tx.step)
    if tx.kind == "take":
        return world._replace(token=world.token + 1, owner=tx.worker)
    if tx.kind == "release":
        return world._replace(owner=NOBODY)
    return world._replace(record=_RECORD_AFTER[tx.kind])


# -------------------------------------------------------------------------------------------------------- one worker
def _next(worker: Worker) -> tuple[str, int]:
    """What a run does next, by the rows that it has read: the replayed handler, or the undo."""
    if worker.phase == UNDOING:
        for step in reversed(STEPS):
            if worker.view[step] in (DONE, UNDO_INTENT):
                return ("undo_intend" if step == CALL else "undo"), step
        return "fail", 0
    for step in STEPS:
        if worker.view[step] == REJECTED:
            return "undoing", 0
        if worker.view[step] in (NONE, INTENT):
            return ("intend" if step == CALL else "do"), step
    return "complete", 0


def _after(worker: Worker, kind: str, step: int) -> Worker:
    """A worker whose COMMIT was answered."""
    worker = worker._replace(tx=None, step=step)
    if kind in ("do", "output", "undo", "undo_output"):
        return worker._replace(at="go", view=_set(worker.view, step, _ROW_AFTER[kind]))
    if kind == "intend":
        return worker._replace(at="call")
    if kind == "undo_intend":
        return worker._replace(at="undo_call")
    if kind == "rejected":
        return worker._replace(at="undoing")
    if kind == "undoing":
        return worker._replace(at="read", phase=UNDOING)
    if kind in ("begin", "take"):
        return worker._replace(at="read")
    return Worker()


class Model:
    def __init__(self, rules: Rules, faults: int, versions: tuple[int, int]) -> None:
        self.rules = rules
        self.faults = faults
        self.versions = versions

    def successors(self, world: World) -> Iterator[Step]:
        for position, tx in enumerate(world.limbo):
            rest = world._replace(limbo=world.limbo[:position] + world.limbo[position + 1 :])
            yield f"server applies the lost {tx.kind}", _apply(rest, tx)
            yield f"server drops the lost {tx.kind}", rest
        for me in (0, 1):
            if world.left[me]:
                continue
            for label, after in self._worker(world, me):
                yield f"{'AB'[me]} {label}", after
            if world.faults < self.faults:
                for label, after in self._fault(world._replace(faults=world.faults + 1), me):
                    yield f"{'AB'[me]} {label}", after

    def _put(self, world: World, me: int, worker: Worker) -> World:
        workers = (worker, world.workers[1]) if me == 0 else (world.workers[0], worker)
        return world._replace(workers=workers)

    # --------------------------------------------------------------------------------------------------- without fault
    def _worker(self, world: World, me: int) -> Iterator[Step]:
        worker = world.workers[me]
        if world.expired[me]:
            yield "notices that its lease is over", self._gone(world, me, noticed=True)
        match worker.at:
            case "idle":
                if not world.told and not any(w.delivery for w in world.workers):
                    yield from self._deliver(world, me)
                yield from self._take(world, me)
            case "read":
                told = world.told or worker.delivery
                read = worker._replace(at="go", view=world.rows, delivery=False)
                yield "reads the steps", self._put(world._replace(told=told), me, read)
            case "go":
                kind, step = _next(worker)
                if kind == "intend" and not self.rules.intent:
                    yield "goes to the remote", self._put(world, me, worker._replace(at="call", step=step))
                else:
                    yield from self._opens(world, me, kind, step)
                if kind == "complete":  # not recorded, so the next run may decide otherwise
                    yield "is rejected by the handler", self._put(world, me, worker._replace(at="undoing"))
            case "open":
                yield from self._ends(world, me)
            case "call":
                yield from self._calls(world, me)
            case "undo_call":
                memory = 1 if self.rules.undo_key else 0
                after = self._put(world, me, worker._replace(at="undo_output"))
                if world.remote[memory] == NONE or not self.rules.same_key:
                    after = after._replace(undone=_effect(world.undone, CALL), remote=(world.remote[0], DONE))
                yield "undoes the call", after
            case "failed":  # the last attempt: what is recorded decides (an unlocked read)
                if INTENT in world.rows or DONE not in world.rows:
                    yield "gives up for a person", self._put(world, me, worker._replace(at="park"))
                else:
                    yield "gives up and undoes", self._put(world, me, worker._replace(at="undoing"))
            case "doubt":
                yield from self._retakes(world, me)
            case "claim_doubt":
                if world.owner == me and world.record in (PROCESSING, UNDOING):
                    yield from self._retakes(world, me)
                else:
                    yield from self._deliver(world, me)
            case kind:
                yield from self._opens(world, me, kind, worker.step)

    def _deliver(self, world: World, me: int) -> Iterator[Step]:
        worker = Worker(delivery=True)
        if world.record in (COMPLETED, FAILED, DEAD):
            yield "answers a duplicate", self._put(world._replace(told=True), me, Worker())
        elif world.record == ABSENT and not any(tx.kind == "begin" for tx in _open(world)):
            claiming = worker._replace(at="open", tx=Tx("begin", self.versions[me], me, "A"))
            yield "claims", self._put(world, me, claiming)
        elif world.workers[me].at != "idle":
            yield "finds it busy", self._put(world, me, Worker())

    def _take(self, world: World, me: int) -> Iterator[Step]:
        owner = world.owner
        stale = owner < 0 or (self.rules.unheld_taken if owner == me else world.expired[owner])
        if world.record not in (PROCESSING, UNDOING) or not stale or _row_locked(world):
            return
        taken = _apply(world, Tx("take", 0, me, "X"))
        worker = Worker(at="read", token=taken.token, phase=world.record)
        if self.versions[me] == world.version:
            yield "takes the saga over", self._put(taken, me, worker)
            return
        gone = all(left for left, its in zip(world.left, self.versions, strict=True) if its == world.version)
        if not (self.rules.gone_taken if gone else not self.rules.own_version):
            return
        yield "takes a saga of another version", self._begins(taken._replace(robbed=not gone), me, worker)

    def _begins(self, world: World, me: int, worker: Worker) -> World:
        """It runs what it has taken, or puts it aside, since its handler is another one."""
        if self.versions[me] == world.version:
            return self._put(world, me, worker)
        if self.rules.version_checked:
            return self._put(world, me, worker._replace(at="park"))
        return self._put(world._replace(mixed=True), me, worker)

    def _opens(self, world: World, me: int, kind: str, step: int) -> Iterator[Step]:
        worker = world.workers[me]
        if kind == "undoing" and not self.rules.undoing_first:
            yield "begins to undo", self._put(world, me, worker._replace(at="read", phase=UNDOING))
            return
        lock = ("S" if self.rules.fence_lock else "") if kind in STEP_WRITES else "X"
        tx = Tx(kind, step, me, lock)
        if _blocked(world, tx):
            return
        phase = worker.phase if self.rules.undoing_first else PROCESSING
        ours = world.record == phase and (worker.token == world.token or not self.rules.token)
        if not ours and self.rules.fence_counted:
            yield f"is fenced at {kind}", self._put(world, me, Worker())
        elif kind == "undoing" and INTENT in world.rows:
            yield "finds an open intent", self._put(world, me, worker._replace(at="park"))
        else:
            yield f"opens {kind} {step}", self._put(world, me, worker._replace(at="open", step=step, tx=tx))

    def _ends(self, world: World, me: int) -> Iterator[Step]:
        worker = world.workers[me]
        tx = worker.tx
        assert tx is not None
        known = _after(worker, tx.kind, tx.step)
        if tx.kind == "begin":
            known = known._replace(token=1)
        yield f"commits {tx.kind} {tx.step}", self._put(_apply(world, tx), me, known)
        if tx.kind == "do" and tx.step == STEPS[-1]:
            rejecting = worker._replace(at="rejected", tx=None)
            yield "is rejected by the last step", self._put(world, me, rejecting)

    def _calls(self, world: World, me: int) -> Iterator[Step]:
        worker = world.workers[me]
        answered = self._put(world, me, worker._replace(at="output"))
        refused = self._put(world, me, worker._replace(at="rejected"))
        if world.remote[0] == REJECTED:
            yield "is refused again by the remote", refused
            return
        if world.remote[0] == DONE and self.rules.same_key:
            yield "gets the remembered answer", answered
            return
        remembers = (DONE, world.remote[1])
        yield "calls the remote", answered._replace(done=_effect(world.done, CALL), remote=remembers)
        if world.remote[0] == NONE:
            yield "is refused by the remote", refused._replace(remote=(REJECTED, world.remote[1]))

    def _retakes(self, world: World, me: int) -> Iterator[Step]:
        """One statement: waits for the row, then needs the old token (after an unknown claim: any, if it is ours)."""
        worker = world.workers[me]
        if _row_locked(world):
            return
        ours = world.record in (PROCESSING, UNDOING) and world.owner == me
        if ours and (worker.at == "claim_doubt" or worker.token == world.token):
            taken = _apply(world, Tx("take", 0, me, "X"))
            again = worker._replace(at="read", token=taken.token, phase=world.record)
            yield "takes over from itself", self._begins(taken, me, again)
        else:
            yield "finds that it is not its own", self._put(world, me, Worker())

    # ---------------------------------------------------------------------------------------------------------- faults
    def _fault(self, world: World, me: int) -> Iterator[Step]:
        worker = world.workers[me]
        tx = worker.tx
        if self.versions[0] != self.versions[1] and not any(world.left):
            left = (True, world.left[1]) if me == 0 else (world.left[0], True)
            yield "leaves for good", self._gone(world, me, noticed=False)._replace(left=left)
        if worker.at == "idle":
            if world.record == ABSENT:
                yield from (("sees a redelivery, and " + label, after) for label, after in self._deliver(world, me))
            elif any(True for _ in self._take(world, me)):
                yield "takes, the answer is lost", world._replace(limbo=(*world.limbo, Tx("take", 0, me, "X")))
            return
        yield "crashes", self._gone(world, me, noticed=False)
        if not world.expired[me]:
            expired = (True, world.expired[1]) if me == 0 else (world.expired[0], True)
            yield "is paused beyond its lease", world._replace(expired=expired)
        if tx is not None:
            lost = world._replace(limbo=(*world.limbo, tx))
            yield f"loses the answer to {tx.kind} {tx.step}", self._put(lost, me, self._unknown(worker, tx))
            broken = worker._replace(tx=None, at="doubt" if self.rules.doubt_kept else "read")
            broken = Worker() if tx.kind == "begin" else broken
            yield f"loses the connection in {tx.kind} {tx.step}", self._put(world, me, broken)
            if tx.kind in ("do", "undo"):
                yield from self._function_fails(world, me, tx)
        elif worker.at == "call":
            yield from self._failed(world, me, "fails before the remote has heard of it")
            if world.remote[0] == NONE:
                heard = world._replace(done=_effect(world.done, CALL), remote=(DONE, world.remote[1]))
                yield from self._failed(heard, me, "hears nothing from the remote, which did it")
        elif worker.at == "undo_call":
            yield "fails to undo the call", self._put(world, me, worker._replace(at="release"))
        elif worker.at == "doubt":
            again = worker._replace(at="doubt" if self.rules.doubt_kept else "read")
            if not _row_locked(world) and world.owner == me and world.token == worker.token:
                limbo = (*world.limbo, Tx("take", 0, me, "X"))
                yield "loses the answer to its own takeover", self._put(world._replace(limbo=limbo), me, again)
            yield "finds the database away", self._put(world, me, again)
        if tx is None and worker.at not in ("claim_doubt", "release"):
            yield "is drained", self._put(world, me, worker._replace(at="release", delivery=False))

    def _unknown(self, worker: Worker, tx: Tx) -> Worker:
        if tx.kind == "begin":
            return worker._replace(at="claim_doubt", tx=None)
        return worker._replace(at="doubt" if self.rules.new_token else "read", tx=None)

    def _function_fails(self, world: World, me: int, tx: Tx) -> Iterator[Step]:
        worker = world.workers[me]._replace(tx=None)
        if tx.kind == "undo":
            yield "fails to undo", self._put(world, me, worker._replace(at="release"))
            return
        rolled_back = self._put(world, me, worker)
        yield from self._failed(rolled_back, me, "fails in a step")
        if not self.rules.checkpoint_first:
            # With the row written first, the guard finds it unsealed and this COMMIT becomes an ordinary failure.
            escaped = rolled_back._replace(done=_effect(world.done, tx.step))
            yield from self._failed(escaped, me, "commits inside its step")

    def _failed(self, world: World, me: int, what: str) -> Iterator[Step]:
        worker = world.workers[me]
        yield f"{what}, to try again", self._put(world, me, worker._replace(at="release"))
        yield f"{what}, for the last time", self._put(world, me, worker._replace(at="failed"))

    def _gone(self, world: World, me: int, *, noticed: bool) -> World:
        """All that the worker knew is gone, and what it holds is stale: the next one has a new id."""
        worker = world.workers[me]
        claiming = worker.at == "claim_doubt" or (worker.tx is not None and worker.tx.kind == "begin")
        told = world.told or (noticed and claiming and worker.delivery and not self.rules.told_if_stored)
        expired = (False, world.expired[1]) if me == 0 else (world.expired[0], False)
        limbo = tuple(tx._replace(worker=GONE) if tx.worker == me else tx for tx in world.limbo)
        owner = GONE if world.owner == me else world.owner
        return self._put(world, me, Worker())._replace(told=told, expired=expired, limbo=limbo, owner=owner)


# --------------------------------------------------------------------------------------------------------- the promises
def _broken(before: World, after: World) -> str | None:
    if max(after.done) > 1 or max(after.undone) > 1:
        return "an effect happened twice"
    if after.record == COMPLETED and (after.done != (1, 1, 1) or after.undone != (0, 0, 0)):
        return "completed without each step's effect once"
    if after.record == FAILED and after.done != after.undone:
        return "failed, and an effect survives"
    if after.told and after.record == ABSENT:
        return "the broker was told of a message that is not stored"
    if after.token < before.token:
        return "a token went back"
    if after.robbed and after.record == DEAD and before.record != DEAD:
        return "put aside, though a worker of its version lives"
    if after.mixed and (after.done, after.undone) != (before.done, before.undone):
        return "went on with another version"
    if before.record in (COMPLETED, FAILED, DEAD):
        if after.record != before.record:
            return "a final state changed"
        changed = [s for s in STEPS if (before.done[s], before.undone[s]) != (after.done[s], after.undone[s])]
        # For DEAD a person was told that nobody knows how the call ended; it may still arrive.
        if changed and (before.record != DEAD or changed != [CALL]):
            return "an effect after the end"
    return None


def explore(rules: Rules, *, faults: int, versions: tuple[int, int] = (0, 0)) -> Explored:
    """`versions`: those of the handler that the workers run."""

    def end(world: World) -> int | None:
        return world.record if world.record in (COMPLETED, FAILED, DEAD) else None

    return walk(World(), Model(rules, faults, versions).successors, broken=_broken, same=_same, end=end)
