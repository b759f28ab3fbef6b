"""One SQS session: long polls, deletions in batches, and visibility that is extended for the messages in flight."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from idemconsumer.brokers.outstanding import Backlog, Outstanding
from idemconsumer.brokers.sqs.received import Received
from idemconsumer.brokers.sqs.sqs_client import READ_TIMEOUT, Queue, SqsClient, SqsLink, farewell, throttled
from idemconsumer.brokers.sqs.wire import BATCH, message_of, receives
from idemconsumer.errors import SessionEnded
from idemconsumer.logs import log
from idemconsumer.message.queues import DEDUPLICATION_ID, GROUP
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Lag
from idemconsumer.rules.backoff import backoff
from idemconsumer.user_code.cancellation import end

# Seconds that a poll waits at the broker. A drain waits for it too (A1: polls are never cancelled), since messages that
# a cancelled poll was about to bring would stay hidden for their whole visibility timeout.
WAIT: Final = 1
POLLS: Final = 8  # at a time, while each brings a full batch; one when the queue is empty
# Polls that together fetch all that may be outstanding: a poll for each single message would cost more than waiting
# until there is room for several.
_WORTH: Final = 4
DELETIONS: Final = 4  # at a time, while each is a full batch
EXTENSIONS: Final = 4
CONNECTIONS: Final = POLLS + DELETIONS + EXTENSIONS
_FETCH_SECONDS: Final = 1.0
_FAREWELL: Final = 5.0  # seconds for the last deletions and returns
SILENT: Final = 9.0  # seconds without an answer that count as silence; a request has three tries of ten seconds each
_PATIENCE: Final = 5  # retries in a row of a throttled deletion or extension, until it is given up
_CALM: Final = 30.0  # seconds without a throttled answer until throttling counts as over
_BACKOFF: Final = (0.2, 5.0)  # seconds: the first pause after a throttled request, and the longest

Answer = dict[str, Any]
Operation = Callable[..., Awaitable[Answer]]


class SqsSession:
    """See `ports.Session`. Deliveries are identified by message id; the latest receipt handle settles them (A2).

    `settle` returns at once. Deletions are sent ten at a time, or fewer when none is under way. A deletion that the
    broker refuses is retried once and then left (A3): the message is delivered again, as a duplicate. So is a message
    whose deletion stays throttled.
    """

    losses_count = False  # a received message is visible again only after its timeout, whatever happens to this session

    def __init__(self, link: SqsLink, client: SqsClient, queue: Queue, bounds: Bounds) -> None:
        self._link = link
        self._client = client
        self._queue = queue
        self._outstanding = Outstanding(bounds, queue.source)
        self._backlog = Backlog()
        self._epoch = Epoch(returns_count=True)
        self._held = Received()
        self._arrived: deque[Delivery] = deque()
        self._due: deque[str] = deque()
        self._reserved = 0
        self._dry = False
        self._throttled: float | None = None  # time of the last throttled request
        self._overdue_logged = False
        self._stopped = False
        self._lost: str | None = None
        self._asked: dict[object, float] = {}  # for each poll under way, when it was sent
        self._wake = asyncio.Event()
        self._freed = asyncio.Event()
        self._polls: set[asyncio.Task[None]] = set()
        self._deletions: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._spawn(self._polls, self._poll(extra=False))
        self._keeper = asyncio.create_task(self._keep_invisible())

    # --------------------------------------------------------------------------------------------------------- fetching
    async def fetch(self) -> Sequence[Delivery]:
        if self._lost is None and not self._arrived:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FETCH_SECONDS):
                    await self._wake.wait()
        if self._lost is not None:
            raise SessionEnded(self._lost)
        return self._take_arrived()

    def _take_arrived(self) -> list[Delivery]:
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    async def _poll(self, *, extra: bool) -> None:
        """Receive until stopped. Never cancelled. An `extra` poll ends when it does not bring a full batch."""
        failures = 0
        while not (self._stopped or self._lost):
            if (want := self._room()) <= 0:
                await self._wait_for_room()
                continue
            self._reserved += want
            poll = object()
            self._asked[poll] = asyncio.get_running_loop().time()
            try:
                brought = await self._receive(want)
            except Exception as error:  # noqa: BLE001 - whatever it is, a session that does not poll has to end
                if throttled(error):
                    await self._back_off(failures := failures + 1)
                    continue
                self._end(error)
                return
            finally:
                self._reserved -= want
                del self._asked[poll]
            failures = 0
            self._eased()
            self._dry = not brought
            if brought == BATCH and len(self._polls) < POLLS:
                self._spawn(self._polls, self._poll(extra=True))
            elif extra and brought < BATCH:
                return

    async def _receive(self, want: int) -> int:
        """One poll; returns how many messages it brought."""
        loop, visibility = asyncio.get_running_loop(), self._queue.visibility
        started = loop.time()
        answer = await self._client.receive_message(
            QueueUrl=self._queue.url,
            MaxNumberOfMessages=want,
            WaitTimeSeconds=WAIT,
            VisibilityTimeout=visibility,
            MessageSystemAttributeNames=["ApproximateReceiveCount", GROUP, DEDUPLICATION_ID, "SentTimestamp"],
            MessageAttributeNames=["All"],
        )
        arrivals = [self._delivery(raw, started + visibility) for raw in answer.get("Messages") or ()]
        if arrivals:
            self._backlog.newest = arrivals[-1].message.timestamp
        if arrivals and not self._lost:
            # The visibility timeout starts when the broker takes the messages out, which may be long before its answer
            # arrives.
            if loop.time() > started + visibility / 2:
                await self._extend([delivery.handle for delivery in arrivals])
            self._arrived.extend(arrivals)
            self._wake.set()
        return len(arrivals)

    def _delivery(self, raw: Answer, until: float) -> Delivery:
        message, count = message_of(self._queue, raw), receives(raw)  # the count is a hint (A6)
        group = message.order_hint if isinstance(message.order_hint, str) else None
        self._held.arrive(raw["MessageId"], raw["ReceiptHandle"], group, until)
        self._outstanding.arrived(raw["MessageId"], message)
        return Delivery(message, self._epoch, handle=raw["MessageId"], suspect=count > 1, count=count)

    def _room(self) -> int:
        """How many messages the next poll is to fetch; 0 while these would be too few to be worth a request."""
        held, waiting = self._outstanding, self._epoch.waiting
        worth = min(BATCH, max(1, held.may_hold(waiting) // _WORTH))
        room = min(BATCH, held.may_take(waiting, asked_for=self._reserved))
        return room if room >= worth or not len(held) + self._reserved else 0

    async def _wait_for_room(self) -> None:
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FETCH_SECONDS):
                await self._freed.wait()

    # --------------------------------------------------------------------------------------------------------- settling
    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._due.extend(self._held.finish(self._ours(deliveries)))
        self._delete_due()

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        await self._polled(_FAREWELL)
        await self._return(self._held.give_back(self._ours(deliveries)))

    def _ours(self, deliveries: Sequence[Delivery]) -> list[str]:
        return [each.handle for each in deliveries if each.epoch is self._epoch and not self._epoch.ended]

    def _delete_due(self) -> None:
        """Start deletions: one at a time for whatever has accumulated, more in parallel while each is full."""
        while self._due and (not self._deletions or (len(self._due) >= BATCH and len(self._deletions) < DELETIONS)):
            batch = [self._due.popleft() for _ in range(min(BATCH, len(self._due)))]
            self._spawn(self._deletions, self._delete(batch), then=self._delete_due)

    async def _delete(self, messages: list[str]) -> None:
        left, used = messages, dict[str, str]()
        for _ in range(2):
            handles = self._held.handles(left)
            used |= handles
            refused = await self._request(self._client.delete_message_batch, handles)
            if not refused:
                break
            left = refused
        else:
            log.debug("sqs refused a deletion, leaving it to redelivery", queue=self._queue.name, messages=len(left))
        self._due.extend(self._held.deleted(used))
        self._left(used)

    def _left(self, messages: Iterable[str]) -> None:
        """Some of these messages may be no longer held: free their room."""
        self._outstanding.left([message for message in messages if message not in self._held])
        self._freed.set()

    async def _return(self, messages: Sequence[str]) -> None:
        """Make these messages visible again, after the deletions that are under way.

        Lanes may still settle messages, so it does not wait for later deletions. A FIFO group stays closed to other
        consumers while an earlier message of it is still to be deleted.
        """
        if not messages:
            return
        if self._deletions:
            await asyncio.wait(self._deletions, timeout=_FAREWELL)
        handles = self._held.handles(messages)
        self._held.forget(messages)
        self._left(messages)
        await asyncio.gather(*(self._set_visibility(batch, 0) for batch in _batches(handles)))

    # ------------------------------------------------------------------------------------------------------- visibility
    async def _keep_invisible(self) -> None:
        """Extend the visibility of every message with less than half of its time left (A4)."""
        loop, visibility = asyncio.get_running_loop(), self._queue.visibility
        while True:
            await asyncio.sleep(visibility / 6)
            await self._extend(self._held.expiring(loop.time() + visibility / 2))

    async def _extend(self, messages: Sequence[str]) -> None:
        """Extend these messages. A refused one has become visible again; one whose request was given up is still
        expiring, and is tried again in the next round."""
        loop, visibility = asyncio.get_running_loop(), self._queue.visibility
        batches = list(_batches(self._held.handles(messages)))
        for start in range(0, len(batches), EXTENSIONS):
            until = loop.time() + visibility
            some = batches[start : start + EXTENSIONS]
            answers = await asyncio.gather(*(self._set_visibility(batch, visibility) for batch in some))
            for batch, refused in zip(some, answers, strict=True):
                if refused is not None:
                    self._held.extended(batch, refused, until)

    async def _set_visibility(self, handles: Mapping[str, str], seconds: int) -> list[str] | None:
        return await self._request(self._client.change_message_visibility_batch, handles, VisibilityTimeout=seconds)

    # --------------------------------------------------------------------------------------------------------- requests
    async def _request(self, operation: Operation, handles: Mapping[str, str], **more: object) -> list[str] | None:
        """Send one batch. Returns the messages that were refused, or None when the request was given up.

        Ends the session when there is no answer, or an invalid one.
        """
        messages, failures = list(handles), 0
        entries = [{"Id": str(n), "ReceiptHandle": handles[message], **more} for n, message in enumerate(messages)]
        while entries and not self._lost:
            try:
                refusals = (await operation(QueueUrl=self._queue.url, Entries=entries)).get("Failed") or []
                refused = [messages[int(each["Id"])] for each in refusals]
            except Exception as error:  # noqa: BLE001 - the client lets through what it did not foresee
                if not throttled(error):
                    self._end(error)
                elif (failures := failures + 1) <= _PATIENCE:
                    await self._back_off(failures)
                    continue
                return None
            self._eased()
            self._log_overdue(refusals)
            return refused
        return None if entries else []

    def _log_overdue(self, refusals: Sequence[Answer]) -> None:
        """Log once that SQS refuses to hide a message for longer than 12 hours."""
        if not self._overdue_logged and any("43200" in str(each.get("Message")) for each in refusals):
            self._overdue_logged = True
            log.warning("in flight for 12 hours, sqs redelivers it", queue=self._queue.name)

    async def _back_off(self, failures: int) -> None:
        if self._throttled is None:
            log.warning("sqs throttles, backing off", queue=self._queue.name)
        self._throttled = asyncio.get_running_loop().time()
        first, longest = _BACKOFF
        await asyncio.sleep(backoff(failures, first=first, cap=longest) * random.uniform(0.5, 1.0))

    def _eased(self) -> None:
        # Not at the first success: some requests pass while others are throttled, and each change would be logged.
        if self._throttled is not None and asyncio.get_running_loop().time() - self._throttled > _CALM:
            self._throttled = None
            log.info("sqs no longer throttles", queue=self._queue.name)

    # ----------------------------------------------------------------------------------------------------------- ending
    async def idle(self) -> bool:
        """Counts are approximate at AWS, so the last poll must have come back empty as well."""
        if self._lost or self._arrived or not self._dry:
            return False
        names = [f"ApproximateNumberOfMessages{kind}" for kind in ("", "Delayed", "NotVisible")]
        try:
            answer = await self._client.get_queue_attributes(QueueUrl=self._queue.url, AttributeNames=names)
        except Exception as error:  # noqa: BLE001 - as for any other request
            if not throttled(error):
                self._end(error)
            return False
        visible, delayed, invisible = (int((answer.get("Attributes") or {}).get(name, 0)) for name in names)
        return visible + delayed == 0 and invisible <= len(self._held) and not self._arrived

    async def lag(self, *, whole: bool) -> Mapping[str, Lag]:
        """See `ports.KnowsLag`. Uses the queue's own estimate."""
        if not whole or self._lost:
            return {}
        name = "ApproximateNumberOfMessages"
        answer = await self._client.get_queue_attributes(QueueUrl=self._queue.url, AttributeNames=[name])
        return {self._queue.source: self._backlog.lag(int((answer.get("Attributes") or {}).get(name, 0)))}

    @property
    def silence(self) -> float | None:
        """See `ports.KnowsSilence`: how long the oldest poll has waited, minus its wait time at the queue."""
        asked = min(self._asked.values(), default=math.inf)
        seconds = asyncio.get_running_loop().time() - asked - WAIT
        return seconds if seconds > SILENT else None

    async def stop_fetching(self) -> Sequence[Delivery]:
        self._stopped = True
        self._freed.set()
        await self._polled(WAIT + 1)
        return self._take_arrived()

    async def close(self) -> None:
        self._stopped = True
        self._freed.set()
        await self._polled(WAIT + READ_TIMEOUT)  # a poll on a hanging connection is left behind
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL):
                while self._deletions and not self._lost:
                    await asyncio.wait(self._deletions)
                if self._lost is None:
                    await self._return(self._held.rest())
        self._end(None)
        if self._keeper is not None:
            await end(self._keeper)
        await farewell(self._client)

    async def _polled(self, within: float) -> None:
        """Wait for the last polls: messages that are returned earlier would go to them, and count as received again."""
        if self._stopped and self._polls:
            await asyncio.wait(self._polls, timeout=within)

    def _end(self, error: Exception | None) -> None:
        """End the session. `error`: why it was lost; None: we close it ourselves."""
        if self._lost is None:
            given = self._queue.given or self._queue.name
            self._lost = f"sqs:{given}: closed" if error is None else str(self._link.refused(given, error))
        self._epoch.end()
        self._outstanding.clear()
        self._arrived.clear()
        self._wake.set()
        self._freed.set()

    def _spawn(
        self,
        tasks: set[asyncio.Task[None]],
        work: Coroutine[Any, Any, None],
        then: Callable[[], None] | None = None,
    ) -> None:
        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if then is not None:
                then()

        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(done)


def _batches(handles: dict[str, str]) -> Iterator[dict[str, str]]:
    """The handles in batches of ten."""
    listed = list(handles.items())
    return (dict(listed[start : start + BATCH]) for start in range(0, len(listed), BATCH))
