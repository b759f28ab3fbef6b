"""What the sagas need of a store: leases, tokens and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from idemconsumer.message.message import Message, StoredResult
from idemconsumer.ports.store import Claim, DeadLetter, OpenTransaction
from idemconsumer.rules.values import Found, Record, State, StepKind, StepRow, StepState


@dataclass(frozen=True, slots=True)
class Runs:
    """A handler of sagas that a process runs, in its version."""

    app: str
    handler: str
    version: str | None


class LeasedSaga(msgspec.Struct, frozen=True):
    """A saga that this worker holds: its token, its phase, and the message that began it.

    `attempt` is the number of this attempt since the last finished step. `stale`: it was taken from a lost worker, and
    what follows from that is not decided yet; a release keeps it stale. `new`: claimed a moment ago, so that no step of
    it can be recorded yet. `suspect`: it has lost two workers in a row, and finished no step in between. `cancel`: it
    is to be cancelled, and whether its finished steps are to be undone; None while nobody has requested it (L50).
    `begun`: when, by the database's clock, as a time of this process's monotonic one.
    """

    key: bytes
    scope: str
    handler: str
    token: int
    worker: int
    state: State
    attempt: int
    version: str | None
    rejection: bytes | None
    stale: bool
    message: Message
    new: bool = False
    suspect: bool = False
    cancel: bool | None = None
    begun: float = math.inf


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the store found: `own` as `LeaseStore.own` has it; `due`: in how many seconds the next saga of a
    handler may be taken, negative if it could have been so long ago. A handler without sagas that are due soon is not
    there. `cancelled`: the keys of our own that are to be cancelled. `queues`: in how many seconds something of a
    Postgres queue can be taken, not more than 0 if something can be now. A queue without such messages is not there."""

    own: list[tuple[bytes, int]]
    due: dict[str, float]
    cancelled: list[bytes] = field(default_factory=list)
    queues: dict[str, float] = field(default_factory=dict)


class Kinship(NamedTuple):
    """What another saga is to this one now. `above`: it has not ended, and is this one or has started it, directly or
    through others. `started`: this one has started it."""

    above: bool
    started: bool


class Begun(NamedTuple):
    """What is there under the key of a saga that is being started (L80). `owner`: the saga whose start is the first of
    those that have not begun. `is_new`: nothing was there."""

    found: list[Record]
    owner: bytes
    is_new: bool


class OpenStep(OpenTransaction, Protocol):
    """The transaction of a `tx` step: fenced, its checkpoint inserted, not sealed yet."""

    async def start_child(self, claim: Claim, queued: tuple[str, str] | None) -> Begun:
        """Put on record that this saga starts the one of `claim` (L47). With the queue and the key of its message, one
        that somebody else has put there counts as being there."""
        ...

    async def kinship(self, child: bytes) -> Kinship:
        """As `LeaseStore.kinship`."""
        ...

    async def finish(self, output: StoredResult | None, *, overlapped: bool) -> int:
        """Output, position, seal and COMMIT as one act; returns the position. Raises as `Claims.complete`."""
        ...


class OpenCompletion(OpenTransaction, Protocol):
    """A transaction that completes the saga if it is finished; fenced, its record already COMPLETED, not sealed yet."""

    async def finish(self, result: StoredResult | None) -> None:
        """Result, the end of the saga's row, seal and COMMIT as one act. Raises as `Claims.complete`."""
        ...


