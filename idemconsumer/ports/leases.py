"""What the sagas need of a store: leases, tokens and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from idemconsumer.message.message import Message, StoredResult
from idemconsumer.ports.store import Claim, DeadLetter, OpenTransaction
from idemconsumer.rules.values import Found, State, StepKind, StepRow, StepState


@dataclass(frozen=True, slots=True)
class LeasedSaga:
    """A saga that this worker holds: its token, its phase, and the message that began it.

    `attempt` counts takeovers without a finished step in between. `stale`: it was taken from a lost worker, and
    what follows from that is not decided yet; a release keeps it stale. `new`: claimed a moment ago, so that no step of
    it can be recorded yet.
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


class OpenStep(OpenTransaction, Protocol):
    """The transaction of a `tx` step: fenced, its checkpoint inserted, not sealed yet."""

    async def finish(self, output: StoredResult | None, *, overlapped: bool) -> None:
        """Output, position, seal and COMMIT as one act. Raises as `Claims.complete`."""
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
    reading again with the old token. Every method raises StoreUnavailable when the database is unreachable.
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

    async def take(
        self,
        app: str,
        handlers: Sequence[str],
        limit: int,
        *,
        unheld: Sequence[tuple[bytes, int]] = (),
        key: bytes | None = None,
    ) -> list[LeasedSaga]:
        """Take over sagas that are due or stale, each with a new token. Skips those that are being written to.

        `unheld` are those of `own` that are not in hand here: they are taken too, at no cost of an attempt, unless they
        have another token by now. With `key`, that saga alone.
        """
        ...

    async def retake(self, key: bytes, token: int | None) -> LeasedSaga | None:
        """After CommitUnknown: a new token for what we hold, once all writes in flight have ended. None: not ours.

        `token` None: that of the claim is not known, since its answer was lost.
        """
        ...

    async def steps(self, key: bytes) -> list[StepRow]: ...

    def step(self, saga: LeasedSaga, name: str, *, has_undo: bool, undo: bool) -> AbstractAsyncContextManager[OpenStep]:
        """A `tx` step, or its undo: fence and checkpoint come before the function's first statement (L3)."""
        ...

    async def intend(self, saga: LeasedSaga, name: str, *, has_undo: bool, undo: bool) -> int:
        """Commit that the remote is about to be called; returns how many times it will have been."""
        ...

    async def record(
        self, saga: LeasedSaga, name: str, kind: StepKind, state: StepState, output: StoredResult | None,
        *, has_undo: bool, overlapped: bool,
    ) -> None:  # fmt: skip
        """Commit a call's output, a step's rejection, or that a call was undone."""
        ...

    async def complete(self, saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        """COMPLETED or FAILED, its result, and the end of the saga's row, in one commit."""
        ...

    async def undo(self, saga: LeasedSaga, rejection: StoredResult) -> LeasedSaga | None:
        """Commit UNDOING; None when an intent is open: what there is to undo is not known yet (L7)."""
        ...

    async def release(self, saga: LeasedSaga, delay: float, error: str | None, *, count: bool) -> None:
        """Give it up: any worker may take it after `delay` seconds. `count=False` gives the attempt back (a drain)."""
        ...

    async def park(self, saga: LeasedSaga, letter: DeadLetter) -> None:
        """Record DEAD, dead letter, and the saga's row put aside for a person, in one commit."""
        ...

    def completion(self, saga: LeasedSaga) -> AbstractAsyncContextManager[OpenCompletion]:
        """A transaction in which to find out whether the saga is done. Leaving without `finish` rolls back."""
        ...

    async def note(self, key: bytes, what: str, detail: str | None) -> None:
        """Add to the history of a saga that has not ended. Not fenced: it decides nothing."""
        ...
