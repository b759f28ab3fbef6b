"""Connecting to RabbitMQ: for each way in which it fails an error that names the cause."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

from idemconsumer import Tx, idempotent_handler
from idemconsumer.brokers.adapters import destination
from idemconsumer.brokers.rabbitmq.rabbitmq_broker import RabbitmqBroker
from idemconsumer.brokers.rabbitmq.rabbitmq_session import RabbitmqSession
from idemconsumer.embedded.postgres import free_port
from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from idemconsumer.testing.broker_contract import WIDE, arriving, bodies
from tests.support.servers.made import PrivateRabbitMQ, Server
from tests.support.servers.tls import Certificate, authority, issue, self_signed

ORDERS = Subscription("rabbitmq:orders", "handler", "group")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def ports(private_rabbitmq: PrivateRabbitMQ, certificate: Certificate) -> tuple[int, int]:
    """Of one node: without TLS, and with it."""
    port = free_port()
    server = private_rabbitmq(
        config={
            "listeners.ssl.1": f"127.0.0.1:{port}",
            "ssl_options.certfile": str(certificate.certificate),
            "ssl_options.keyfile": str(certificate.key),
            "ssl_options.cacertfile": str(authority(certificate.key.parent)),
            "ssl_options.verify": "verify_peer",
            "ssl_options.fail_if_no_peer_cert": "false",
        }
    )
    return server.port, port


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        (
            "amqp://guest:s3cret@127.0.0.1:{plain}/",
            r"wrong user or password in IDEMCONSUMER_RABBITMQ; the user guest may",
        ),
        ("amqp://u:s3cret@127.0.0.1:{plain}/", r"wrong user or password in IDEMCONSUMER_RABBITMQ$"),
        ("amqp://guest:guest@127.0.0.1:{plain}/nowhere", r"the vhost 'nowhere' is refused: it does not exist, or"),
        ("amqps://guest:s3cret@127.0.0.1:{plain}/", r"it speaks no TLS on that port; write amqp://"),
        ("amqp://guest:s3cret@127.0.0.1:{tls}/", r"it speaks TLS on that port; write amqps://"),
        (
            "amqps://guest:s3cret@127.0.0.1:{tls}/",
            r"certificate of .* is not accepted: .*; set cafile in IDEM",
        ),
        ("amqp://guest:s3cret@127.0.0.1:1/", r"nothing listens at 127.0.0.1:1; start the server, or correct IDEM"),
        ("amqp://guest:s3cret@no.such.invalid/", r"the name of no.such.invalid:5672 cannot be resolved"),
    ],
)
async def test_the_cause_is_named_and_the_password_is_not(ports: tuple[int, int], address: str, cause: str) -> None:
    plain, tls = ports
    broker = RabbitmqBroker(Settings(rabbitmq=address.format(plain=plain, tls=tls)))
    with pytest.raises(BrokerUnavailable, match=cause) as opening:
        await broker.open([ORDERS], WIDE)
    with pytest.raises(BrokerUnavailable, match=cause):
        await broker.publish("orders", [Outgoing(b"x")])
    [*_, finding] = await broker.check(ORDERS)
    assert (finding.level, finding.text) == ("error", str(opening.value))
    assert "s3cret" not in finding.text


async def test_a_certificate_that_was_renewed_is_read_and_one_that_has_expired_is_ours(
    ports: tuple[int, int], certificate: Certificate
) -> None:
    """Q13"""
    folder = certificate.key.parent
    ours, key = issue(folder, "short", days=-1)
    files = f"cafile={certificate.certificate}&certfile={ours}&keyfile={key}"
    broker = RabbitmqBroker(Settings(rabbitmq=f"amqps://guest:guest@127.0.0.1:{ports[1]}/?{files}"))
    says = rf"it refuses the connection: our own certificate, {ours}, expired on 20.* UTC; renew that file"
    with pytest.raises(BrokerUnavailable, match=says):
        await broker.publish("orders", [Outgoing(b"x")])
    [*_, finding] = await broker.check(ORDERS)
    assert re.search(says, finding.text)
    issue(folder, "short")
    with pytest.raises(BrokerUnavailable, match="has no queue 'orders'"):
        await broker.open([ORDERS], WIDE)
    await broker.close()


async def test_a_server_of_another_kind_is_named(kafka: Server) -> None:
    broker = RabbitmqBroker(Settings(rabbitmq=f"amqp://u:s3cret@{kafka.address}/"))
    with pytest.raises(BrokerUnavailable, match=r"does not speak AMQP 0.9.1 on that port"):
        await broker.open([ORDERS], WIDE)


# ---------------------------------------------------------------------------------------------- hosts, names, exchanges
async def handle(order: dict[str, str], tx: Tx) -> None: ...


async def queue(server: Server, name: str, *bound: tuple[str, str]) -> None:
    """Declare it, and bind it to exchanges of the type `topic`, which are made too."""
    async with await aio_pika.connect(server.address) as connection, connection.channel() as channel:
        declared = await channel.declare_queue(name, durable=True)
        for exchange, key in bound:
            await declared.bind(await channel.declare_exchange(exchange, "topic", durable=True), key)


@contextlib.asynccontextmanager
async def consuming(server: Server, name: str, **settings: Any) -> AsyncIterator[RabbitmqSession]:
    broker = RabbitmqBroker(Settings(**{"rabbitmq": server.address, **settings}))
    session = await broker.open([Subscription(f"rabbitmq:{name}", "handler", "group")], WIDE)
    try:
        yield session
    finally:
        await session.close()
        await broker.close()


async def test_of_several_hosts_one_that_lives_is_used(rabbitmq: Server) -> None:
    name = f"hosts-{uuid4().hex}"
    await queue(rabbitmq, name)
    address = rabbitmq.address.replace("@", "@127.0.0.1:1,no.such.invalid,")
    for number in range(4):  # the order of the hosts is shuffled
        broker = RabbitmqBroker(Settings(rabbitmq=address))
        await broker.publish(name, [Outgoing(b"%d" % number)])
        await broker.close()
    async with consuming(rabbitmq, name, rabbitmq=address) as session:
        assert bodies(await arriving(session, 4)) == [b"0", b"1", b"2", b"3"]


async def test_when_no_host_lives_each_is_named() -> None:
    broker = RabbitmqBroker(Settings(rabbitmq="amqp://u:s3cret@127.0.0.1:1,127.0.0.1:2/v"))
    with pytest.raises(BrokerUnavailable, match="nothing listens") as caught:
        await broker.open([ORDERS], WIDE)
    assert all(text in str(caught.value) for text in ("RabbitMQ at 127.0.0.1:1: ", "RabbitMQ at 127.0.0.1:2: "))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [" a queue ", "~mine", "eu:orders/new?#", "größer→", 'it\'s "quoted"', "\N{NO-BREAK SPACE}\t", "é" * 111],
)
async def test_a_queue_may_have_any_name(rabbitmq: Server, name: str) -> None:
    name = f"{name}{uuid4().hex}"
    idempotent_handler(f"rabbitmq:{name}", key="id")(handle)
    await queue(rabbitmq, name)
    broker = RabbitmqBroker(Settings(rabbitmq=rabbitmq.address))
    scheme, to = destination(f"rabbitmq:/{name}")
    assert scheme == "rabbitmq"
    await broker.publish(to, [Outgoing(b"x")])
    await broker.close()
    async with consuming(rabbitmq, name) as session:
        assert bodies(await arriving(session, 1)) == [b"x"]


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", "a\ud800"])
def test_what_no_queue_can_be_called_is_refused_at_import(name: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 255 bytes"):
        idempotent_handler(f"rabbitmq:{name}", key="id")(handle)


async def test_publishing_goes_through_an_exchange_by_its_routing_key(rabbitmq: Server) -> None:
    name = f"routed-{uuid4().hex}"
    await queue(rabbitmq, name, (f"x-{name}", "orders.*"))
    broker = RabbitmqBroker(Settings(rabbitmq=rabbitmq.address))
    await broker.publish(f"x-{name}/orders.eu/new", [Outgoing(b"routed")])
    for lost in (f"x-{name}/other", f"no-{name}/orders.eu/new"):
        with pytest.raises(BrokerUnavailable, match=rf"routes .* to no queue; .* write rabbitmq:/{lost} for the queue"):
            await broker.publish(lost, [Outgoing(b"lost")])
    await broker.publish(name, [Outgoing(b"direct")])
    await broker.check_destination(f"x-{name}/orders.eu/new")
    with pytest.raises(BrokerUnavailable, match=f"'no-{name}' .* does not exist"):
        await broker.check_destination(f"no-{name}/orders.eu/new")
    await broker.close()
    async with consuming(rabbitmq, name) as session:
        assert bodies(await arriving(session, 2)) == [b"routed", b"direct"]
