"""What the worker needs of a broker. What only one broker must do stays inside its adapter."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from idemconsumer.errors import BadMessage
from idemconsumer.message.headers import sent_headers
from idemconsumer.message.message import Message, Subscription
from idemconsumer.message.reply_address import Address


class Epoch:
    """One span in which this process owns what a session delivered (a Kafka assignment, a channel).

    `retiring`: no more of it may start; what runs may finish and settle. `ended`: what finishes now is forgotten.
    `waiting` counts those of its deliveries that sit in the waiting room.
    `probation` is the number of inherited deliveries, for each lane, that are suspects first, since the broker cannot
    tell which of them was running when the former owner died (K10).
    `returns_count`: the broker counts what is given back as delivered, and may drop what was delivered too often.
    `takes_back`: what is released is free for others at once, at no cost, also while its session goes on (O14).
    """

    def __init__(self, probation: int = 0, *, returns_count: bool = False, takes_back: bool = False) -> None:
        self.retiring = False
        self.ended = False
        self.returns_count = returns_count
        self.takes_back = takes_back
        self.waiting = 0
        self._probation = probation
        self._passed = Counter[tuple[int, Hashable | None]]()  # suspects, by handler, all and of each order
        self._running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def on_probation(self, handler: int, lanes: int, order: Hashable | None = None) -> bool:
        """Whether a delivery is a suspect, to the handler of this number, which has so many `lanes`. Of one `order` no
        more than one lane's part was running."""
        of_order = 0 if order is None else self._passed[handler, order]
        return of_order < self._probation and self._passed[handler, None] < self._probation * lanes

    def passed(self, handler: int, order: Hashable | None = None) -> None:
        """One that was a suspect was actually run (not a duplicate), and did not kill this worker."""
        self._passed.update({(handler, None), (handler, order)})

    def start(self, count: int) -> None:
        self._running += count
        self._quiet.clear()

    def finish(self, count: int) -> None:
        self._running -= count
        if self._running == 0:
            self._quiet.set()

    @property
    def at_rest(self) -> bool:
        """Whether nothing of it runs."""
        return self._quiet.is_set()

    async def quiet(self) -> None:
        """Wait until nothing of this epoch runs any more."""
        await self._quiet.wait()

    def end(self) -> None:
        self.retiring = self.ended = True


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """One arrival of a message. `handle` is how its broker settles it, opaque to all others.

    `suspect`: it was delivered before, so it may have killed a worker. `inherited`: its source's last owner may have
    died, and may have begun it (K10). `count` is the broker's delivery count, a hint.
    `take_over` (Q2): its broker may soon drop it after too many deliveries. The worker commits it to the handler's
    own queue in Postgres, settles it, and runs it from there. `anonymous`: it has no position at its broker that a
    redelivery would have too. `refusal`: it cannot be read, and a person wants a dead letter in its place. `source`
    is what was subscribed to, perhaps a pattern; None: the message's own.
    """

    message: Message
    epoch: Epoch
    handle: Any = None
    suspect: bool = False
    inherited: bool = False
    count: int = 1
    take_over: bool = False
    anonymous: bool = False
    refusal: BadMessage | None = None
    source: str | None = None

    @property
    def own_id(self) -> str | None:
        """The same for each delivery of this message, and of no other: its position, or the producer's id of it. None
        where there is neither; an empty id is none."""
        return (self.message.message_id if self.anonymous else self.message.position) or None

    @property
    def identity(self) -> str:
        """The same for each delivery of this message, and known before anything of it is decoded."""
        message = self.message
        body = hashlib.sha256(message.body).hexdigest()
        if not self.anonymous:
            return f"{message.position}#{body}"  # a topic that was made anew has the same positions
        return f"{hashlib.sha256(sent_headers(message.headers)).hexdigest()}#{body}#{message.message_id or ''}"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish. `key` orders it (Kafka record key, unless it has a `record_key`) or else identifies it
    (message id). It arrives after `delay` seconds at the earliest, where its broker can do that."""

    body: bytes
    headers: Mapping[str, str | bytes] = field(default_factory=dict)
    key: str | None = None
    delay: float = 0.0
    record_key: bytes | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one request. `id` becomes its message id; `outcome` is a header of it."""

    address: Address
    id: str
    body: bytes
    content_type: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Unsent:
    """Why a reply is not confirmed. `final`: no further try would help, and `gone`: since there is no such queue or
    topic any more."""

    text: str
    final: bool = False
    gone: bool = False


BEHIND: Final = Unsent("another message of the same order is not confirmed yet")
"""Not sent, and for no fault of its own: it is to be sent again with the one that it waits for."""


@dataclass(slots=True)
class BytesInHand:
    """The bytes of all messages that the sessions of a process hold (D8), and the bound that they share."""

    bound: int = 64 * 1024 * 1024
    held: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a session may have outstanding (D8). `group` is the largest group that may ever form. `in_flight` =
    lanes x group + waiting room, and no session exceeds it; times in seconds. `share` says for a source how many
    messages its lanes can begin soon (D12), without those in the waiting room; `memory` is what all sessions hold.
    `paused` says whether nothing of a source is to be taken now (O14). Of a body above `max_message_bytes` no more is
    held, where the broker's client allows it (D8)."""

    lanes: int
    group: int
    room: int = 1_000
    max_uncommitted: int = 10_000
    drain: float = 20.0
    max_message_bytes: int = 4 * 1024 * 1024
    share: Callable[[str], int] | None = None
    memory: BytesInHand = field(default_factory=BytesInHand)
    paused: Callable[[str], bool] = lambda _: False

    @property
    def in_flight(self) -> int:
        return self.lanes * self.group + self.room

    def wanted(self, source: str, waiting: int) -> int:
        """How many messages of a source may be outstanding now, `waiting` of them in the waiting room."""
        return self.in_flight if self.share is None else min(self.in_flight, self.share(source) + waiting)


