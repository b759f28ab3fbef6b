"""The seams: what the engine needs of a store, what the worker needs of a broker, who may watch.

The contract of each seam stands in its docstrings; `idemconsumer.testing` holds a suite that every implementation
must pass. A port is as wide as its narrowest need: whatever one broker alone must do, it does inside its adapter.
What sagas need on top stands in `ports_sagas`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, LiteralString, Protocol, TypeVar, overload

import msgspec

from idemconsumer._model import Found, Message, Point, Record, SagaPoint, StoredResult, Subscription

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
Params = Sequence[object] | Mapping[str, object]


# --------------------------------------------------------------------------------------------- what handlers are given
class Rows(Protocol[R]):
    """The rows of one statement; they are already here, so nothing is awaited from the server."""

    @property
    def rowcount(self) -> int: ...
    async def first(self) -> R | None: ...
    async def one(self) -> R:
        """The only row. Raises LookupError when there is none, or more than one."""
        ...

    async def all(self) -> list[R]: ...


class Tx(Protocol):
    """The claim's transaction, as a handler sees it: no commit and no rollback, since the engine owns both.

    What is executed here is committed together with the message's record, or not at all. It is valid until the
    handler returns. `into=` turns each row into a dataclass, msgspec Struct (by column name) or one column's type.
    """

    @overload
    async def execute(self, query: LiteralString, params: Params = ...) -> Rows[tuple[Any, ...]]: ...
    @overload
    async def execute(self, query: LiteralString, params: Params = ..., *, into: type[T]) -> Rows[T]: ...
    @property
    def connection(self) -> Any:
        """The psycopg.AsyncConnection, for COPY or SQLAlchemy. Ending its transaction undoes the whole group."""
        ...


class Batch(Protocol[T_co]):
    """The new messages of one group, for a handler that takes them all at once: `orders: Batch[OrderPlaced]`.

    They are in the order of their lane, each key once. What was handled before is not among them, and where nothing is
    new the function is not called. Its effects through Tx and the records of all items are one commit. An item of which
    nothing is said is applied, with no result; of several words about one item the last counts. A word after the
    function has returned raises HandlerFault, and one about an item that is not there IndexError.

    If an item is rejected or is to run again, all effects of this call are rolled back: the items before the first such
    one are handled once more, without it, and those behind it in a later call. So nothing stays of what was done for
    it, or was decided because of that. Not guaranteed: that the function sees an item only once, so its effects belong
    into Tx.
    """

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T_co]:
        """The payloads."""
        ...

    def __getitem__(self, i: int, /) -> T_co: ...
    def message(self, i: int, /) -> Message:
        """The message of item `i`, with its key, headers and attempt."""
        ...

    def result(self, i: int, value: object, /) -> None:
        """What is stored for item `i` and given to its duplicates; what a handler of one message would return."""
        ...

    def reject(self, i: int, /, code: str, body: object = None) -> None:
        """Refuse item `i` for good: as `raise Reject(code, body)` of a handler of one message."""
        ...

    def retry(self, i: int, /, after: str | float | timedelta | None = None) -> None:
        """Run item `i` again, after so many seconds, a duration or the backoff: as `raise Retry(after=after)`."""
        ...


# ----------------------------------------------------------------------------------------------------------- the store
class Claim(msgspec.Struct, frozen=True):
    """A key about to be claimed: SHA-256 of app, tenant, handler and key; its scope's name; the payload's fingerprint.

    `retain` is how long its record will be kept, seconds; the scope remembers it.
    """

    key: bytes
    scope: str
    fingerprint: bytes | None
    retain: float = 14 * 86_400.0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message put aside for a person. `identity` is what makes a second arrival count instead of being added."""

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


class Claims(Protocol):
    """One open transaction for one group."""

    def tx(self) -> Tx:
        """A Tx for one handler. Asking for the next one ends the former."""
        ...

    async def claim(self, claims: Sequence[Claim]) -> list[Found]:
        """Claim all keys with one atomic insert, in order. Keys within one call must differ.

        Never waits for a rival: a key whose claim is not committed is `Mark.BUSY`; `Mark.CLAIMED` is ours to run.
        """
        ...

    def check(self) -> None:
        """After each handler: raise HandlerFault if it left the transaction failed, GuardViolated if it ended it, and
        StoreUnavailable if the connection is gone."""
        ...

    def diagnose(self, error: Exception) -> Exception:
        """What an error that left a handler really is: StoreUnavailable, Contention, or the handler's own."""
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
    """Claims in the transaction of their effects. Every method raises StoreUnavailable when the database is away.

    A method with a commit of its own may also raise CommitUnknown; calling it again is then right.
    """

    @property
    def most_locks(self) -> int:
        """How many keys all lanes together may hold at once (G4)."""
        ...

    def transaction(self, *, group: int, gate: str | None = None) -> AbstractAsyncContextManager[Claims]:
        """A transaction for `group` messages. Leaving without `complete` rolls back; a broken connection is dropped.

        Those with one `gate` take turns, in all processes: the first claim waits, before it claims, until no other one
        is open. That wait is no collision, however short the lock time-out of a group is.
        """
        ...

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        """What committed records say now. Claims nothing."""
        ...

    async def mark_attempts(self, claims: Sequence[Claim]) -> set[bytes]:
        """Put on record that these are about to run, in one commit and without counting an attempt.

        Returns the keys that were not on record before, be it marked or counted.
        """
        ...

    async def unmark_attempts(self, keys: Sequence[bytes]) -> None:
        """Take marks back. What was counted since stays."""
        ...

    async def count_attempt(self, claim: Claim, error: str | None) -> int:
        """Add one attempt, in a commit of its own; returns how many there are now."""
        ...

    async def uncount_attempt(self, claim: Claim) -> None:
        """Take back one attempt that was counted before a run which then was cancelled."""
        ...

    async def note_error(self, claim: Claim, error: str) -> int:
        """Say what the attempt counted beforehand ended with; returns how many attempts there are."""
        ...

    async def park(self, queue: str, message: Message) -> None:
        """Take over a message that its broker would soon drop, into the Postgres queue, committed on return."""
        ...

    async def close(self) -> None: ...

    async def reject(self, claim: Claim, rejection: StoredResult) -> Record | None:
        """Store FAILED and its rejection in a transaction of its own, after claiming anew.

        Returns None when stored; the record that is there when somebody was faster. Raises Contention when a rival
        holds the key.
        """
        ...

    async def count_dead(self, key: bytes) -> None:
        """One more arrival of a message whose record is DEAD."""
        ...

    async def bury(self, letter: DeadLetter, claim: Claim | None) -> Record | None:
        """Write the dead letter and, where a claim is given, the record DEAD, in one transaction.

        Returns None when written (or counted once more); the final record that is there when somebody was faster.
        """
        ...


