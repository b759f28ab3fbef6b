"""The SQS adapter against ElasticMQ: sessions that end, FIFO order, limits, publish, check, and the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from aiobotocore.session import get_session
from aiohttp import web
from click.testing import CliRunner

from idemconsumer import App, Tx
from idemconsumer.brokers.adapters import connect
from idemconsumer.brokers.sqs.sqs_broker import SqsBroker
from idemconsumer.brokers.sqs.sqs_session import SqsSession
from idemconsumer.cli.inspect import findings
from idemconsumer.cli.main import main
from idemconsumer.errors import BadMessage, BrokerUnavailable, ConfigurationError, SessionEnded
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.testing.broker_contract import WIDE, arriving, bodies, until_idle
from tests.support.logs import times
from tests.support.servers.made import PrivateElasticMQ, Server
from tests.support.servers.proxy import Proxy
from tests.support.servers.sqs_double import SqsDouble
from tests.support.tuning import tuned
from tests.support.waiting import until
from tests.support.workers import Bench, Item, body, note, prepare


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
        async with client_of(
            server.address
        ) as client:  # a message of a poll whose answer is lost stays hidden for so long
            await client.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "10"})
        await broker.publish(name, [order("before"), order("after")])
        await running.until_count(applied=2, duplicate=1)
    await broker.close()
    assert times(logged, "broker session lost, reconnecting") == 1
    assert times(logged, "broker unavailable, waiting") <= 1
    assert sorted(bench.effects()) == ["after", "before"]


@pytest.mark.parametrize("fault", ["cut", "silent"])
async def test_an_endpoint_that_is_lost_ends_the_session_and_loses_nothing(
    sqs: Server, broker: SqsBroker, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    tuned(
        monkeypatch,
        sqs_read_patience=2.0,
        sqs_silent_after=0.5,
        sqs_calls=1,
        sqs_visibility=3,  # what is held then comes again soon
    )
    name = await queue(sqs.address, VisibilityTimeout="1")
    await broker.publish(name, [Outgoing(b"held")])
    async with Proxy(int(sqs.address.rpartition(":")[2])) as proxy:
        away = SqsBroker(Settings(sqs=f"http://127.0.0.1:{proxy.port}"))
        # ElasticMQ's own URLs name its own port; a queue that is named by its URL is asked there.
        at = f"http://127.0.0.1:{proxy.port}/000000000000/{name}"
        async with consuming(away, at) as session:
            held = await arriving(session, 1)
            assert session.silence is None
            proxy.freeze() if fault == "silent" else proxy.cut()
            if fault == "silent":
                await until(lambda: session.silence is not None)
                assert not held[0].epoch.ended, "before it is given up"
            with pytest.raises(SessionEnded, match=r"correct the queue's URL"):
                await arriving(session, 1)
            assert held[0].epoch.ended
            await session.settle(held)
        await away.close()
    async with consuming(broker, name) as session:
        assert bodies(await arriving(session, 1)) == [b"held"]


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
    with pytest.raises(BadMessage, match=r"oversized: 300000 bytes.* accepts 262144"):
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
@pytest.mark.parametrize(
    ("endpoint", "cause"),
    [
        ("http://127.0.0.1:1", "nothing listens at 127.0.0.1:1; start the server, or correct IDEMCONSUMER_SQS"),
        ("http://no-such-host.invalid:1", "the name of no-such-host.invalid:1 cannot be resolved; correct"),
    ],
)
async def test_an_endpoint_that_cannot_be_reached_is_named_with_the_cause(
    sqs: Server, endpoint: str, cause: str
) -> None:
    away = SqsBroker(Settings(sqs=endpoint))
    with pytest.raises(BrokerUnavailable, match=rf"queue 'orders' cannot be used: {re.escape(cause)}"):
        await away.open([subscribed("orders")], WIDE)
    (finding,) = await away.check(subscribed("orders"))
    assert (finding.level, cause in finding.text) == ("error", True)
    await away.close()


async def test_a_queue_whose_own_url_leads_nowhere_says_so(broker: SqsBroker) -> None:
    with pytest.raises(BrokerUnavailable, match=r"nothing listens at 127\.0\.0\.1:1; .* or correct the queue's URL"):
        await broker.open([subscribed("http://127.0.0.1:1/000000000000/orders")], WIDE)


async def test_an_endpoint_that_is_no_sqs_says_what_to_correct(sqs: Server, kafka: Server) -> None:
    other = SqsBroker(Settings(sqs=f"http://{kafka.address}"))
    with pytest.raises(BrokerUnavailable, match="see that SQS answers there, or correct IDEMCONSUMER_SQS"):
        await other.open([subscribed("orders")], WIDE)
    await other.close()


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


# ----------------------------------------------------------------------------------- other accounts, regions, endpoints
@pytest.mark.parametrize("form", ["arn:aws:sqs:eu-west-3:000000000000:{name}", "{address}/000000000000/{name}"])
async def test_a_queue_may_be_named_by_its_arn_or_its_url(bench: Bench, sqs: Server, form: str) -> None:
    name = await queue(sqs.address)
    given = form.format(name=name, address=sqs.address)
    app = shop(given)
    settings = bench.settings(sqs=None if given.startswith("http") else sqs.address)
    found = [finding async for finding in findings(app, settings) if finding.subject == f"sqs:{given}"]
    assert found
    assert {finding.level for finding in found} == {"ok"}
    broker = SqsBroker(settings)
    await broker.publish(given, [Outgoing(body(Item("1")))])
    await broker.close()
    await bench.until_empty(app, sqs=settings.sqs)
    assert bench.effects() == ["1"]


async def test_an_arn_asks_in_its_region_for_the_queue_of_its_account(sqs: Server) -> None:
    asked = []

    class Double(SqsDouble):
        async def _answer(self, request: web.Request) -> web.Response:
            region = request.headers["Authorization"].split("/")[2]
            asked.append((region, json.loads(await request.read())))
            return await super()._answer(request)

    async with Double().serving() as double:
        broker = SqsBroker(Settings(sqs=double.address))
        await broker.publish("arn:aws:sqs:ap-south-1:123456789012:orders", [Outgoing(b"x")])
        await broker.publish("orders", [Outgoing(b"x")])
        await broker.close()
    assert {region for region, _ in asked[:3]} == {"ap-south-1"}
    assert asked[0][1] == {"QueueName": "orders", "QueueOwnerAWSAccountId": "123456789012"}
    assert {region for region, _ in asked[3:]} == {"eu-west-1"}
    assert asked[3][1] == {"QueueName": "orders"}


async def test_a_queue_that_is_missing_elsewhere_is_named_with_its_place(sqs: Server) -> None:
    broker = SqsBroker(Settings(sqs=sqs.address))
    arn = f"arn:aws:sqs:eu-west-3:000000000000:none-{uuid4().hex}"
    with pytest.raises(BrokerUnavailable, match=r"in account 000000000000 and region eu-west-3; .* --region eu-west-3"):
        await broker.publish(arn, [Outgoing(b"x")])
    await broker.close()