@dataclass(frozen=True, slots=True)
class Lag:
    """How many messages of a source nobody has taken yet, and for how many seconds the oldest of them has been there at
    most; None where that is not known. `part`: of what this session reads, else of the whole source."""

    messages: int
    seconds: float | None = None
    part: bool = False

    def beside(self, other: Lag) -> Lag:
        """What two sessions know together of one source."""
        seconds = max((each for each in (self.seconds, other.seconds) if each is not None), default=None)
        together = self.messages + other.messages if self.part else max(self.messages, other.messages)
        return Lag(together, seconds, self.part)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `idemconsumer check`, or of `doctor`, with what to do. A `note` is nothing that has to be mended."""

    level: Literal["ok", "note", "warning", "error"]
    subject: str
    text: str


class Session(Protocol):
    """One connection with its epochs. It ends at the first sign of loss (D6), and a new one is opened."""

    @property
    def losses_count(self) -> bool:
        """Whether its broker counts what is lost with it as delivered, and drops what was delivered too often."""

    async def fetch(self) -> Sequence[Delivery]:
        """The next deliveries; waits a short time (about a second at most) and may be empty.

        Keeps outstanding deliveries (fetched, not yet settled, released or forgotten) within the bounds by itself, by
        pausing at the broker, which it logs once; takes nothing of a source that is `paused`, from a second or so later
        on, and stays a member of its group. Called by one task, which is never cancelled: it ends by
        SessionEnded, raised after a loss or `close()`; or by ConfigurationError, when no further one is to be opened.
        """

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the broker, in batches, that these are finished. Ignores deliveries of an ended epoch, and any loss."""

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Give back deliveries that never started, if the broker can take them back at no cost."""

    async def idle(self) -> bool:
        """Whether the broker has nothing more for this session (for --until-empty); what it holds does not count."""

    async def stop_fetching(self) -> Sequence[Delivery]:
        """First half of a drain: no new deliveries from now on; memberships, acks and visibility are kept up.

        Returns those that `fetch` has not brought, and whose return would count as a delivery (D11). What else has
        arrived is given back."""

    async def close(self) -> None:
        """Second half: make settlements durable (commit offsets, flush acks), then leave. Bounded in time."""


class Broker(Protocol):
    """A broker client. Opening a session raises BrokerUnavailable; the worker retries with backoff and logs it once."""

    @property
    def hands_over(self) -> bool:
        """Whether its sessions may set `take_over` on a delivery, so that each handler needs a queue of its own."""

    def feed(self, subscription: Subscription) -> str:
        """Subscriptions with the same feed name share one session (Kafka: the consumer group)."""

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> Session: ...

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish to a topic or queue; returns when the broker has confirmed all of them."""

    async def check_destination(self, name: str) -> None:
        """Publishes nothing. Raises BrokerUnavailable where `publish` would: unreachable, or missing."""

    async def check(self, subscription: Subscription) -> list[Finding]:
        """Findings: is it reachable, does the source exist, do limits lose messages. Never raises for what it finds."""

    async def close(self) -> None: ...


@runtime_checkable
class Replying(Protocol):
    """A broker whose messages can ask for an answer."""

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        """Send all at once, and wait until the broker has confirmed each: None; else what is known. Their ids differ.
        Raises nothing of the broker's. It connects nowhere but where the requests came from."""


@runtime_checkable
class Relaying(Protocol):
    """A broker that messages of the outbox are relayed to."""

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        """Send in this order, and wait until the broker has confirmed each: None; else what is known, `final` for what
        it refuses for that message's own sake. Behind one that is not confirmed nothing of its order is sent (X5): of
        its record key, of its group in a FIFO queue, of its message id. What is given up after a time may still get
        there. Raises BrokerUnavailable and ConfigurationError, and then some may be there."""


@runtime_checkable
class KnowsLag(Protocol):
    """A session that can say how far it is behind."""

    async def lag(self, *, whole: bool) -> Mapping[str, Lag]:
        """By source; of whole sources only if asked to, since every session would say the same. What cannot be told now
        is left out, and the session goes on as if nobody had asked. May be cancelled."""


@runtime_checkable
class KnowsSilence(Protocol):
    """A session that goes on for a while when its server says nothing."""

    @property
    def silence(self) -> float | None:
        """For how many seconds the server has been silent, if that is longer than it should be (O33)."""


@runtime_checkable
class BesideSagas(Protocol):
    """A broker in the database that has the sagas, too: one look is for both (L61)."""

    def wake_sagas_by(self, wake: Callable[[], None]) -> None:
        """`wake` is called when a signal has made a saga due. To be called before a session is opened. Nothing may
        depend on it: some sessions hear nothing."""

    @property
    def queues(self) -> Sequence[str]:
        """The names of those that the open sessions read, and have been able to read of late."""

    def looked(self, found: Mapping[str, float]) -> None:
        """Tell it what a look at these queues has found, as in `stores.leased_saga.DueLook`."""

    def held_up(self) -> None:
        """Tell it that a look at these queues has not come back: it is to look itself (L67)."""