class LeaseStore(Protocol):
    """Sagas: claimed in a commit of their own, held by lease and token.

    Every write is fenced: it locks the saga's row FOR SHARE with the holder's token and phase, in the writing
    transaction, and raises Fenced when there is no such row. CommitUnknown must be answered by `retake`, never by
    reading again with the old token. Every method raises StoreUnavailable when the database is unreachable. `step` and
    `intend` wait while the lease could not be renewed in time (L38).
    """

    async def begin(self, claim: Claim, message: Message, handler: str, version: str | None) -> Found | LeasedSaga:
        """Claim the key and store the message with it, committed on return; else what was found."""
        ...

    async def own(self, key: bytes | None = None) -> list[tuple[bytes, int]]:
        """Key and token of each saga that is ours in the database; with `key`, of that one alone.

        One that is not in hand in this process *after* this returned was left by a lost answer, or by a release that
        failed: every run has its saga in hand before it asks for it.
        """
        ...

    async def look(self, app: str, handlers: Sequence[str], queues: Sequence[str] = ()) -> Look:
        """Whether there is anything to take, in one statement that changes nothing (L32); also from these Postgres
        queues (L61). Without them it waits for no lock on their tables (L67)."""
        ...

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

        Of a handler whose version the store was told, only sagas of that version, of any version by a person's
        decision, or of one that is gone: for ten minutes no worker has lived that runs it (L28). A lost worker costs an
        attempt only after `count`. `unheld` are those of `own` that are not in hand here: they
        are taken too, at no cost of an attempt, unless they have another token by now. With `key`, that saga alone.
        """
        ...

    async def superseded(self, app: str, saga: LeasedSaga) -> bool:
        """Whether a worker of another build runs the handler in the same version, or did so within the last ten
        minutes. Builds that were unable to go on with the saga do not count (L29)."""
        ...

    async def leave(self, app: str, saga: LeasedSaga, error: str, delay: float) -> float | None:
        """Give it up at no cost, to a live worker as `superseded` has it, or for `delay` seconds if there is none now;
        returns in how many seconds it can be taken. This build is unable to go on with it. None: there is no such
        worker, and it is still ours."""
        ...

    async def retake(self, key: bytes, token: int | None) -> LeasedSaga | None:
        """After CommitUnknown: a new token for what we hold, once all writes in flight have ended. None: not ours.

        `token` None: that of the claim is not known, since its answer was lost.
        """
        ...

    async def count(self, saga: LeasedSaga) -> None:
        """Put on record that it is about to run alone: if this worker dies before the next step is finished, that is an
        attempt. To count it again changes nothing."""
        ...

    async def steps(self, key: bytes, window: int = 0) -> list[StepRow]:
        """In the order in which they finished. With their outputs up to `window` bytes in all, and each output that is
        no larger than 64 bytes; the others are left in the store (L55)."""
        ...

    async def outputs(self, key: bytes, names: Sequence[str]) -> dict[str, StoredResult]:
        """The outputs of finished steps, by name."""
        ...

    def step(
        self,
        saga: LeasedSaga,
        name: str,
        *,
        has_undo: bool,
        undo: bool,
        timeout: float = 0.0,
        arguments: bytes | None = None,
    ) -> AbstractAsyncContextManager[OpenStep]:
        """A `tx` step, or its undo: fence and checkpoint come before the function's first statement (L3). It begins
        under a lease that is good for its `timeout`, in seconds (L59). `arguments`: as in `StepRow`."""
        ...

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
        """Commit that the remote is about to be called; returns how many times it will have been, under a lease that
        is good for `timeout` seconds (L59). `overlapped`: the call has no fixed place among the steps (L24)."""
        ...

    async def record(
        self, saga: LeasedSaga, name: str, kind: StepKind, state: StepState, output: StoredResult | None,
        *, has_undo: bool, overlapped: bool, arguments: bytes | None = None,
    ) -> int:  # fmt: skip
        """Commit a call's output, a step's rejection, or that a call was undone; returns its position."""
        ...

    async def wait(
        self, saga: LeasedSaga, name: str, kind: StepKind, seconds: float, signal: str | None, *,
        child: bytes | None = None, overlapped: bool, closes: Sequence[str] = (),
    ) -> StepRow | float:  # fmt: skip
        """Begin a wait, or look whether one that was begun is over: its end was computed at its beginning, by the
        database's clock (L40). The oldest signal of its name is taken in the commit that records it. A float: it is not
        over, for so many seconds. With `child`, the stored key of one that was started, it waits for its end. When it
        is over, the waits of `closes` are gone (L74)."""
        ...

    async def pause(self, saga: LeasedSaga, waits: Sequence[str], at_most: float | None) -> float:
        """Give it up, at no cost, until one of these waits is over, or for `at_most` seconds (L58); returns in how many
        seconds that is at the latest.
        It is due at once if one of their signals has come meanwhile (L42)."""
        ...

    async def kinship(self, key: bytes, child: bytes) -> Kinship:
        """What the saga under `child` is to the one under `key` (L65)."""
        ...

    async def stop_child(self, saga: LeasedSaga, child: bytes, scope: str, queued: tuple[str, str]) -> State:
        """How it has ended: COMPLETED, or FAILED if it left nothing to undo, or is not this saga's to undo (L80);
        PROCESSING if it has not. One that has not begun is kept from beginning (L49). `queued`: queue and key of its
        message."""
        ...

    async def pause_undo(self, saga: LeasedSaga, child: bytes) -> float:
        """As `pause`, until this child has ended."""
        ...

    async def complete(self, saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        """COMPLETED or FAILED, its result, and the end of the saga's row, in one commit."""
        ...

    async def undo(self, saga: LeasedSaga, rejection: StoredResult, added: Sequence[str] = ()) -> LeasedSaga | None:
        """Commit UNDOING; None when an intent is open: what there is to undo is not known yet (L7). `added`: steps that
        were recorded without an undo and have one now, which is recorded in the same commit (L25)."""
        ...

    async def release(
        self, saga: LeasedSaga, delay: float, error: str | None, *, count: bool, held: bool = False
    ) -> None:
        """Give it up: any worker may take it after `delay` seconds. `count=False` gives the attempt back (a drain).
        `held`: a function that it needs fails in all sagas (D17), which is noted once for as long as that lasts."""
        ...

    async def park(self, saga: LeasedSaga, letter: DeadLetter) -> int:
        """Record DEAD, dead letter, and the saga's row put aside for a person, in one commit. Returns the
        letter's id."""
        ...

    def completion(self, saga: LeasedSaga) -> AbstractAsyncContextManager[OpenCompletion]:
        """A transaction in which to find out whether the saga is done. Leaving without `finish` rolls back."""
        ...

    async def note(self, key: bytes, what: str, detail: str | None) -> None:
        """Add to the history of a saga that has not ended. Not fenced: it decides nothing."""
        ...
