"""The SQS adapter against ElasticMQ: sessions that end, FIFO order, limits, publish, check, and the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from aiobotocore.session import get_session
from click.testing import CliRunner

from idemconsumer import App, Tx
from idemconsumer.brokers.connecting import connect
from idemconsumer.brokers.sqs.broker import SqsBroker
from idemconsumer.brokers.sqs.session import SqsSession
from idemconsumer.cli.inspect import findings
from idemconsumer.cli.main import main
from idemconsumer.errors import BadMessage, BrokerUnavailable, ConfigurationError, SessionEnded
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.testing.broker_contract import WIDE, arriving, bodies, until_idle
from tests.support.logs import times
from tests.support.servers.made import PrivateElasticMQ, Server
from tests.support.workers import Bench, Item, note, prepare


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Any]:
    async with get_session().create_client("sqs", endpoint_url=address) as client:
        yield client


async def queue(address: str, suffix: str = "", **attributes: str) -> str:
    name = f"test-{uuid4().hex}{suffix}"
    fifo = {"FifoQueue": "true"} if suffix else {}
    async with client_of(address) as client:
        await client.create_queue(QueueName=name, Attributes={**attributes, **fifo})
    return name


def subscribed(name: str) -> Subscription:
    return Subscription(f"sqs:{name}", "handler", "group")


@pytest.fixture
async def broker(sqs: Server) -> AsyncIterator[SqsBroker]:
    broker = SqsBroker(Settings(sqs=sqs.address))
    yield broker
    await broker.close()


@pytest.fixture
def bench(database: str) -> Bench:
    prepare(database)
    return Bench(database)


@asynccontextmanager
async def consuming(broker: SqsBroker, name: str, bounds: Bounds = WIDE) -> AsyncIterator[SqsSession]:
    session = await broker.open([subscribed(name)], bounds)
    try:
        yield session
    finally:
        await session.close()


def shop(name: str, **options: Any) -> App:
    app = App("shop")

    @app.idempotent_handler(f"sqs:{name}", key="id", **options)
    async def place(order: Item, tx: Tx) -> None:
        await note(tx, order)

    return app


def order(id: str, group: str | None = None) -> Outgoing:
    return Outgoing(json.dumps({"id": id}).encode(), {} if group is None else {"MessageGroupId": group})


# ------------------------------------------------------------------------------------------------------------ receiving
async def test_a_message_that_was_released_is_a_suspect_and_its_count_a_hint(sqs: Server, broker: SqsBroker) -> None:
    name = await queue(sqs.address)
    await broker.publish(name, [Outgoing(b"a")])
    for count in (1, 2):
        async with consuming(broker, name) as session:
            (delivery,) = await arriving(session, 1)
            assert (delivery.suspect, delivery.count) == (count > 1, count)


async def test_a_group_comes_in_order_again_after_a_drain_in_the_middle_of_it(sqs: Server, broker: SqsBroker) -> None:
    name = await queue(sqs.address, ".fifo")
    await broker.publish(name, [order(str(n), "g") for n in range(6)])
    expected = [order(str(n)).body for n in range(6)]
    async with consuming(broker, name) as session:
        deliveries = await arriving(session, 6)
        assert bodies(deliveries) == expected
        await session.settle([deliveries[0], deliveries[2], deliveries[3]])
        await session.stop_fetching()
        await session.release(deliveries[4:])
    async with consuming(broker, name) as session:
        assert bodies(await arriving(session, 5)) == expected[1:]


async def test_a_fifo_group_is_applied_in_order_by_workers_that_come_and_go(
    sqs: Server, broker: SqsBroker, bench: Bench
) -> None:
    name = await queue(sqs.address, ".fifo")
    ids = [f"{group}{n:02d}" for n in range(15) for group in "abc"]
    await broker.publish(name, [order(each, each[0]) for each in ids])
    for share in (10, 25):
        async with bench.running(shop(name), sqs=sqs.address) as running:
            await running.until(lambda share=share: len(bench.effects()) >= share)  # type: ignore[misc]
    await bench.until_empty(shop(name), sqs=sqs.address)
    for group in "abc":
        applied = [each for each in bench.effects() if each[0] == group]
        assert applied == [each for each in ids if each[0] == group]


# ------------------------------------------------------------------------------------------------------------- sessions
async def test_a_deleted_queue_ends_the_session_and_is_named(sqs: Server, broker: SqsBroker) -> None:
    name = await queue(sqs.address)
    async with consuming(broker, name) as session:
        async with client_of(sqs.address) as client:
            await client.delete_queue(QueueUrl=(await client.get_queue_url(QueueName=name))["QueueUrl"])
        with pytest.raises(SessionEnded, match=f"no queue '{name}'"):
            await arriving(session, 1)
    with pytest.raises(BrokerUnavailable, match=rf"aws sqs create-queue --queue-name {name}"):
        await broker.open([subscribed(name)], WIDE)


@pytest.mark.kill
async def test_a_lost_server_is_said_once_and_used_again_when_it_is_back(
    private_elasticmq: PrivateElasticMQ, bench: Bench, logged: Any
) -> None:
    server = private_elasticmq()
    name = await queue(server.address)
    broker = SqsBroker(Settings(sqs=server.address))
    await broker.publish(name, [order("before")])
    async with bench.running(shop(name), sqs=server.address) as running:
        await running.until_count(applied=1)
        server.kill()
        await running.until(lambda: times(logged, "broker session lost, reconnecting") == 1)
        server.start()
        async with client_of(server.address) as client:
            await client.create_queue(QueueName=name)
        await broker.publish(name, [order("before"), order("after")])
        await running.until_count(applied=2, duplicate=1)
    await broker.close()
    assert times(logged, "broker session lost, reconnecting") == 1
    assert times(logged, "broker unavailable, waiting") <= 1
    assert sorted(bench.effects()) == ["after", "before"]


async def test_a_drain_waits_no_longer_than_its_poll(sqs: Server, broker: SqsBroker) -> None:
    name = await queue(sqs.address)
    session = await broker.open([subscribed(name)], WIDE)
    await session.fetch()
    started = time.monotonic()
    await session.stop_fetching()
    await session.close()
    assert time.monotonic() - started < 10


# ----------------------------------------------------------------------------------------------------------- publishing
async def test_nothing_is_sent_when_one_message_is_too_large(sqs: Server, broker: SqsBroker) -> None:
    name = await queue(sqs.address)
    with pytest.raises(BadMessage, match=r"oversized: 300000 bytes.* takes 262144"):
        await broker.publish(name, [Outgoing(b"small"), Outgoing(b"x" * 300_000)])
    async with consuming(broker, name) as session:
        assert await until_idle(session) == []


async def test_many_large_messages_go_in_requests_that_the_service_takes(sqs: Server, broker: SqsBroker) -> None:
    name = await queue(sqs.address)
    await broker.publish(name, [Outgoing(b"%03d" % n + b"x" * 60_000) for n in range(40)])
    async with consuming(broker, name) as session:
        deliveries = await arriving(session, 40)
        await session.settle(deliveries)
    assert len({delivery.message.body for delivery in deliveries}) == 40


async def test_a_key_is_dropped_by_a_fifo_queue_when_it_is_published_again(sqs: Server, broker: SqsBroker) -> None:
    name = await queue(sqs.address, ".fifo")
    for _ in range(2):
        await broker.publish(name, [Outgoing(b"{}", {"MessageGroupId": "g"}, "o-1")])
    async with consuming(broker, name) as session:
        (delivery,) = await arriving(session, 1)
        assert delivery.message.message_id == "o-1"
        assert not await session.fetch()


# -------------------------------------------------------------------------------------------------------- configuration
async def test_an_unreachable_endpoint_is_named(broker: SqsBroker) -> None:
    away = SqsBroker(Settings(sqs="http://127.0.0.1:1"))
    with pytest.raises(BrokerUnavailable, match=r"SQS at http://127\.0\.0\.1:1: queue 'orders' cannot be used"):
        await away.open([subscribed("orders")], WIDE)
    (finding,) = await away.check(subscribed("orders"))
    assert finding.level == "error"
    await away.close()


async def test_missing_credentials_and_region_are_said(sqs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    broker = SqsBroker(Settings(sqs=sqs.address))
    (finding,) = await broker.check(subscribed("orders"))
    assert finding.level == "error"
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in finding.text
    await broker.close()
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(ConfigurationError, match="set AWS_DEFAULT_REGION"):
        await SqsBroker(Settings(sqs=sqs.address)).open([subscribed("orders")], WIDE)
    (finding,) = await SqsBroker(Settings(sqs=sqs.address)).check(subscribed("orders"))
    assert finding.level == "error"
    assert "set AWS_DEFAULT_REGION" in finding.text


@pytest.mark.parametrize("endpoint", ["localhost:9324", "sqs://host", "http://"])
def test_an_endpoint_that_is_no_address_is_a_mistake(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="`sqs` is not an address"):
        connect("sqs", Settings(sqs=endpoint))


def test_the_clients_loggers_are_quiet(sqs: Server) -> None:
    SqsBroker(Settings(sqs=sqs.address))
    assert logging.getLogger("botocore").getEffectiveLevel() == logging.CRITICAL
    assert logging.getLogger("aiobotocore").getEffectiveLevel() == logging.CRITICAL


@pytest.mark.parametrize(("most", "level"), [("3", "warning"), ("15", "ok")])
async def test_check_compares_the_redrive_policy_with_the_attempts(sqs: Server, most: str, level: str) -> None:
    async with client_of(sqs.address) as client:
        made = await client.create_queue(QueueName=f"dead-{uuid4().hex}")
        asked = await client.get_queue_attributes(QueueUrl=made["QueueUrl"], AttributeNames=["QueueArn"])
    policy = {"deadLetterTargetArn": asked["Attributes"]["QueueArn"], "maxReceiveCount": most}
    name = await queue(sqs.address, RedrivePolicy=json.dumps(policy))
    found = [each async for each in findings(shop(name), Settings(sqs=sqs.address))]
    (redrive,) = [each for each in found if "redrive policy" in each.text]
    assert redrive.level == level
    assert f"after {most} receives" in redrive.text


# ------------------------------------------------------------------------------------------------------- command line
def test_the_command_line_publishes_and_checks(sqs: Server, database: str, tmp_path: Any, monkeypatch: Any) -> None:
    name = asyncio.run(queue(sqs.address, ".fifo"))
    (tmp_path / "sqs_shop.py").write_text(
        "from idemconsumer import App, Tx\n"
        "app = App('shop')\n"
        f"@app.idempotent_handler('sqs:{name}', key='id')\n"
        "async def place(order: dict, tx: Tx) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("IDEMCONSUMER_SQS", sqs.address)
    prepare(database)
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)

    def said(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == code, result.output
        return result.output

    assert "give headers=" in said("publish", f"sqs:{name}", '{"id": 1}', code=2)
    assert "published 1" in said("publish", f"sqs:{name}", '{"id": 1}', "--header", "MessageGroupId=g")
    checked = said("check", "sqs_shop:app")
    assert f"has the FIFO queue '{name}'" in checked
    assert "visibility timeout" in checked
