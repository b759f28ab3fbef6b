"""What came of the orders: in the topics, in the tables, and in what the customers were told."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from examples.orders.app import CONFIRMED, PLACED
from examples.orders.company import Company
from examples.orders.customers import Customers
from tests.support.waiting import until

PARTITIONS = 4
GROUPS = ((PLACED, "stock"), (CONFIRMED, "shop"))  # topic, consumer group


class Count(NamedTuple):
    """How often something happened, beside how often it should have."""

    what: str
    wanted: int
    seen: Counter[str]

    @property
    def lost(self) -> int:
        return self.wanted - len(self.seen)

    @property
    def twice(self) -> int:
        return self.seen.total() - len(self.seen)


async def make_topics(kafka: str) -> None:
    """Empty ones, also where an earlier storm has left some."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        await admin.delete_topics([PLACED, CONFIRMED])

        async def made() -> bool:
            with suppress(KafkaError):
                answer = await admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in (PLACED, CONFIRMED)])
                return all(error[1] in (0, 36) for error in answer.topic_errors)  # 36: it is there
            return False

        await until(made, "the topics are there")
    finally:
        await admin.close()


async def all_read(kafka: str) -> bool:
    """Whether the groups have committed all that is in their topics: nothing can come again then."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka)
    await admin.start()
    await consumer.start()
    try:
        for topic, group in GROUPS:
            partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            ends = await consumer.end_offsets(partitions)
            committed = await admin.list_consumer_group_offsets(group)
            if any(end and (each not in committed or committed[each].offset < end) for each, end in ends.items()):
                return False
        return True
    finally:
        await consumer.stop()
        await admin.close()


async def counted(company: Company, customers: Customers, orders: int) -> list[Count]:
    async def of(query: str) -> Counter[str]:
        return Counter(str(row[0]) for row in await company.rows(query))

    outgoing, again = await _sent(company.kafka, PLACED)
    replies, replies_again = await _sent(company.kafka, CONFIRMED)
    print(f"{again + replies_again} messages were sent again by a relay, under the ids that they had", flush=True)
    answers = Counter(number for numbers in customers.answered.values() for number in numbers)
    return [
        Count("answers", orders, answers),
        Count("orders", orders, await of("select ref from placed")),
        Count("outgoing", orders, outgoing),
        Count("consumed", orders, await of("select order_id from stock_moved")),
        Count("replies", orders, replies),
        Count("confirmed", orders, await of("select order_id from confirmation")),
    ]


async def _sent(kafka: str, topic: str) -> tuple[Counter[str], int]:
    """The orders of a topic, each as often as it has message ids there; and how many records came again under an id."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, auto_offset_reset="earliest")
    await consumer.start()
    messages: set[tuple[str, bytes]] = set()
    records = 0
    try:
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        while records < sum(ends.values()):
            found = await consumer.getmany(timeout_ms=1_000)
            for record in (one for some in found.values() for one in some):
                records += 1
                messages.add((json.loads(record.value)["id"], dict(record.headers)["idemconsumer-message-id"]))
    finally:
        await consumer.stop()
    return Counter(order for order, _ in messages), records - len(messages)