# ---------------------------------------------------------------------------------------------------------- the broker
class Epoch:
    """One span in which this process owns what a session delivered (a Kafka assignment, a channel).

    `retiring`: nothing new of it may start, what runs may finish and settle. `ended`: what finishes now is forgotten.
    `waiting` counts those of its deliveries that sit in the waiting room.
    `probation` is how many deliveries each lane treats as suspects first, since after an assignment the broker cannot
    tell which message was running when the former owner died.
    """

    __slots__ = ("_budget", "_probation", "_quiet", "_running", "ended", "retiring", "waiting")

    def __init__(self, probation: int = 0) -> None:
        self.retiring = False
        self.ended = False
        self.waiting = 0
        self._probation = probation
        self._budget: dict[int, int] = {}
        self._running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def on_probation(self, lane: int) -> bool:
        return self._probation > 0 and self._budget.get(lane, self._probation) > 0

    def passed(self, lane: int) -> None:
        """A delivery of this epoch was really run in `lane` (not a duplicate), and did not kill us."""
        self._budget[lane] = self._budget.get(lane, self._probation) - 1

    def start(self, count: int) -> None:
        self._running += count
        self._quiet.clear()

    def finish(self, count: int) -> None:
        self._running -= count
        if self._running == 0:
            self._quiet.set()

    async def quiet(self) -> None:
        """Wait until nothing of this epoch runs any more."""
        await self._quiet.wait()

    def end(self) -> None:
        self.retiring = self.ended = True


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """One arrival of a message. `handle` is how its broker settles it, opaque to everybody else.

    `suspect`: it was delivered before, so it may have killed a worker. `count` is the broker's delivery count, a hint.
    """

    message: Message
    epoch: Epoch
    handle: Any = None
    suspect: bool = False
    count: int = 1


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish. `key` orders (Kafka record key) or identifies (message id) it, as the broker can."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much one session may have outstanding. `group` is the most messages that a group may ever hold. `in_flight` =
    lanes x group + waiting room; times in seconds. `share` tells how much to take out of a queue that others work on
    too: a few groups, so that they get theirs, and a crash hides few messages until their visibility time is over."""

    lanes: int
    group: int
    room: int = 1_000
    max_uncommitted: int = 10_000
    drain: float = 20.0
    share: Callable[[], int] | None = None

    @property
    def in_flight(self) -> int:
        return self.lanes * self.group + self.room

    @property
    def ahead(self) -> int:
        """The share as it is now; without one, four groups a lane."""
        return 4 * self.lanes * self.group if self.share is None else self.share()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `idemconsumer check`."""

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str


class Session(Protocol):
    """One connection with its epochs. It ends at the first sign of loss, and a new one is opened."""

    async def fetch(self) -> Sequence[Delivery]:
        """The next deliveries; waits a short time (about a second at most) and may be empty.

        Keeps outstanding deliveries (fetched, not yet settled, released or forgotten) within the bounds by itself, by
        pausing at the broker, said once. Called by one task, which is never cancelled: it ends by SessionEnded, raised
        after loss or `close()`.
        """
        ...

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the broker that these are finished, batched. Forgets those whose epoch has ended, and every loss."""
        ...

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Give back deliveries that never started, if the broker can take them back at no cost."""
        ...

    async def idle(self) -> bool:
        """Whether the broker has nothing more for this session (for --until-empty); what it holds does not count."""
        ...

    async def stop_fetching(self) -> None:
        """First half of a drain: no new deliveries from now on; memberships, acks and visibility go on."""
        ...

    async def close(self) -> None:
        """Second half: make settlements durable (commit offsets, flush acks), then leave. Bounded in time."""
        ...


class Broker(Protocol):
    """A broker client. Opening a session raises BrokerUnavailable; the worker retries with backoff and says it once."""

    def feed(self, subscription: Subscription) -> str:
        """Subscriptions with the same feed name share one session (Kafka: the consumer group)."""
        ...

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> Session: ...

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish to a topic or queue; returns when the broker has confirmed all of them."""
        ...

    async def check(self, subscription: Subscription) -> list[Finding]:
        """Reachable, destination exists, limits that would lose messages. Never raises for what it finds."""
        ...

    async def close(self) -> None: ...


# --------------------------------------------------------------------------------------------------------- who watches
class Observer(Protocol):
    """Told of every named point, once a group; of FETCHED, DISPATCHED and a single message's HANDLED once a message.
    It decides nothing and must not raise."""

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None: ...


class Silent:
    """The observer that does nothing."""

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        return
