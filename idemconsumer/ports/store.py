"""What the engine needs of a store: claims in the transaction of their effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import msgspec

from idemconsumer.message.message import Message, StoredResult
from idemconsumer.ports.handler import Tx
from idemconsumer.rules.habits import Habits
from idemconsumer.rules.values import Found, Record


class Claim(msgspec.Struct, frozen=True):
    """A key about to be claimed: SHA-256 of app, tenant, handler and key; its scope's name; the payload's fingerprint.

    `canonical` is the fingerprint of the payload's value, if the handler compares that too (R26).
    `retain` is how long its record will be kept, in seconds; it is stored with the scope. `pending`: the claim may take
    a PENDING record, since this is the message that it waits for (D19). `expires`: for how many seconds a record that
    is COMPLETED or FAILED counts, by the database's clock; then the key is new, even if that record is still there
    (R37). None: as long as it is. `shown`: until the claim is committed, others can see its fingerprint (H4). `token`:
    the claim may take a PENDING record that has the same one beside it, and no other payload (H46).
    """

    key: bytes
    scope: str
    fingerprint: bytes | None
    retain: float = 14 * 86_400.0
    canonical: bytes | None = None
    pending: bool = False
    expires: float | None = None
    shown: bool = False
    token: bytes | None = None


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """The next attempt of a message, `after` seconds from now, from `queue` (D18).

    `attempts` have failed so far; with `error` one more is counted in the same commit. `own_id` is the message's id at
    its own broker. `row`: id and delivery token of the row of `queue` that it came from, which this one replaces.
    `letter`: the dead letter that it was redriven from.
    """

    queue: str
    message: Message
    after: float
    attempts: int
    max_attempts: int
    error: str | None = None
    own_id: str | None = None
    row: tuple[int, int] | None = None
    letter: int | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message put aside for a person. A second arrival with the same `identity` is counted instead of added, and so
    is one with `again`, if there is a letter with that `content` (R24).

    `body` and `headers` may be the beginning only; `body_size` and `body_sha256` are of the whole. `delivered` is what
    else the broker gave (`message.delivered`). `letter`: it was redriven from this one, which is written again (O3).
    `traceback`: of the exception that `error` describes, if one does.
    `forward`: the app whose workers forward it (O19).
    """

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
    delivered: bytes = b"{}"
    body_size: int | None = None
    body_sha256: bytes | None = None
    content: bytes | None = None
    again: bytes | None = None
    letter: int | None = None
    traceback: str | None = None
    forward: str | None = None


@dataclass(frozen=True, slots=True)
class LoggedDeliveries:
    """A row of the delivery log, of one handler and kept for `keep` seconds (O22): what became of each delivery, the
    attempt that it was, and when it ended and when it had arrived here, as `time.monotonic` has it.

    One element of `sources`, `outcomes`, `attempts` or `ended` stands for all."""

    keep: float
    app: str
    handler: str
    worker: str
    keys: Sequence[bytes]
    sources: Sequence[str]
    positions: Sequence[str]
    outcomes: Sequence[str]
    attempts: Sequence[int]
    ended: Sequence[float]
    arrived: Sequence[float]


class OpenTransaction(Protocol):
    """An open transaction in which a user's function may run; only the store can seal and commit it."""

    def tx(self, habits: Habits | None = None) -> Tx:
        """A Tx for one handler. Asking for the next one ends this one.

        With `habits` statements may be sent ahead (J26). Then what the handler calls, and every method here but
        `diagnose`, may raise RunEagerly."""
        ...

    def check(self, *, look: bool = False) -> None:
        """After each handler: raise HandlerFault if it left the transaction failed or a task of its own at work in it,
        GuardViolated if it ended it, and StoreUnavailable if the connection is known to be gone. `look`: read what the
        server has sent unasked."""
        ...

    async def restore(self) -> None:
        """After `check`: undo what the handler may have done to the session beyond this transaction."""
        ...

    async def settled(self, *, late: bool) -> None:
        """The function has failed. Raises RunEagerly if a statement that was sent ahead has failed before that. `late`:
        its time is over, so what the server still has at work is cancelled, and has failed; and RunEagerly is raised
        if some of that time went by while it waited for what others had sent."""
        ...

    async def waits_for_lock(self) -> bool:
        """Whether the server says, right now, that a statement of the handler waits for a lock. Asked on another
        connection, within a second; no answer is no."""
        ...

    def diagnose(self, error: Exception) -> Exception:
        """The real cause of an error that left a handler: StoreUnavailable, Contention, or the handler's own."""
        ...


