"""SQS, standard and FIFO queues, through aiobotocore. Consuming is in `sqs_session`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from idemconsumer.brokers.reaching import text_of
from idemconsumer.brokers.sendable import one_after_another
from idemconsumer.brokers.sqs.sqs_client import (
    GONE,
    LONGEST,
    LOSS,
    Queue,
    SqsClient,
    SqsLink,
    address_of,
    code_of,
    dead_letters,
    farewell,
    limits,
    max_receives,
    retention,
)
from idemconsumer.brokers.sqs.sqs_session import CONNECTIONS, SqsSession
from idemconsumer.brokers.sqs.wire import Entry, entry_of, requests
from idemconsumer.errors import BadMessage, BrokerUnavailable, ConfigurationError
from idemconsumer.message.message import Subscription
from idemconsumer.message.queues import GROUP, QueueAddress, queue_address
from idemconsumer.message.reply_address import CONTENT_TYPE, OUTCOME, SQS_CORRELATION, Address
from idemconsumer.opening import Opening
from idemconsumer.ports.broker import Bounds, Finding, Outgoing, Reply, Unsent
from idemconsumer.settings import Settings

CONFIRM: Final = 30.0  # seconds for a publish or a reply, connecting included
SENDS: Final = 8  # requests at a time; a FIFO queue gets one after another
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}(\.fifo)?")


class SqsBroker:
    """See `ports.Broker`. Each session has its own client; all publishing shares another one.

    The endpoint is the setting `sqs`, or AWS. Credentials come from where every AWS client takes them; so does the
    region, unless an ARN or a URL names it. Raises ConfigurationError for an invalid endpoint. Large payloads that
    another client stored in S3 are not fetched: the handler gets the pointer.
    """

    hands_over = False

    def __init__(self, settings: Settings) -> None:
        self._link = SqsLink(settings)
        self._connecting = Opening(BrokerUnavailable)
        self._clients: dict[tuple[str | None, str | None], SqsClient] = {}  # by endpoint and region
        self._queues: dict[str, Queue] = {}
        self._reply_queues: dict[tuple[str, str], Queue] = {}  # by the source of the request, and its reply address

    def feed(self, subscription: Subscription) -> str:
        return subscription.source

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> SqsSession:
        (name,) = {subscription.name for subscription in subscriptions}
        at = address_of(name)
        client = await self._link.connect(CONNECTIONS, at)
        try:
            queue = await self._link.queue(client, at)
        except BaseException:
            await farewell(client)
            raise
        session = SqsSession(self._link, client, queue, bounds)
        session.start()
        return session

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish to the queue, with `Outgoing.key` as message id (FIFO: as deduplication id too).

        The header `MessageGroupId` becomes the message's group, which a FIFO queue requires. Nothing is sent when any
        message is larger than the queue accepts (BadMessage) or lacks its group (ConfigurationError). Raises
        BrokerUnavailable when the queue is missing, or when not every message was confirmed in time. Some messages may
        have been published: publish all again, with the same keys.
        """
        try:
            async with asyncio.timeout(CONFIRM):
                client, queue = await self._ready(name)
                batches = list(requests(queue, [entry_of(queue, message) for message in messages]))
                if queue.fifo:
                    for batch in batches:
                        await self._send(client, queue, batch)
                    return
                for start in range(0, len(batches), SENDS):
                    await asyncio.gather(
                        *(self._send(client, queue, batch) for batch in batches[start : start + SENDS])
                    )
        except LOSS as error:
            self._queues.pop(name, None)
            raise self._link.refused(name, error) from error

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        """See `ports.Replying`. The producer chooses the queue, but neither the endpoint nor the account: the queue is
        looked up by name, in the region and the account of the queue that the request came from."""
        by_queue: dict[tuple[str, str], list[int]] = {}
        for index, reply in enumerate(replies):
            by_queue.setdefault((reply.address.source, reply.address.to), []).append(index)
        unsent: list[Unsent | None] = [None] * len(replies)

        async def send(indexes: Sequence[int]) -> None:
            answers = await self._reply_to_one([replies[index] for index in indexes])
            for index, each in zip(indexes, answers, strict=True):
                unsent[index] = each

        await asyncio.gather(*map(send, by_queue.values()))
        return unsent

    async def _reply_to_one(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        address = replies[0].address
        try:
            async with asyncio.timeout(CONFIRM):
                client = await self._client(address_of(address.source))
                queue = await self._reply_queue(client, address)
                if isinstance(queue, Unsent):
                    return [queue] * len(replies)
                messages = [_outgoing(queue, reply) for reply in replies]
                return await _send_each(client, queue, messages, self._link.where)
        except (BrokerUnavailable, ConfigurationError) as error:
            return [Unsent(str(error))] * len(replies)
        except LOSS as error:
            self._reply_queues.pop((address.source, address.to), None)
            code = code_of(error)
            text = f"{self._link.where}: a reply cannot be sent: {text_of(error)}"
            return [Unsent(text, final=code in (*GONE, "AccessDenied"), gone=code in GONE)] * len(replies)

    async def _reply_queue(self, client: SqsClient, address: Address) -> Queue | Unsent:
        known = address.source, address.to
        if known in self._reply_queues:
            return self._reply_queues[known]
        source, wanted = address_of(address.source), queue_address(address.to)
        if wanted is None or _NAME.fullmatch(wanted.name) is None:
            return Unsent("the address is not a queue", final=True)
        owner = {} if source.account is None else {"QueueOwnerAWSAccountId": source.account}
        url = (await client.get_queue_url(QueueName=wanted.name, **owner))["QueueUrl"]
        queue = await self._link.queue(client, QueueAddress(wanted.name, wanted.name, url=url))
        if address.to not in (wanted.name, url, queue.attributes.get("QueueArn")):
            return Unsent("the address is a queue outside the request's account, region or endpoint", final=True)
        self._reply_queues[known] = queue
        return queue

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        """See `ports.Relaying`."""
        fifo = name.endswith(".fifo")
        groups = [message.headers.get(GROUP) if fifo else None for message in messages]
        orders = [None if group is None else str(group) for group in groups]
        return await one_after_another(messages, orders, partial(self._relay, name), CONFIRM)

    async def _relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        try:
            async with asyncio.timeout(CONFIRM):
                client, queue = await self._ready(name)
                return await _send_each(client, queue, messages, self._link.where, blame=True)
        except LOSS as error:
            self._queues.pop(name, None)
            raise self._link.refused(name, error) from error

    async def check_destination(self, name: str) -> None:
        """Check that the queue exists, else raise BrokerUnavailable; not whether these credentials may send to it."""
        await self._ready(name, anew=True)

    async def check(self, subscription: Subscription) -> list[Finding]:
        subject = subscription.source
        try:
            _, queue = await self._ready(subscription.name, anew=True)
        except (BrokerUnavailable, ConfigurationError) as error:
            return [Finding("error", subject, str(error))]
        kind = "FIFO queue" if queue.fifo else "queue"
        return [
            Finding("ok", subject, f"{self._link.where} has the {kind} {subscription.name!r}"),
            *limits(subject, queue),
        ]

    async def retention_seconds(self, subscription: Subscription) -> float | None:
        """How long a message can be redelivered, in seconds; None: unknown. A dead-letter queue also keeps a message,
        and until that expires it may be sent back from there, as a new message of this queue."""
        try:
            _, queue = await self._ready(subscription.name)
        except BrokerUnavailable:
            return None
        kept, arn = retention(queue), dead_letters(queue)
        if kept is None or arn is None:
            return kept
        try:
            _, aside = await self._ready(arn)
        except (BrokerUnavailable, ConfigurationError):
            return kept + LONGEST  # it exists, and may keep as much: these credentials may not query it
        return kept + (retention(aside) or LONGEST)

    async def max_receives(self, subscription: Subscription) -> int | None:
        """After how many receives the queue's redrive policy moves a message away; None: never, or unknown."""
        try:
            _, queue = await self._ready(subscription.name)
        except BrokerUnavailable:
            return None
        return max_receives(queue)

    async def close(self) -> None:
        await self._connecting.close()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await farewell(client)

    async def _ready(self, name: str, *, anew: bool = False) -> tuple[SqsClient, Queue]:
        async with self._connecting.turn():
            client = await self._client_at(at := address_of(name))
            if anew or name not in self._queues:
                self._queues[name] = await self._link.queue(client, at)
            return client, self._queues[name]

    async def _client(self, at: QueueAddress) -> SqsClient:
        async with self._connecting.turn():
            return await self._client_at(at)

    async def _client_at(self, at: QueueAddress) -> SqsClient:
        place = at.endpoint, at.region
        if place not in self._clients:
            self._clients[place] = await self._link.connect(SENDS, at)
        return self._clients[place]

    async def _send(self, client: SqsClient, queue: Queue, batch: Sequence[Entry]) -> None:
        answer: dict[str, Any] = await client.send_message_batch(QueueUrl=queue.url, Entries=batch)
        if refused := answer.get("Failed"):
            why = refused[0]
            raise BrokerUnavailable(
                f"{self._link.where}: {len(refused)} message(s) to queue {queue.name!r} were refused: "
                f"{why.get('Code')}: {why.get('Message')}"
            )


async def _send_each(
    client: SqsClient, queue: Queue, messages: Sequence[Outgoing], where: str, *, blame: bool = False
) -> list[Unsent | None]:
    """For each message whether it was accepted, whatever happened to the others. With `blame`, an error that SQS calls
    the sender's fault is final. Raises what the client raises."""
    unsent: list[Unsent | None] = [None] * len(messages)
    entries: dict[int, Entry] = {}
    for index, message in enumerate(messages):
        try:
            entries[index] = entry_of(queue, message)
        except BadMessage as error:
            unsent[index] = Unsent(error.detail, final=True)
        except ConfigurationError as error:
            unsent[index] = Unsent(str(error), final=True)

    async def send(batch: Sequence[Entry], indexes: Sequence[int]) -> None:
        answer: dict[str, Any] = await client.send_message_batch(QueueUrl=queue.url, Entries=batch)
        for why in answer.get("Failed") or ():
            text, its = f"{where}: {why.get('Code')}: {why.get('Message')}", blame and bool(why.get("SenderFault"))
            unsent[indexes[int(why["Id"])]] = Unsent(text, final=its)

    left = iter(entries)
    batches = [(batch, list(islice(left, len(batch)))) for batch in requests(queue, list(entries.values()))]
    await asyncio.gather(*(send(*each) for each in batches))
    return unsent


def _outgoing(queue: Queue, reply: Reply) -> Outgoing:
    """A reply as a message. Replies need no order, so in a FIFO queue each is a group of its own."""
    headers: dict[str, str | bytes] = {OUTCOME: reply.outcome, CONTENT_TYPE: reply.content_type}
    if reply.address.correlation is not None:
        headers[SQS_CORRELATION] = reply.address.correlation
    if queue.fifo:
        headers[GROUP] = reply.id
    return Outgoing(reply.body, headers, reply.id)
