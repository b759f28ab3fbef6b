"""What the worker needs of a broker. Whatever one broker alone must do, it does inside its adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from idemconsumer.message.message import Message, Subscription


class Epoch:
    """One span in which this process owns what a session delivered (a Kafka assignment, a channel).

    `retiring`: nothing new of it may start, what runs may finish and settle. `ended`: what finishes now is forgotten.
    `waiting` counts those of its deliveries that sit in the waiting room.
    `probation` is how many deliveries each lane treats as suspects first, since after an assignment the broker cannot
    tell which message was running when the former owner died (K10).
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
    """A message to publish. `key` orders (Kafka record key) or identifies (message id) it, as the broker can."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a session may have outstanding (D8). `group` is the most messages that a group may ever hold. `in_flight` =
    lanes x group + waiting room; times in seconds. `share` tells how much to take out of a queue that others work on
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
        """The share as it is now; without one, four groups a lane."""
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

    @property
    def hands_over(self) -> bool:
        """Whether any delivery of its sessions may have `take_over` set, so that handlers need a queue of their own."""
        ...

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
