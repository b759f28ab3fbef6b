"""Replies to the queue that a request's attribute `ReplyTo` names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, Final

from idemconsumer.brokers.sqs.client import GONE, LOSS, Client, Link, Queue, address_of, code_of, text_of
from idemconsumer.brokers.sqs.wire import Entry, entry_of, requests
from idemconsumer.errors import BadMessage, BrokerUnavailable, ConfigurationError
from idemconsumer.message.queues import GROUP, QueueAddress, queue_address
from idemconsumer.message.replies import CONTENT_TYPE, OUTCOME, SQS_CORRELATION, Address
from idemconsumer.ports.broker import Outgoing, Reply, Unsent

CONFIRM: Final = 30.0  # seconds, connecting included
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}(\.fifo)?")


class SqsReplies:
    """A producer chooses the queue, but neither where we connect to nor whose queue it is: it is found by its name, in
    the region and the account of the queue that the request came from."""

    def __init__(self, link: Link, client: Callable[[QueueAddress], Awaitable[Client]]) -> None:
        self._link = link
        self._client = client
        self._queues: dict[tuple[str, str], Queue] = {}  # by the source of the request, and its address

    async def send(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        by_queue: dict[tuple[str, str], list[int]] = {}
        for index, reply in enumerate(replies):
            by_queue.setdefault((reply.address.source, reply.address.to), []).append(index)
        unsent: list[Unsent | None] = [None] * len(replies)

        async def send(indexes: Sequence[int]) -> None:
            for index, each in zip(indexes, await self._to_one([replies[index] for index in indexes]), strict=True):
                unsent[index] = each

        await asyncio.gather(*map(send, by_queue.values()))
        return unsent

    async def _to_one(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        address = replies[0].address
        try:
            async with asyncio.timeout(CONFIRM):
                client = await self._client(address_of(address.source))
                queue = await self._queue(client, address)
                if isinstance(queue, Unsent):
                    return [queue] * len(replies)
                messages = [_message_of(queue, reply) for reply in replies]
                return await send_each(client, queue, messages, self._link.where)
        except (BrokerUnavailable, ConfigurationError) as error:
            return [Unsent(str(error))] * len(replies)
        except LOSS as error:
            self._queues.pop((address.source, address.to), None)
            code = code_of(error)
            text = f"{self._link.where}: a reply cannot be sent: {text_of(error)}"
            return [Unsent(text, final=code in (*GONE, "AccessDenied"), gone=code in GONE)] * len(replies)

    async def _queue(self, client: Client, address: Address) -> Queue | Unsent:
        known = address.source, address.to
        if known in self._queues:
            return self._queues[known]
        source, wanted = address_of(address.source), queue_address(address.to)
        if wanted is None or _NAME.fullmatch(wanted.name) is None:
            return Unsent("the address is not a queue", final=True)
        owner = {} if source.account is None else {"QueueOwnerAWSAccountId": source.account}
        url = (await client.get_queue_url(QueueName=wanted.name, **owner))["QueueUrl"]
        queue = await self._link.queue(client, QueueAddress(wanted.name, wanted.name, url=url))
        if address.to not in (wanted.name, url, queue.attributes.get("QueueArn")):
            return Unsent("the address is a queue outside the request's account, region or endpoint", final=True)
        self._queues[known] = queue
        return queue


async def send_each(
    client: Client, queue: Queue, messages: Sequence[Outgoing], where: str, *, blame: bool = False
) -> list[Unsent | None]:
    """Of each message whether it was taken, whatever became of the others. With `blame` what SQS calls the sender's
    fault is final. Raises what the client raises."""
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


def _message_of(queue: Queue, reply: Reply) -> Outgoing:
    """Replies need no order, so in a FIFO queue each is a group of its own."""
    headers: dict[str, str | bytes] = {OUTCOME: reply.outcome, CONTENT_TYPE: reply.content_type}
    if reply.address.correlation is not None:
        headers[SQS_CORRELATION] = reply.address.correlation
    if queue.fifo:
        headers[GROUP] = reply.id
    return Outgoing(reply.body, headers, reply.id)
