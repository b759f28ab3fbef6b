"""What the engine needs of a store: claims in the transaction of their effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from idemconsumer.message.message import Message, StoredResult
from idemconsumer.ports.handler import Tx
from idemconsumer.rules.values import Found, Record


class Claim(msgspec.Struct, frozen=True):
    """A key about to be claimed: SHA-256 of app, tenant, handler and key; its scope's name; the payload's fingerprint.

    `retain` is how long its record will be kept, in seconds; it is stored with the scope.
    """

    key: bytes
    scope: str
    fingerprint: bytes | None
    retain: float = 14 * 86_400.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message put aside for a person. A second arrival with the same `identity` is counted instead of added."""

    identity: bytes
    handler: str
    scope: str
    source: str
    position: str
    reason: str
    error: str
    body: bytes
    headers: Mapping[str, str | bytes]
    attempts: int = 0


class OpenTransaction(Protocol):
    """An open transaction in which a user's function may run; only the store can seal and commit it."""

    def tx(self) -> Tx:
        """A Tx for one handler. Asking for the next one ends this one."""
        ...

    def check(self) -> None:
        """After each handler: raise HandlerFault if it left the transaction failed, GuardViolated if it ended it, and
        StoreUnavailable if the connection is gone."""
        ...

    def diagnose(self, error: Exception) -> Exception:
        """The real cause of an error that left a handler: StoreUnavailable, Contention, or the handler's own."""
        ...


class Claims(OpenTransaction, Protocol):
    """One open transaction for one group: its effects, records and results are one commit (R4)."""

    async def claim(self, claims: Sequence[Claim]) -> list[Found]:
        """Claim all keys with one atomic insert, in order. Keys within one call must differ.

        Never waits for a rival: a key whose claim is not committed is `Mark.BUSY`; `Mark.CLAIMED` is ours to run.
        """
        ...

    async def complete(
        self,
        results: Sequence[tuple[bytes, StoredResult]],
        forget: Sequence[bytes],
        *,
        failed: tuple[Claim, str] | None = None,
    ) -> int:
        """Store results, delete the attempt rows of `forget`, seal and COMMIT, as one act.

        `failed` is a message that failed behind these, and its error: one attempt of it is counted in the same commit.
        Returns how many it has now, else 0.

        Runs to its end even when the caller is cancelled, then re-raises the cancellation. Raises GuardViolated when
        the transaction is not the one that was opened, Contention, CommitUnknown when the answer of COMMIT was lost,
        or the database's own error (a deferred constraint); in all but CommitUnknown nothing was committed.
        """
        ...


class JoinedStore(Protocol):
    """Claims in the transaction of their effects. Every method raises StoreUnavailable when the database is down.

    A method with a commit of its own may also raise CommitUnknown; call it again then.
    """

    @property
    def most_locks(self) -> int:
        """How many keys all lanes together may hold at once (G4)."""
        ...

    def transaction(self, *, group: int, gate: str | None = None) -> AbstractAsyncContextManager[Claims]:
        """A transaction for `group` messages. Leaving without `complete` rolls back; a broken connection is dropped.

        Those with the same `gate` take turns, across all processes: the first claim waits, before it claims, until no
        other one is open. That wait is not a collision, however short the lock time-out of a group is.
        """
        ...

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        """What committed records say now. Claims nothing."""
        ...

    async def mark_attempts(self, claims: Sequence[Claim]) -> set[bytes]:
        """Put on record that these are about to run, in one commit and without counting an attempt.

        Returns the keys that were not on record before, neither marked nor counted.
        """
        ...

    async def unmark_attempts(self, keys: Sequence[bytes]) -> None:
        """Take marks back. Attempts that were counted since stay."""
        ...

    async def count_attempt(self, claim: Claim, error: str | None) -> int:
        """Add one attempt, in a commit of its own; returns how many there are now."""
        ...

    async def uncount_attempt(self, claim: Claim) -> None:
        """Take back one attempt that was counted before a run which then was cancelled."""
        ...

    async def note_error(self, claim: Claim, error: str) -> int:
        """Store the error of an attempt that was counted beforehand; returns how many attempts there are."""
        ...

    async def take_over(self, queue: str, message: Message) -> None:
        """Put a message that its broker would soon drop into the queue in Postgres. Committed on return."""
        ...

    async def close(self) -> None: ...

    async def reject(self, claim: Claim, rejection: StoredResult) -> Record | None:
        """Store FAILED and its rejection in a transaction of its own, after claiming anew.

        Returns None when stored; the record of a rival that was faster. Raises Contention when a rival
        holds the key.
        """
        ...

    async def count_dead(self, key: bytes) -> None:
        """One more arrival of a message whose record is DEAD."""
        ...

    async def bury(self, letter: DeadLetter, claim: Claim | None) -> Record | None:
        """Write the dead letter and, where a claim is given, the record DEAD, in one transaction.

        Returns None when written (or counted once more); the final record of a rival that was faster.
        """
        ...
