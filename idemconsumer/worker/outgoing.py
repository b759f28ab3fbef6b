"""Relays the outgoing messages of one destination from the outbox to their broker (X2 to X6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from idemconsumer.brokers.queue_front import LowWater
from idemconsumer.duty import Duty, within
from idemconsumer.errors import BrokerUnavailable, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.message.headers import decode_headers
from idemconsumer.message.reply_address import MESSAGE_ID
from idemconsumer.observe.counts import Counts
from idemconsumer.ports.broker import BEHIND, Broker, Outgoing, Relaying, Unsent
from idemconsumer.ports.observer import Point
from idemconsumer.redaction import error_text, typed_text
from idemconsumer.rules.doubt import Meaning, meaning
from idemconsumer.rules.outbox import holdable, next_look, next_try, together
from idemconsumer.sql.connecting import OwnCursor
from idemconsumer.sql.queries import Queries
from idemconsumer.stores.literals import clean
from idemconsumer.user_code.cancellation import ends_this_task
from idemconsumer.worker.forwarded_letter import ForwardedLetter
from idemconsumer.worker.relay_connections import Connection, Connections

MOST: Final = 2_000  # messages in one transaction
BYTES: Final = 8 * 1024 * 1024  # bytes of these messages, about
_LINGER: Final = 5.0  # seconds without a message after which the lane ends
_ELSEWHERE: Final = 1.0  # seconds until the next check whether another relay has left messages
_SENDING: Final = 30.0  # seconds; messages not sent by then are read again
_IDLE: Final = "120s"  # in a transaction: longer than any broker timeout; after that others may relay


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """An outgoing message as it is stored. Messages with the same `order` stay in order. `number` is that of the dead
    letter to forward; `letter` is that dead letter, as long as it is stored (O19)."""

    id: int
    message_id: str
    key: str | None
    order: str | None
    tries: int
    headers: bytes
    body: bytes
    number: int | None = None
    letter: ForwardedLetter | None = None


def outgoing(row: OutboxRow, destination: str) -> Outgoing:
    """The message as its broker gets it, the same at each try (X3).

    Its message id is the key that it was published with, else the row's id. In Kafka, where the key is the record's
    key, a header has the row's id; a header of that name came from another message, whose headers were passed on, and
    is replaced. A dead letter that was refused is sent without its message.
    """
    if row.letter is not None:
        assert row.key is not None
        return row.letter.outgoing(row.key, destination, whole=row.tries == 0)
    headers = decode_headers(row.headers)
    if destination.startswith("kafka:"):
        return Outgoing(row.body, headers | {MESSAGE_ID: row.message_id}, row.key)
    return Outgoing(row.body, headers, row.message_id if row.key is None else row.key)


class OutgoingLane:
    """Relays to one destination while it has messages."""

    def __init__(
        self,
        destination: str,
        broker: Broker,
        connections: Connections,
        queries: Queries,
        counts: Counts,
        low_water: LowWater,
        at: Callable[[Point, str, Sequence[bytes]], None],
    ) -> None:
        self._destination = destination
        self._name = destination.partition(":")[2]
        self._broker = broker
        self._connections = connections
        self._queries = queries
        self._counts = counts
        counts.relayed[destination] += 0  # so that the counter exists before the first message (O31)
        counts.parked[destination] += 0
        self._at = at
        self._woken = asyncio.Event()
        self._leaving = asyncio.Event()
        self._low_water = low_water
        self._duty = Duty(
            self._relay,
            spread=True,
            again=lambda failures: next_look(failures, 0.0),
            failed=self._say_failed,
            works=self._say_works,
            quiet=lambda error: isinstance(error, StoreUnavailable),  # said by the lanes of handlers
            proves=False,
        )

    def wake(self) -> None:
        """A message may be there."""
        self._woken.set()

    def stop(self) -> None:
        """Make `run` return once no message is left, or none can be sent."""
        self._leaving.set()
        self._woken.set()
        self._duty.stop()

    async def run(self) -> None:
        """Run until no message has come for a while, or until stopped or cancelled. An outage only delays it (X6)."""
        await self._duty.run()

    async def _relay(self) -> None:
        await self._drain()
        await self._connections.close_idle()

    async def _drain(self) -> None:
        while True:
            self._woken.clear()
            async with self._connections.one() as connection:
                sent = await self._round(connection)
            await self._low_water.rise()
            if sent:
                continue
            if self._leaving.is_set():
                return
            if sent is None:  # the other relay is notified of new messages, too
                await within(_ELSEWHERE, self._leaving)
            if not await within(_LINGER, self._woken):
                return

    async def _round(self, connection: Connection) -> int | None:
        """How many messages have left the outbox, or wait for their next try; None if another relay has the lock."""
        given = {"destination": self._destination, "limit": MOST, "bytes": BYTES, "idle": _IDLE}
        async with connection.transaction():
            due = len(await self._rows(connection, "fall_due_outgoing", given))
        self._low_water.gone(("outbox_due", ""), due)
        async with connection.transaction():
            ((ours, _),) = await self._rows(connection, "lock_outgoing", given)
            if not ours:
                return None
            rows = await self._read(connection, given)
            if not rows:
                return 0
            self._at(Point.RELAYING, self._destination, ())
            answers = await self._send(rows)
            self._at(Point.RELAYED, self._destination, ())
            gone = await self._settle(connection, rows, answers)
        self._counts.relayed[self._destination] += gone
        self._low_water.gone(("outbox", self._destination), gone)
        for each in answers.values():
            if each is not None and _of_an_outage(each):
                raise BrokerUnavailable(each.text)
        self._duty.worked()
        return len(rows)

    async def _read(self, connection: Connection, given: dict[str, Any]) -> list[OutboxRow]:
        rows = [OutboxRow(*row) for row in await self._rows(connection, "read_outgoing", given)]
        if not (numbers := [row.number for row in rows if row.number is not None]):
            return rows
        found = await self._rows(connection, "read_letters", {"letters": numbers})
        letters = {number: ForwardedLetter(number, *rest) for number, *rest in found}
        return [row if row.number is None else replace(row, letter=letters.get(row.number)) for row in rows]

    async def _send(self, rows: Sequence[OutboxRow]) -> dict[int, Unsent | None]:
        """The broker's answer to each row, by its id."""
        answers: dict[int, Unsent | None] = {row.id: BEHIND for row in rows}
        if gone := {row.id for row in rows if row.number is not None and row.letter is None}:
            answers |= dict.fromkeys(gone)  # a dead letter that was deleted is not sent
            rows = [row for row in rows if row.id not in gone]
        clock = asyncio.get_running_loop().time
        until = clock() + _SENDING
        for indexes in together([row.order for row in rows], [row.tries for row in rows]):
            part = [rows[index] for index in indexes]
            found = await self._sent(part)
            answers |= {row.id: answer for row, answer in zip(part, found, strict=True)}
            if any(map(_of_an_outage, found)) or clock() > until:
                break
        return answers

    async def _sent(self, rows: Sequence[OutboxRow]) -> list[Unsent | None]:
        found, why = await self._relayed(rows)
        if why in (None, Meaning.PASSING) or len(rows) == 1:
            return found
        return await self._one_by_one(rows)

    async def _relayed(self, rows: Sequence[OutboxRow]) -> tuple[list[Unsent | None], Meaning | None]:
        """The answers, and what an exception meant if there was one."""
        try:
            messages = [outgoing(row, self._destination) for row in rows]
            if isinstance(self._broker, Relaying):
                return await self._broker.relay(self._name, messages), None
            await self._broker.publish(self._name, messages)
            return [None] * len(rows), None
        except BaseException as error:
            if ends_this_task(error):
                raise
            why = meaning(error)
            text = typed_text(error) if why is Meaning.DOUBT else error_text(error)
            return [Unsent(text, final=why is Meaning.REFUSED)] * len(rows), why

    async def _one_by_one(self, rows: Sequence[OutboxRow]) -> list[Unsent | None]:
        """Send one by one: one message may be to blame for the error, and then costs the others nothing. Stops before
        the transaction has been open for too long (X4)."""
        found: list[Unsent | None] = [BEHIND] * len(rows)
        clock = asyncio.get_running_loop().time
        until, stopped = clock() + _SENDING, set[str | None]()
        for index, row in enumerate(rows):
            if row.order in stopped:
                continue
            (found[index],), why = await self._relayed([row])
            if found[index] is not None and row.order is not None:
                stopped.add(row.order)
            if (why is not Meaning.DOUBT and _of_an_outage(found[index])) or clock() > until:
                break
        return found

    async def _settle(
        self, connection: Connection, rows: Sequence[OutboxRow], answers: dict[int, Unsent | None]
    ) -> int:
        """Delete the rows that are confirmed, and only those (X2)."""
        confirmed = [row.id for row in rows if answers[row.id] is None]
        if confirmed:
            if letters := [row.number for row in rows if row.number is not None and answers[row.id] is None]:
                await self._rows(connection, "lock_letters", {"letters": letters})
            await self._rows(connection, "forget_outgoing", {"ids": confirmed})
        refused = [(row, answer) for row in rows if (answer := answers[row.id]) is not None and answer.final]
        if refused:
            afters = [self._pause(row) for row, _ in refused]
            texts = [clean(answer.text) for _, answer in refused]  # a broker's text may quote the message
            held = {"ids": [row.id for row, _ in refused], "errors": texts, "afters": afters}
            await self._rows(connection, "hold_outgoing", held)
            for (row, answer), after in zip(refused, afters, strict=True):
                self._refused(row, answer, after)
        return len(confirmed)

    def _pause(self, row: OutboxRow) -> float | None:
        """Seconds until a refused message is tried again; None: it is parked."""
        if row.letter is not None and row.tries == 0:
            return 0.0  # again at once, without its message
        return next_try(row.tries + 1) if holdable(self._destination, row.order) else None

    def _refused(self, row: OutboxRow, answer: Unsent, after: float | None) -> None:
        if row.letter is not None and row.tries == 0:
            log.warning("dead letter forwarded without its message", handler=row.letter.handler, letter=row.letter.id,
                        destination=self._destination, error=answer.text)  # fmt: skip
            return
        if after is not None:
            log.warning("outgoing message refused, will retry", destination=self._destination, message=row.id,
                        error=answer.text, tries=row.tries + 1, seconds=after)  # fmt: skip
            return
        self._counts.parked[self._destination] += 1
        log.error("outgoing message parked, later messages with its key go on", destination=self._destination,
                  message=row.id, key=row.key, error=answer.text, tries=row.tries + 1)  # fmt: skip

    async def _rows(self, connection: Connection, query: str, given: dict[str, Any]) -> list[tuple[Any, ...]]:
        cursor = await OwnCursor(connection).execute(self._queries[query], given, binary=True)
        return await cursor.fetchall() if cursor.description else []

    def _say_failed(self, error: BaseException) -> None:
        log.error("outgoing messages cannot be relayed, will retry", destination=self._destination,
                  error=error_text(error))  # fmt: skip

    def _say_works(self) -> None:
        log.info("outgoing messages are relayed again", destination=self._destination)


def _of_an_outage(answer: Unsent | None) -> bool:
    return answer is not None and answer is not BEHIND and not answer.final
