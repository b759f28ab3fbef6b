"""What the worker needs of a broker. What only one kind of broker needs stays inside its adapter."""

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
    """A span of time in which this process owns what a session delivered (a Kafka assignment, a channel).

    `retiring`: none of its deliveries may start any more; those that run may finish and settle. `ended`: the result of
    a delivery that finishes now is not settled. `waiting` counts its deliveries in the waiting room.
    `probation` is the number of inherited deliveries, for each lane, that are suspects at first, since the broker does
    not tell which of them were running when the former owner died (K10).
    `returns_count`: the broker counts a returned message as delivered, and may drop one after too many deliveries.
    `takes_back`: a released delivery is free for other consumers at once, at no cost, while its session goes on (O14).
    """

    def __init__(self, probation: int = 0, *, returns_count: bool = False, takes_back: bool = False) -> None:
        self.retiring = False
        self.ended = False
        self.returns_count = returns_count
        self.takes_back = takes_back
        self.waiting = 0
        self._probation = probation
        self._passed = Counter[tuple[int, Hashable | None]]()  # suspects, by handler: in all, and of each order
        self._running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def on_probation(self, handler: int, lanes: int, order: Hashable | None = None) -> bool:
        """Whether a delivery is a suspect, for the handler of this number, which has `lanes` lanes. Only one lane
        at a time runs messages of one `order`, so no more of them are suspects than one lane can have had running."""
        of_order = 0 if order is None else self._passed[handler, order]
        return of_order < self._probation and self._passed[handler, None] < self._probation * lanes

    def passed(self, handler: int, order: Hashable | None = None) -> None:
        """A suspect was actually run (it was no duplicate), and did not kill this worker."""
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
        """Whether none of its deliveries is running."""
        return self._quiet.is_set()

    async def quiet(self) -> None:
        """Wait until none of its deliveries is running."""
        await self._quiet.wait()

    def end(self) -> None:
        self.retiring = self.ended = True


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """One arrival of a message. `handle` is what its broker needs to settle it, opaque to all others.

    `suspect`: it was delivered before, so it may have killed a worker. `inherited`: the last owner of its source may
    have died, and may have begun it (K10). `count` is the broker's delivery count, a hint.
    `take_over` (Q2): its broker may soon drop it after too many deliveries. The worker commits it to the handler's
    own queue in Postgres, settles it, and runs it from there. `anonymous`: it has no position at its broker that a
    redelivery would have too. `refusal`: why it cannot be read; a dead letter takes its place. `source` is the
    subscribed source, perhaps a pattern; None: the message's own.
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
        """An id that each delivery of this message has, and no other message: its position, or the id that its producer
        gave it. None if there is neither; an empty id counts as none."""
        return (self.message.message_id if self.anonymous else self.message.position) or None

    @property
    def identity(self) -> str:
        """An identity that each delivery of this message has, known before anything of it is decoded."""
        message = self.message
        body = hashlib.sha256(message.body).hexdigest()
        if not self.anonymous:
            return f"{message.position}#{body}"  # a topic that was deleted and created again has the same positions
        return f"{hashlib.sha256(sent_headers(message.headers)).hexdigest()}#{body}#{message.message_id or ''}"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish. `key` orders it (it is the Kafka record key, unless there is a `record_key`) or else
    identifies it (message id). It arrives after `delay` seconds at the earliest, if its broker supports that."""

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
    """Why a message or a reply is not confirmed. `final`: another try would not help. `gone`: it is final because the
    queue or topic no longer exists."""

    text: str
    final: bool = False
    gone: bool = False


BEHIND: Final = Unsent("another message of the same order is not confirmed yet")
"""Not sent, only because of the order: it is to be sent again together with the message that it waits for."""


