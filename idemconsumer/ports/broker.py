"""What the worker needs of a broker. What only one broker must do stays inside its adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from idemconsumer.message.message import Message, Subscription


class Epoch:
    """One span in which this process owns what a session delivered (a Kafka assignment, a channel).

    `retiring`: no more of it may start; what runs may finish and settle. `ended`: what finishes now is forgotten.
    `waiting` counts those of its deliveries that sit in the waiting room.
    `probation` is the number of deliveries that each lane treats as suspects first, since after an assignment the
    broker cannot tell which message was running when the former owner died (K10).
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
        """A delivery of this epoch was actually run in `lane` (not a duplicate), and did not kill this worker."""
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
    """One arrival of a message. `handle` is how its broker settles it, opaque to all others.

    `suspect`: it was delivered before, so it may have killed a worker. `count` is the broker's delivery count, a hint.
    `take_over` (Q2): its broker may soon drop it after too many deliveries. The worker commits it to the handler's
    own queue in Postgres, settles it, and runs it from there.
    """

    message: Message
    epoch: Epoch
    handle: Any = None
    suspect: bool = False
    count: int = 1
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish. `key` orders it (Kafka record key) or else identifies it (message id)."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a session may have outstanding (D8). `group` is the largest group that may ever form. `in_flight` =
    lanes x group + waiting room; times in seconds. `share` limits what is taken out of a queue that other workers use
    too: a few groups (D12), so that they get theirs, and a crash hides few messages until their visibility ends."""

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
        """The share as it is now; without one, four groups per lane."""
        return 4 * self.lanes * self.group if self.share is None else self.share()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `idemconsumer check`."""

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str


class Session(Protocol):
    """One connection with its epochs. It ends at the first sign of loss (D6), and a new one is opened."""

    async def fetch(self) -> Sequence[Delivery]:
        """The next deliveries; waits a short time (about a second at most) and may be empty.

        Keeps outstanding deliveries (fetched, not yet settled, released or forgotten) within the bounds by itself, by
        pausing at the broker, which it logs once. Called by one task, which is never cancelled: it ends by
        SessionEnded, raised after a loss or `close()`.
        """
        ...

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the broker, in batches, that these are finished. Ignores deliveries of an ended epoch, and any loss."""
        ...

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Give back deliveries that never started, if the broker can take them back at no cost."""
        ...

    async def idle(self) -> bool:
        """Whether the broker has nothing more for this session (for --until-empty); what it holds does not count."""
        ...

    async def stop_fetching(self) -> None:
        """First half of a drain: no new deliveries from now on; memberships, acks and visibility are kept up."""
        ...

    async def close(self) -> None:
        """Second half: make settlements durable (commit offsets, flush acks), then leave. Bounded in time."""
        ...


class Broker(Protocol):
    """A broker client. Opening a session raises BrokerUnavailable; the worker retries with backoff and logs it once."""

    @property
    def hands_over(self) -> bool:
        """Whether its sessions may set `take_over` on a delivery, so that each handler needs a queue of its own."""
        ...

    def feed(self, subscription: Subscription) -> str:
        """Subscriptions with the same feed name share one session (Kafka: the consumer group)."""
        ...

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> Session: ...

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish to a topic or queue; returns when the broker has confirmed all of them."""
        ...

    async def check(self, subscription: Subscription) -> list[Finding]:
        """Findings: is it reachable, does the source exist, do limits lose messages. Never raises for what it finds."""
        ...

    async def close(self) -> None: ...