class Claims(OpenTransaction, Protocol):
    """One open transaction for one group: its effects, records and results are one commit (R4)."""

    @property
    def lasting(self) -> bool:
        """Whether a handler has changed the transaction in a way that `restore` cannot undo (G6)."""
        ...

    async def begin(self) -> object:
        """Open the transaction for what claims no key; `claim` does so by itself."""
        ...

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
        logged: LoggedDeliveries | None = None,
    ) -> int:
        """Store results, delete the attempt rows of `forget`, seal and COMMIT, as one act.

        `failed` is a message that failed behind these, and its error: one attempt of it is counted in the same commit.
        Returns how many it has now, else 0. `logged` goes into the delivery log, in this commit; if the log cannot be
        written, all else is committed without it (O22).

        Runs to its end even when the caller is cancelled, then re-raises the cancellation. Raises GuardViolated when
        the transaction is not the one that was opened, Contention, CommitUnknown when the answer of COMMIT was lost,
        or the database's own error (a deferred constraint); in all but CommitUnknown nothing was committed.
        """
        ...


class Reading(Protocol):
    """Deliveries on record as being read by us. Others know that we are alive until this is left (B17)."""

    @property
    def ours(self) -> Set[bytes]:
        """Those that we read now."""
        ...

    @property
    def begun(self) -> Set[bytes]:
        """Those that somebody began to read who is gone. The others are being read by a rival."""
        ...

    @property
    def attempts(self) -> int:
        """Of what is read alone: how often it was begun, with this time. Not what a process takes over from itself."""
        ...

    async def end(self) -> None:
        """Take ours off the record. After an error `JoinedStore.end_reading` does so."""
        ...


class JoinedStore(Protocol):
    """Claims in the transaction of their effects. Every method raises StoreUnavailable when the database is down.

    A method with a commit of its own may also raise CommitUnknown; call it again then.
    """

    @property
    def most_locks(self) -> int:
        """How many keys all lanes together may hold at once (G4)."""
        ...

    @property
    def full(self) -> bool:
        """Whether a transaction that is asked for here and now has to wait for a connection."""
        ...

    def transaction(self, *, group: int, gate: str | None = None) -> AbstractAsyncContextManager[Claims]:
        """A transaction for `group` messages. Leaving without `complete` rolls back; a broken connection is dropped.

        Those with the same `gate` take turns, across all processes: the first claim waits, before it claims, until no
        other one is open. That wait is not a collision, however short the lock time-out of a group is.
        """
        ...

    def cut_within(self, seconds: float) -> bool:
        """Whether a connection on which nothing ran has been found ended so lately, for no crash of another session."""
        ...

    async def server_started(self) -> datetime:
        """When the server was started, by its clock: another time is another server, or a restart."""
        ...

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        """What committed records say now. Claims nothing."""
        ...

    async def differs(self, claim: Claim) -> bool:
        """Whether a rival holds this key, uncommitted, and has shown another fingerprint (`Claim.shown`). False where
        that is not known."""
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

    async def forget_attempts(self, keys: Sequence[bytes]) -> None:
        """Take marks and counts back."""
        ...

    async def note_error(self, claim: Claim, error: str) -> int:
        """Store the error of an attempt that was counted beforehand; returns how many attempts there are."""
        ...

    def reading(self, claims: Sequence[Claim], reader: int) -> AbstractAsyncContextManager[Reading]:
        """Put on record that these are about to be decoded, without counting. `reader` is a number that nobody else
        has; with the same one it can be done again after an error. What is not ended stays on record."""
        ...

    def reading_alone(self, claim: Claim, reader: int) -> AbstractAsyncContextManager[Reading]:
        """As `reading`, for one whose reader is gone: it is counted."""
        ...

    async def end_reading(self, claims: Sequence[Claim], reader: int) -> None:
        """Take these off the record, as far as they are still this reader's."""
        ...

    async def take_over(self, queue: str, message: Message) -> None:
        """Put a message that its broker would soon drop into the queue in Postgres. Committed on return."""
        ...

    async def put_off(self, claim: Claim, later: NextAttempt) -> Record | int:
        """Store the message with its record, PENDING, and count the attempt, all in one commit (D18).

        Returns how many attempts have failed now; if none is left, nothing was stored. Or the record of a rival that
        was faster. Raises Contention when a rival holds the key, and Fenced when `row` is another's by now.
        """
        ...

    async def log_deliveries(self, rows: Sequence[LoggedDeliveries]) -> None:
        """Write these into the delivery log, each in a commit of its own. A log that cannot be written raises nothing;
        an outage does, and some may be written then (O23)."""
        ...

    async def close(self) -> None: ...

    async def reject(self, claim: Claim, rejection: StoredResult) -> Record | None:
        """Store FAILED and its rejection in a transaction of its own, after claiming anew.

        Returns None when stored; the record of a rival that was faster. Raises Contention when a rival
        holds the key.
        """
        ...

    async def count_dead(self, key: bytes) -> tuple[int, str] | None:
        """One more arrival of a message whose record is DEAD. Returns the id of its newest letter and its reason; None
        if it has none any more."""
        ...

    async def bury(self, letter: DeadLetter, claim: Claim | None, *, forget: Sequence[bytes] = ()) -> Record | int:
        """Write the dead letter and, where a claim is given, the record DEAD, in one transaction; its attempts, and
        those of `forget`, are deleted in it.

        Returns the id of the letter that was written (or counted once more); or the final record of a rival that was
        faster.
        """
        ...
