"""D16: a worker says at its start what its sources would lose, as `check` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer import App, Tx
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Finding
from idemconsumer.process.child import WORKER
from tests.support.kafka import create_topic
from tests.support.logs import LogCapture, entries
from tests.support.servers.made import PrivateRabbitMQ, Server
from tests.support.waiting import until
from tests.support.workers import Bench, Item, Lasting, connected, prepare

DAY = 86_400
AT_RISK = "source at risk"


@pytest.fixture
def bench(database: str) -> Bench:
    prepare(database)
    return Bench(database)


def app_of(*sources: str, retain: str = "14d") -> App:
    app = App("warned")

    @app.idempotent_handler(*sources, key="id", retain=retain)
    async def handle(item: Item, tx: Tx) -> None:
        return None

    return app


class Risky(Lasting):
    """Keeps messages for ten days."""

    away = True

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        if self.away:
            self.away = False
            raise BrokerUnavailable("not yet")
        return await super().open(subscriptions, bounds)

    async def check(self, subscription: Subscription) -> list[Finding]:
        assert not self.away, "asked once there is a session"
        return [Finding("ok", subscription.source, "is here"), Finding("warning", subscription.source, "has a limit")]

    async def retention_seconds(self, subscription: Subscription) -> float:
        return 10 * DAY

    async def max_receives(self, subscription: Subscription) -> int:
        return 3


@pytest.mark.parametrize(
    ("retain", "level", "text"),
    [
        ("3d", "error", 'records are kept for 3 days; write retain="11d"'),
        ("10d", "warning", 'less than a day for messages in flight at the end; write retain="11d"'),
        ("14d", "warning", "removes a message after 3 receives"),
    ],
)
async def test_a_worker_says_once_what_check_would_warn_of(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, retain: str, level: str, text: str
) -> None:
    connected(bench, monkeypatch, memory=Risky())
    async with bench.running(app_of("memory:a", retain=retain)) as running:
        await until(lambda: len(entries(logged, AT_RISK)) >= 2)
        await running.leave()
    first, second, *_ = entries(logged, AT_RISK)
    assert (first["log_level"], first["source"], first["finding"]) == ("warning", "memory:a", "has a limit")
    assert (second["log_level"], text in second["finding"]) == (level, True)


async def test_of_several_workers_the_first_one_says_it(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKER, "1")
    risky = Risky()
    risky.away = False
    connected(bench, monkeypatch, memory=risky)
    async with bench.running(app_of("memory:a")) as running:
        await running.until(lambda: bool(entries(logged, "consuming")))
    assert not entries(logged, AT_RISK)


class Silent(Risky):
    async def check(self, subscription: Subscription) -> list[Finding]:
        raise BrokerUnavailable("not now")


async def test_a_source_that_cannot_be_asked_is_said_and_stops_nothing(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected(bench, monkeypatch, memory=Silent())
    async with bench.running(app_of("memory:a")) as running:
        await until(lambda: len(entries(logged, "source not checked")) == 1)
        await running.leave()


async def test_what_a_queue_of_rabbitmq_would_delete_is_said_at_the_start(
    bench: Bench, logged: LogCapture, private_rabbitmq: PrivateRabbitMQ
) -> None:
    server = private_rabbitmq()
    limited: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": 3}
    lasting: dict[str, Any] = {"x-queue-type": "quorum", "x-message-ttl": 30 * DAY * 1000}
    async with await aio_pika.connect(server.address) as connection, connection.channel() as channel:
        await channel.declare_queue("limited", durable=True, arguments=limited)
        await channel.declare_queue("lasting", durable=True, arguments=lasting)
        await channel.declare_queue("harmless", durable=True)
    app = app_of("rabbitmq:limited", "rabbitmq:lasting", "rabbitmq:harmless")
    async with bench.running(app, rabbitmq=server.address, rabbitmq_management=server.management):
        await until(lambda: len(entries(logged, AT_RISK)) >= 3)
    said = {(each["source"], each["log_level"]): each["finding"] for each in entries(logged, AT_RISK)}
    assert "delivery limit 3 and no dead-letter exchange" in said["rabbitmq:limited", "error"]
    assert "message TTL and no dead-letter exchange" in said["rabbitmq:lasting", "warning"]
    assert (
        'keeps messages for 30 days, but records are kept for 14 days; write retain="31d"'
        in (said["rabbitmq:lasting", "error"])
    )
    assert "rabbitmq:harmless" not in {source for source, _ in said}


async def test_what_kafka_keeps_for_longer_than_its_record_is_said_at_the_start(
    bench: Bench, logged: LogCapture, kafka: Server
) -> None:
    """ElasticMQ does not tell its retention."""
    name = f"lasting-{uuid4().hex}"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, name, configs={"retention.ms": str(30 * DAY * 1000)})
    await admin.close()
    async with bench.running(app_of(f"kafka:{name}", retain="7d"), kafka=kafka.address):
        await until(lambda: bool(entries(logged, AT_RISK)))
    (said,) = entries(logged, AT_RISK)
    assert (said["source"], said["log_level"]) == (f"kafka:{name}", "error")
    assert 'keeps messages for 30 days, but records are kept for 7 days; write retain="31d"' in said["finding"]
