"""The session of all Postgres queues of one process: takes, holds, settles and releases their messages.

A delivery is a row that is invisible until a deadline; the session moves the deadline on while it holds the delivery.
Each delivery has its own token, so that settling an expired one changes nothing. All queues of a process share one
session. It takes from the queues that were announced. NOTIFY only wakes it early: about once a second the session, or
the query for due sagas of its process, checks all queues in one statement (P5, L61). A message that is not due yet
waits in a separate table; the session that takes from the queue moves it over once it is due (P7).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import psycopg

from idemconsumer.brokers.outstanding import Outstanding
from idemconsumer.brokers.queue_front import Line, LowWater, Row, RowsInHand, handles
from idemconsumer.brokers.waking import FEW_LANES, Waking
from idemconsumer.errors import SessionEnded, StoreUnavailable
from idemconsumer.message.headers import decode_headers
from idemconsumer.message.message import Message, Subscription, Whole
from idemconsumer.ports.broker import Bounds, Delivery, Epoch
from idemconsumer.redaction import error_text
from idemconsumer.rules import fetching
from idemconsumer.sql.answering import AnsweringConnection
from idemconsumer.sql.queries import load, misconfigured
from idemconsumer.user_code.cancellation import end

VISIBILITY: Final = 10.0  # seconds until the messages of a dead worker are delivered again
TIMEOUT: Final = 10.0  # seconds, for any single statement of the session
SAGA: Final = "saga:"  # payload of the notification that a waiting saga has become due (L42)
# Prefix of a destination in a notification (X8: the relay is woken by it). Alone, in the list of queues to check, it
# stands for the outbox.
OUTBOX: Final = "outbox:"
# Payload of the notification that somebody has decided about handlers or workers (O13). In the result of a check, the
# id of the last decision.
CONTROL: Final = "control:"
_LOOK: Final = 1.25  # seconds between two checks of the queues
_SOON: Final = 0.2
_AHEAD: Final = 5.0  # seconds; a message that is due later is seen by a later check
_LARGEST: Final = 1 << 30  # bytes, the largest value in Postgres
_TOKENS: Final = 1 << 42  # tokens of one taker: enough for fourteen years at 10,000 messages a second
_FRONT: Final = 10_000  # messages at the front of a queue; all that are in flight are among them
_DUE_AT_ONCE: Final = 200  # messages that one statement moves from the delayed table to the queue
_LONG: Final = 18  # deadlines in a row, one minute in all, after which a message leaves its place (P9)

Connection: TypeAlias = AnsweringConnection[Any]
Rows: TypeAlias = list[tuple[Any, ...]]


@dataclass(slots=True)
class _Queue:
    """One queue of the session: its messages in flight, and its epoch."""

    outstanding: Outstanding
    epoch: Epoch = field(default_factory=lambda: Epoch(takes_back=True))

    def room(self, *, at_once: bool) -> int:
        """How many messages may be taken. `at_once`: only as many as its lanes can start at once."""
        waiting = self.epoch.waiting
        room = self.outstanding.may_take(waiting)
        return fetching.at_once(room, len(self.outstanding) - waiting) if at_once else room


class PostgresSession:
    """The session of all queues of a process.

    It has up to two connections: one for statements, and one that listens where that is possible. `ready` are the
    queues that may have a message to take: announced, seen by a check, or left over by the last take.
    """

    losses_count = False

    def __init__(
        self,
        subscriptions: Sequence[Subscription],
        connection: Connection,
        schema: str,
        bounds: Bounds,
        tell: Mapping[str, Callable[[str], None]],
        closed: Callable[[PostgresSession], None],
    ) -> None:
        """`tell`: the function to call for each kind of notification that names no queue, with the destination if there
        is one. See `PostgresBroker` and `ports.BesideSagas`."""
        names = [each.name for each in subscriptions]
        self._apps = {f"{each.group}/{each.handler}" for each in subscriptions}
        self._connection = connection
        self._tell = tell
        self._closed = closed
        self._waking: Waking | None = None
        self._decision: float | None = None
        self._pooled = False
        self._schema = schema
        self._statements = load(schema)
        self._most_of_body = min(bounds.max_message_bytes, _LARGEST)
        self._queues = {name: _Queue(Outstanding(bounds, f"postgres:{name}")) for name in names}
        self._in_hand = RowsInHand()
        self._taker = secrets.randbits(21) * _TOKENS  # the first of its tokens
        self._asked: list[str] = []  # the queues of a take that has not been answered yet
        lanes = [fetching.at_once(bounds.wanted(f"postgres:{name}", 0), 0) for name in names]
        self._listens = min([bounds.lanes, *lanes]) < FEW_LANES  # whether other sessions listen or not
        self._ready = set(names)
        self._falling: dict[str, float] = {}  # when the next delayed message of a queue falls due
        self._fallen = set(names)  # queues whose delayed table may have a message that is due
        self._woken = asyncio.Event()
        self.readable = False  # it has checked its queues itself, and no later check by others was held up (L67)
        self._stopped = False
        self._taking = asyncio.Lock()
        self._low_water = LowWater(self._raise_low_water)
        self._transaction = asyncio.Lock()
        self._next_look = 0.0
        self._lost: str | None = None
        self._visible: asyncio.Task[None] | None = None

    @property
    def queues(self) -> Sequence[str]:
        """The names of its queues, as a check passes them."""
        return [*self._queues, CONTROL, OUTBOX] if OUTBOX in self._tell else [*self._queues, CONTROL]

    async def start(self, listener: Callable[[], Awaitable[Connection]] | None, *, pooled: bool) -> None:
        self._pooled = pooled
        if pooled:
            self._listens = True  # behind a pooler it cannot hold the advisory lock that chooses the listener
        else:
            self._connection.prepare_threshold = 5
        self._visible = asyncio.create_task(self._keep_visible())
        if listener is not None:
            self._waking = Waking(self._leads, listener, self._heard, self._missed)
            await self._waking.start()

    async def _leads(self) -> tuple[bool, int]:
        if self._listens:
            return True, 0
        ((leads, others),) = await self._do("lead", {"queues": "\n".join(sorted([*self._apps, *self.queues]))})
        return leads, others

    async def fetch(self) -> Sequence[Delivery]:
        self._raise_if_over()
        self._woken.clear()
        if not self._stopped:
            await self._low_water.rise()
            await self._look()
            async with self._taking:
                if rows := await self._take():
                    return list(map(self._delivery, sorted(rows)))
        await self._pause()
        self._raise_if_over()
        return []

    async def _look(self) -> None:
        """Check all queues, unless they were checked a moment ago."""
        clock = asyncio.get_running_loop().time
        if clock() >= self._next_look:
            found = await self._do("look_for_messages", {"queues": self.queues, "ahead": _AHEAD})
            self.readable = True
            self._seen(dict(found), next_look=_LOOK)
        due = {name for name, at in self._falling.items() if at <= clock()}
        self._ready |= due
        self._fallen |= due
        for name in due:
            del self._falling[name]

    async def _take(self) -> Rows:
        sparing = self._waking is not None and self._waking.sparing
        rooms = {name: self._queues[name].room(at_once=sparing) for name in self._ready}
        rooms = {name: room for name, room in rooms.items() if room > 0}
        if not rooms:
            return []
        if self._fallen:
            await self._move_due()
        self._ready -= rooms.keys()  # before the statement, which may not see a message that is announced from now on
        room = max(1, min(self._queues[name].outstanding.bytes_left for name in rooms))
        limits = {"names": list(rooms), "limits": list(rooms.values()), "bytes": room, "most": self._most_of_body}
        self._asked = list(rooms)
        rows = await self._do("take", {**limits, "visibility": VISIBILITY, "taker": self._taker})
        self._asked = []
        if rows:
            self._ready |= self._left_by(rows, rooms, room)
        if rows and self._stopped:  # a drain began during the take
            await self._do("give_back", handles((row[2], row[4]) for row in rows))
            return []
        return rows

    def _left_by(self, rows: Rows, rooms: Mapping[str, int], room: int) -> set[str]:
        """The queues that may have more messages. A session that listens is notified of new ones, so a queue that did
        not fill its limit is empty."""
        told = self._waking is not None and self._waking.told
        if not told or sum(len(row[7]) + len(row[8]) for row in rows) >= room:
            return set(rooms)
        taken = Counter(row[3] for row in rows)
        return {name for name, most in rooms.items() if taken[name] >= most}

    async def _move_due(self) -> None:
        moved = await self._do("fall_due", {"names": list(self._fallen), "limit": _DUE_AT_ONCE})
        if len(moved) < _DUE_AT_ONCE:
            self._fallen.clear()
        for (name,) in moved:
            self._low_water.gone(("delayed", name), 1)
        if moved:  # it is not known when the next one falls due
            self._next_look = min(self._next_look, asyncio.get_running_loop().time() + _SOON)

    async def _pause(self) -> None:
        """Wait until something may have changed, or until the next check."""
        clock = asyncio.get_running_loop().time
        until = clock() + _LOOK if self._stopped else min([self._next_look, *self._falling.values()])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._woken.wait()

    def looked(self, found: Mapping[str, float]) -> None:
        """Another check of this process has returned the result of `look_for_messages`; it will run again."""
        self._seen(found, next_look=2 * _LOOK)

    def held_up(self) -> None:
        """Another check of this process has timed out, perhaps on a lock on the queue's tables."""
        self.readable = False
        self._next_look = 0.0
        self._woken.set()

    def _seen(self, found: Mapping[str, float], *, next_look: float) -> None:
        now = asyncio.get_running_loop().time()
        self._next_look = now + next_look
        falling: Mapping[str, float] = {name: seconds for name, seconds in found.items() if name in self._queues}
        if self._waking is not None:
            falling = self._waking.saw(falling)
        self._falling = {name: now + seconds for name, seconds in falling.items()}
        if OUTBOX in found:
            self._told(OUTBOX)
        decision, self._decision = self._decision, found.get(CONTROL, 0.0)
        if decision is not None and decision != self._decision:
            self._told(CONTROL)
        if any(at <= now for at in self._falling.values()):
            self._woken.set()

    def _heard(self, what: str) -> None:
        if what in self._queues:
            self._ready.add(what)
            self._woken.set()
        elif what.startswith(OUTBOX):
            self._told(OUTBOX, what.removeprefix(OUTBOX))
        else:
            self._told(what)

    def _told(self, what: str, destination: str = "") -> None:
        if what in self._tell:
            self._tell[what](destination)

    def _missed(self) -> None:
        """Notifications may have been lost: check everything."""
        self._ready.update(self._queues)
        self._next_look = 0.0
        self._woken.set()
        for tell in self._tell.values():
            tell("")

    async def _raise_low_water(self, line: Line) -> int:
        ((behind,),) = await self._do("raise_low_water", {"line": line[0], "name": line[1]})
        return int(behind)

    def _delivery(self, row: tuple[Any, ...]) -> Delivery:
        _, behind, number, name, token, deliveries, message_id, body, headers, size, sha256 = row
        self._in_hand.took((number, token), name)
        queue = self._queues[name]
        self._low_water.gone(("queue", name), 1, behind)
        message = Message(
            source=f"postgres:{name}",
            body=body,
            headers=decode_headers(headers),
            message_id=message_id,
            position=f"{name}#{number}",
            whole=None if sha256 is None else Whole(size, sha256),
        )
        queue.outstanding.arrived(number, message)
        return Delivery(message, queue.epoch, handle=(number, token), suspect=deliveries > 1, count=deliveries)

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        await self._dismiss("finish", deliveries)

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        await self._dismiss("give_back", deliveries)

    async def _dismiss(self, query: str, deliveries: Sequence[Delivery]) -> None:
        if rows := [delivery.handle for delivery in deliveries if not delivery.epoch.ended]:
            with contextlib.suppress(SessionEnded):
                await self._end_rows(query, rows)

    async def _end_rows(self, query: str, rows: Sequence[Row]) -> None:
        for number, name in self._in_hand.ends(query, rows):
            self._queues[name].outstanding.left((number,))
        self._woken.set()
        await self._do(query, handles(rows))
        self._in_hand.said(query, rows)

    @property
    def owed(self) -> list[tuple[str, dict[str, Any]]]:
        """Once it has ended: the queries, with parameters, that it could not run for the messages it had taken."""
        seen = self._in_hand.owed(lambda queue: self._queues[queue].epoch.at_rest)
        unseen = {"names": self._asked, "taker": self._taker, "tokens": _TOKENS - 1, "front": _FRONT}
        owed = [(query, handles(rows)) for query, rows in seen.items()]
        return [*owed, ("give_back_unseen", unseen)] if self._asked else owed

    async def pay(self, owed: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Run the queries that a lost session owed, so that others can take its messages at once (P8). Raises
        SessionEnded."""
        for query, params in owed:
            await self._do(query, params)

    async def idle(self) -> bool:
        """Whether no message waits beyond those in flight here. Messages that are not due yet do not count."""
        rows = await self._do("waiting", {"names": list(self._queues)})
        return bool(rows[0][0] <= len(self._in_hand))

    async def stop_fetching(self) -> Sequence[Delivery]:
        self._stopped = True
        self._woken.set()
        return ()

    async def close(self) -> None:
        self._stopped = True
        # The messages of a take under way would otherwise stay invisible until their deadline.
        with contextlib.suppress(TimeoutError, SessionEnded):
            async with asyncio.timeout(2), self._taking:
                if self._in_hand and self._lost is None:
                    await self._end_rows("let_go", self._in_hand.rows)
        self._end("closed")
        self._closed(self)
        if self._visible is not None:
            await end(self._visible)
        if self._waking is not None:
            await self._waking.close()
        with contextlib.suppress(psycopg.Error, TimeoutError):
            async with asyncio.timeout(2):
                await self._connection.close()

    # --------------------------------------------------------------------------------------------------- the connection
    async def _do(self, query: str, params: dict[str, Any]) -> Rows:
        try:
            return await self._execute(query, params)
        except psycopg.Error as error:
            self._end(error_text(misconfigured(error, self._schema) or error))
            raise SessionEnded(f"{sources(self._queues)}: {self._lost}") from error

    async def ask(self, query: str, params: Mapping[str, Any]) -> Rows:
        """See `PostgresBroker`. If the statement waits for a lock, the other statements of the session wait a few
        seconds."""
        try:
            return await self._execute(query, params)
        except psycopg.Error as error:
            raise StoreUnavailable(error_text(misconfigured(error, self._schema) or error)) from error

    async def _execute(self, query: str, params: Mapping[str, Any]) -> Rows:
        binary = query == "take"  # as text the bodies would take twice the memory
        async with self._writing():
            cursor = await self._connection.execute(self._statements[query], params, binary=binary)
            return await cursor.fetchall() if cursor.description else []

    @contextlib.asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        """Behind a pooler the session is read-only by default; a transaction declares that it writes (R18)."""
        if not self._pooled:
            yield
            return
        async with self._transaction, self._connection.transaction():
            yield

    def _end(self, why: str) -> None:
        self._lost = self._lost or why
        for queue in self._queues.values():
            queue.epoch.end()
            queue.outstanding.clear()
        self._woken.set()

    def _raise_if_over(self) -> None:
        if self._lost is not None:
            raise SessionEnded(f"{sources(self._queues)}: {self._lost}")

    async def _keep_visible(self) -> None:
        """Extend the deadline of all outstanding messages, three times per visibility timeout (P3)."""
        times: dict[int, int] = {}
        with contextlib.suppress(SessionEnded):
            await asyncio.sleep(VISIBILITY / 3)
            while True:
                times = {number: times.get(number, 0) + 1 for number, _ in self._in_hand.rows}
                if times:
                    long = [number for number, moved in times.items() if moved % _LONG == 0]
                    await self._do("extend", handles(self._in_hand.rows) | {"visibility": VISIBILITY, "long": long})
                await asyncio.sleep(VISIBILITY / 3)


def sources(names: Iterable[str]) -> str:
    return ", ".join(f"postgres:{name}" for name in names)