@dataclass(slots=True)
class BytesInHand:
    """The bytes of all messages that the sessions of a process hold (D8), and the bound that they share."""

    bound: int = 64 * 1024 * 1024
    held: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a session may have outstanding (D8). `group` is the largest group that may ever form. `in_flight` =
    lanes x group + waiting room, and no session exceeds it; times in seconds. `share` returns for a source how many
    messages its lanes can begin soon (D12), without those in the waiting room. `memory`: the bytes that all sessions
    hold. `paused` returns whether a source is paused, so that nothing of it is to be taken (O14). Of a body above
    `max_message_bytes` no more than that is held, if the broker's client can do so (D8)."""

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
    """How many messages of a source no consumer has taken yet, and the most seconds that the oldest of them can have
    been there; None if that is unknown. `part`: it covers only what this session reads, not the whole source."""

    messages: int
    seconds: float | None = None
    part: bool = False

    def beside(self, other: Lag) -> Lag:
        """What two sessions know of one source, combined."""
        seconds = max((each for each in (self.seconds, other.seconds) if each is not None), default=None)
        together = self.messages + other.messages if self.part else max(self.messages, other.messages)
        return Lag(together, seconds, self.part)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `idemconsumer check` or `doctor`, with what to do. A `note` needs no action."""

    level: Literal["ok", "note", "warning", "error"]
    subject: str
    text: str


class Session(Protocol):
    """One connection with its epochs. It ends at the first sign that it is lost (D6), and a new one is opened."""

    @property
    def losses_count(self) -> bool:
        """Whether messages lost with the session count as delivered at its broker, which drops one after too many."""

    async def fetch(self) -> Sequence[Delivery]:
        """The next deliveries; waits a short time (about a second at most) and may be empty.

        Keeps outstanding deliveries (fetched, not yet settled, released or forgotten) within the bounds by itself: it
        pauses at the broker, and logs that once. It takes nothing of a source that is `paused`, from about a second
        later on, and stays a member of its group. Called by one task, which is never cancelled. It ends by raising
        SessionEnded, after a loss or `close()`, or ConfigurationError, after which no new session is to be opened.
        """

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Tell the broker, in batches, that these are finished. Ignores deliveries of an ended epoch. Raises nothing if
        the session is lost."""

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Give back deliveries that never started, if the broker can take them back at no cost."""

    async def idle(self) -> bool:
        """Whether the broker has nothing more for this session (for --until-empty). Messages it holds do not count."""

    async def stop_fetching(self) -> Sequence[Delivery]:
        """First half of a drain: no new deliveries from now on; memberships, acks and visibility are kept up.

        Returns the deliveries that `fetch` has not returned yet and whose return would count as a delivery (D11). Other
        messages that have arrived are given back."""

    async def close(self) -> None:
        """Second half: make settlements durable (commit offsets, flush acks), then leave. Bounded in time."""


class Broker(Protocol):
    """A broker client. Opening a session raises BrokerUnavailable; the worker retries with backoff and logs it once."""

    @property
    def hands_over(self) -> bool:
        """Whether its sessions may set `take_over` on a delivery. Then each handler needs a queue of its own."""

    def feed(self, subscription: Subscription) -> str:
        """Subscriptions with the same feed name share one session (Kafka: the consumer group)."""

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> Session: ...

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish to a topic or queue; returns when the broker has confirmed all of them."""

    async def check_destination(self, name: str) -> None:
        """Publishes nothing. Raises BrokerUnavailable if `publish` would, for a broker that is unreachable or a
        destination that does not exist."""

    async def check(self, subscription: Subscription) -> list[Finding]:
        """Check whether it is reachable, whether the source exists, and whether limits lose messages. Problems are
        returned, never raised."""

    async def close(self) -> None: ...


@runtime_checkable
class Replying(Protocol):
    """A broker whose messages can ask for a reply."""

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        """Send all at once, and wait for the broker's confirmations. For each reply: None if it is confirmed, else why
        not. Their ids differ. Raises no error of the broker's. Connects to no server but the requests' own."""


@runtime_checkable
class Relaying(Protocol):
    """A broker that messages of the outbox are relayed to."""

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        """Send in this order, and wait for the broker's confirmations. For each message: None if it is confirmed, else
        why not, with `final` if the broker refuses the message itself. Behind an unconfirmed message nothing of its
        order is sent (X5); the order is its record key, its group in a FIFO queue, or its message id. A message that is
        given up after a timeout may still arrive. Raises BrokerUnavailable and ConfigurationError, and then some
        messages may have arrived."""


@runtime_checkable
class KnowsLag(Protocol):
    """A session that knows how far it is behind."""

    async def lag(self, *, whole: bool) -> Mapping[str, Lag]:
        """The lag by source. Lags of whole sources only if `whole`, since every session would return the same. A source
        whose lag is unknown now is left out, and the session is not affected. May be cancelled."""


@runtime_checkable
class KnowsSilence(Protocol):
    """A session that continues for a while when its server does not answer."""

    @property
    def silence(self) -> float | None:
        """For how many seconds the server has been silent, if that is longer than it should be (O33)."""


@runtime_checkable
class BesideSagas(Protocol):
    """A broker in the database that also has the sagas: one query serves both (L61)."""

    def wake_sagas_by(self, wake: Callable[[], None]) -> None:
        """`wake` is called when a signal has made a saga due. To be called before a session is opened. Only a hint:
        some sessions receive no notifications."""

    @property
    def queues(self) -> Sequence[str]:
        """The names of the queues that the open sessions read, and were able to read lately."""

    def looked(self, found: Mapping[str, float]) -> None:
        """Pass on the result of a query for these queues, as in `stores.leased_saga.DueLook`."""

    def held_up(self) -> None:
        """Report that a query for these queues has not returned: the broker is to query itself (L67)."""
