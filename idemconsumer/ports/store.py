"""What is claimed, put aside and logged, and the transaction in which a user's function runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from idemconsumer.message.message import Message, StoredResult
from idemconsumer.ports.arguments import Tx
from idemconsumer.rules.habits import Habits
from idemconsumer.rules.values import Found, Record, State
from idemconsumer.rules.verdicts import Verdict, judge


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

    def row(self, scope: int | None) -> tuple[object, ...]:
        """What the database is given of it, as the type `claim` in migrations/0001 has it. `scope`: the id."""
        stored = (self.key, scope, self.fingerprint, self.canonical, self.expires)
        return (*stored, self.pending, self.token, self.shown)

    def judge(self, found: Found, *, pending: bool = False) -> Verdict:
        """As `rules.verdicts.judge`, of what was found in its place."""
        return judge(found, self.fingerprint, self.canonical, pending=pending)

    def record(self, state: State, result: StoredResult | None = None) -> Record:
        """What others find once this is committed."""
        return Record(state, self.fingerprint, result, self.canonical)


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
class NewDeadLetter:
    """A message put aside for a person. A second arrival with the same `identity` is counted instead of added, and so
    is one with `again`, if there is a letter with that `content` (R24).

    `body` and `headers` may be the beginning only; `body_size` and `body_sha256` are of the whole. `delivered` is what
    else the broker gave (`message.delivered`). `letter`: it was redriven from this one, which is written again (O3).
    `traceback`: of the exception that `error` describes, if one does.
    `forward`: where it is sent as well, under an id that begins with the name of the `app` (O19).
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
    app: str = ""


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

    def check(self, *, look: bool = False) -> None:
        """After each handler: raise HandlerFault if it left the transaction failed or a task of its own at work in it,
        GuardViolated if it ended it, and StoreUnavailable if the connection is known to be gone. `look`: read what the
        server has sent unasked."""

    async def restore(self) -> None:
        """After `check`: undo what the handler may have done to the session beyond this transaction."""

    async def settled(self, *, late: bool) -> None:
        """The function has failed. Raises RunEagerly if a statement that was sent ahead has failed before that. `late`:
        its time is over, so what the server still has at work is cancelled, and has failed; and RunEagerly is raised
        if some of that time went by while it waited for what others had sent."""

    async def waits_for_lock(self) -> bool:
        """Whether the server says, right now, that a statement of the handler waits for a lock. Asked on another
        connection, within a second; no answer is no."""

    def diagnose(self, error: Exception) -> Exception:
        """The real cause of an error that left a handler: StoreUnavailable, Contention, or the handler's own."""
