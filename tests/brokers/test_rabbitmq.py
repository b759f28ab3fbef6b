"""The RabbitMQ adapter against a real node: sessions that end, acks, publishes, limits, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import aiormq.channel
import pytest
from aio_pika.abc import AbstractChannel
from pamqp import decode, encode
from pamqp.commands import Basic

from idemconsumer.brokers.rabbitmq.arrivals import Arrival
from idemconsumer.brokers.rabbitmq.limits import limits
from idemconsumer.brokers.rabbitmq.rabbitmq_broker import RabbitmqBroker
from idemconsumer.brokers.rabbitmq.rabbitmq_session import ACKS_ON_THE_WAY, RabbitmqSession, delivery_of, nack_is_free
from idemconsumer.embedded.postgres import free_port
from idemconsumer.errors import BrokerUnavailable, ConfigurationError, SessionEnded
from idemconsumer.message.message import Subscription, Whole
from idemconsumer.ports.broker import Bounds, Epoch, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.testing.broker_contract import WIDE, arriving, bodies, until_idle
from tests.support.inside import not_fetched
from tests.support.pauses import Pauses
from tests.support.servers.made import PrivateRabbitMQ
from tests.support.servers.rabbitmq import RabbitMQ
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until


class Node:
    """The module's RabbitMQ, with what tests ask of it besides consuming."""

    def __init__(self, server: RabbitMQ, tls_port: int, certificates: Certificates) -> None:
        self.server = server
        self.certificates = certificates
        self.tls_address = f"amqps://guest:guest@127.0.0.1:{tls_port}/"
        self.settings = Settings(rabbitmq=server.address, rabbitmq_management=server.management)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[AbstractChannel]:
        async with await aio_pika.connect(self.server.address) as connection, connection.channel() as channel:
            yield channel

    async def queue(self, **arguments: Any) -> str:
        """A new durable queue, quorum unless `type` says otherwise; `x_y` is the argument `x-y`."""
        name = f"test-{uuid4().hex}"
        arguments.setdefault("type", "quorum")
        arguments["x_queue_type"] = arguments.pop("type")
        async with self.channel() as channel:
            named = {argument.replace("_", "-"): value for argument, value in arguments.items()}
            await channel.declare_queue(name, durable=True, arguments=named)
        return name

    async def exists(self, name: str) -> bool:
        async with self.channel() as channel:
            try:
                await channel.declare_queue(name, passive=True)
            except aiormq.ChannelNotFoundEntity:
                return False
            return True

    async def ctl(self, *arguments: str) -> str:
        return await asyncio.to_thread(self.server.ctl, *arguments)

    async def has(self, name: str, *, ready: int, unacked: int) -> bool:
        """Whether these are the broker's counts. Quorum queues are counted every five seconds, classic ones at once."""
        columns = ("name", "messages_ready", "messages_unacknowledged")
        rows = json.loads(await self.ctl("list_queues", "-q", "--formatter=json", *columns))
        (row,) = [row for row in rows if row["name"] == name]
        return bool((row["messages_ready"], row["messages_unacknowledged"]) == (ready, unacked))


@dataclass(frozen=True)
class Certificates:
    """An authority, and one certificate of it that serves both sides; PEM files."""

    authority: Path
    certificate: Path
    key: Path


def certificates(folder: Path) -> Certificates:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    extensions = ("subjectAltName=IP:127.0.0.1", "authorityKeyIdentifier=keyid", "basicConstraints=CA:FALSE")
    (folder / "leaf.ext").write_text("\n".join(extensions))
    new = ("req", "-newkey", "rsa:2048", "-nodes", "-keyout")
    openssl(
        *new, "ca.key", "-x509", "-days", "2", "-subj", "/CN=tests", "-out", "ca.pem",
        "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    openssl(*new, "leaf.key", "-subj", "/CN=leaf", "-out", "leaf.csr")
    openssl(
        "x509", "-req", "-in", "leaf.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
        "-days", "2", "-extfile", "leaf.ext", "-out", "leaf.pem",
    )  # fmt: skip
    return Certificates(folder / "ca.pem", folder / "leaf.pem", folder / "leaf.key")


@pytest.fixture(scope="module")
def node(private_rabbitmq: PrivateRabbitMQ, tmp_path_factory: pytest.TempPathFactory) -> Node:
    made, port = certificates(tmp_path_factory.mktemp("tls")), free_port()
    server = private_rabbitmq(
        config={
            "listeners.ssl.1": f"127.0.0.1:{port}",
            "ssl_options.cacertfile": str(made.authority),
            "ssl_options.certfile": str(made.certificate),
            "ssl_options.keyfile": str(made.key),
            "ssl_options.verify": "verify_peer",
            "ssl_options.fail_if_no_peer_cert": "true",
        }
    )
    return Node(server, port, made)


@pytest.fixture
async def broker(node: Node) -> AsyncIterator[RabbitmqBroker]:
    broker = RabbitmqBroker(node.settings)
    yield broker
    await broker.close()


def subscribed(name: str) -> Subscription:
    return Subscription(f"rabbitmq:{name}", "handler", "group")


@contextlib.asynccontextmanager
async def consuming(broker: RabbitmqBroker, name: str, bounds: Bounds = WIDE) -> AsyncIterator[RabbitmqSession]:
    session = await broker.open([subscribed(name)], bounds)
    try:
        yield session
    finally:
        await session.close()


async def remaining(broker: RabbitmqBroker, name: str) -> list[bytes]:
    async with consuming(broker, name, Bounds(lanes=1, group=1)) as session:
        return sorted(bodies(await until_idle(session)))


async def ended(session: RabbitmqSession, within: float = 10.0) -> str:
    """Fetch until the session ends; returns what it says."""
    async with asyncio.timeout(within):
        while True:
            try:
                await session.fetch()
            except SessionEnded as error:
                return str(error)


async def opening(broker: RabbitmqBroker, name: str) -> None:
    """Try until a session opens, as a worker does: a queue may be up later than its node."""
    deadline = time.monotonic() + 90
    while True:
        try:
            async with consuming(broker, name):
                return
        except BrokerUnavailable as error:
            if time.monotonic() > deadline:
                pytest.fail(str(error))
            await asyncio.sleep(0.1)


def numbered(count: int) -> list[Outgoing]:
    return [Outgoing(b"%04d" % number, key=str(number)) for number in range(count)]


# ------------------------------------------------------------------------------------------------- acknowledgements
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_whether_a_loss_counts_is_seen_by_what_comes_again(
    node: Node, broker: RabbitmqBroker, queue_type: str
) -> None:
    name = await node.queue(type=queue_type)
    await broker.publish(name, numbered(1))
    for comes_again in (False, True):
        async with consuming(broker, name) as session:
            await arriving(session, 1)
            assert session.losses_count == (comes_again and queue_type == "quorum")


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_only_what_was_settled_is_acked(node: Node, broker: RabbitmqBroker, queue_type: str) -> None:
    name = await node.queue(type=queue_type)
    await broker.publish(name, numbered(6))
    async with consuming(broker, name) as session:
        one, two, three, four, five, _six = await arriving(session, 6)
        await session.settle([two, five])
        await session.settle([four])
        await session.settle([one])
        await until_idle(session)  # the channel lives: no ack named a tag that was not outstanding
        await until(lambda: node.has(name, ready=0, unacked=2))
        assert bodies([three]) == [b"0002"]
    assert await remaining(broker, name) == [b"0002", b"0005"]


async def test_of_a_body_above_the_limit_only_the_beginning_is_held(node: Node, broker: RabbitmqBroker) -> None:
    name, large = await node.queue(), b"x" * 300_000  # of three frames
    await broker.publish(name, [Outgoing(large), Outgoing(large[:200_000])])
    bounds = Bounds(lanes=1, group=8, max_message_bytes=200_000)
    async with consuming(broker, name, bounds) as session:
        arrived = await arriving(session, 2)
        assert bodies(arrived) == [large[:200_000]] * 2
        assert bounds.memory.held < 401_000
        await session.settle(arrived)
    assert [each.message.whole for each in arrived] == [Whole(300_000, sha256(large).digest()), None]
    assert await remaining(broker, name) == []


async def test_acks_of_many_lanes_never_overtake_each_other(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue()
    await broker.publish(name, numbered(1_000))
    async with consuming(broker, name, Bounds(lanes=8, group=32, room=1_000)) as session:
        deliveries = await arriving(session, 1_000)
        random.Random(7).shuffle(deliveries)
        groups = [deliveries[start : start + 3] for start in range(0, 999, 3)]
        await asyncio.gather(*(session.settle(group) for group in groups))
        await until_idle(session)
        assert await session.idle()
    assert await remaining(broker, name) == bodies(deliveries[999:])


async def test_tags_of_a_former_session_ack_nothing_in_the_next(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue()
    await broker.publish(name, numbered(2))
    async with consuming(broker, name) as former:
        old = await arriving(former, 2)
    async with consuming(broker, name) as session:
        await arriving(session, 2)
        await session.settle(old)
        await former.settle(old)
        await until_idle(session)
    assert len(await remaining(broker, name)) == 2


async def test_single_acks_reach_a_quorum_queue_before_the_channel_closes(node: Node, broker: RabbitmqBroker) -> None:
    for _ in range(3):
        name = await node.queue()
        await broker.publish(name, numbered(1_000))
        async with consuming(broker, name, Bounds(lanes=8, group=32)) as session:
            held, *finished = await arriving(session, 1_000)
            await session.settle(finished)
        assert await remaining(broker, name) == bodies([held])


@pytest.mark.parametrize(("acks", "asked"), [(ACKS_ON_THE_WAY, False), (ACKS_ON_THE_WAY + 1, True)])
async def test_a_channel_that_holds_acks_back_is_asked_before_it_closes(
    node: Node, broker: RabbitmqBroker, monkeypatch: pytest.MonkeyPatch, acks: int, asked: bool
) -> None:
    """Whether any would be lost depends on how fast the broker is just then."""
    declare, requests = aiormq.channel.Channel.queue_declare, list[str]()

    async def counted(channel: aiormq.channel.Channel, queue: str = "", **given: Any) -> object:
        requests.append(queue)
        return await declare(channel, queue, **given)

    name = await node.queue()
    await broker.publish(name, numbered(acks + 1))
    async with consuming(broker, name) as session:
        _, *finished = await arriving(session, acks + 1)
        await session.settle(finished)
        monkeypatch.setattr(aiormq.channel.Channel, "queue_declare", counted)
    assert bool(requests) is asked


# ------------------------------------------------------------------------------------------------- counts and limits
async def test_nothing_is_ever_nacked_so_holding_costs_no_delivery(
    node: Node, broker: RabbitmqBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a nack counts against the delivery limit")

    for method in ("basic_nack", "basic_reject", "basic_recover"):
        monkeypatch.setattr(aiormq.channel.Channel, method, forbidden)
    name = await node.queue(x_delivery_limit=2)
    await broker.publish(name, numbered(2))
    async with consuming(broker, name) as session:
        held, released = await arriving(session, 2)
        assert (held.suspect, held.count) == (False, 1)
        await broker.publish(name, numbered(50))
        await session.settle(await arriving(session, 50))
        await session.release([released])
        assert not await until_idle(session)
    async with consuming(broker, name) as session:
        for delivery in await arriving(session, 2):
            assert (delivery.suspect, delivery.count) == (True, 2)
        await session.settle([held, released])
    async with consuming(broker, name) as session:
        assert [delivery.count for delivery in await arriving(session, 2)] == [3, 3]


async def test_a_classic_queue_says_only_that_it_was_delivered_before(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue(type="classic")
    await broker.publish(name, numbered(1))
    for expected in ((False, 1), (True, 2), (True, 2)):
        async with consuming(broker, name) as session:
            (delivery,) = await arriving(session, 1)
            assert (delivery.suspect, delivery.count) == expected


def test_a_count_from_another_queue_is_not_believed_on_a_first_delivery() -> None:
    first = Arrival("c", 1, False, "", "q", {"headers": {"x-delivery-count": 17}})
    delivery = delivery_of(first, "q", Epoch())
    assert (delivery.suspect, delivery.count) == (True, 1)


@pytest.mark.parametrize(("returned", "take_over"), [(14, False), (15, True)])
def test_what_was_delivered_too_often_is_to_be_taken_over(returned: int, take_over: bool) -> None:
    again = Arrival("c", 1, True, "", "q", {"headers": {"x-delivery-count": returned}})
    delivery = delivery_of(again, "q", Epoch())
    assert (delivery.count, delivery.take_over) == (returned + 1, take_over)


async def test_a_prefetch_beyond_what_amqp_can_carry_is_cut(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue()
    async with consuming(broker, name, Bounds(lanes=64, group=128, room=100_000)) as session:
        await broker.publish(name, numbered(1))
        assert len(await arriving(session, 1)) == 1


async def test_headers_of_every_amqp_type_arrive_as_text_or_bytes(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue()
    headers: Any = {"text": "ü", "number": 42, "yes": True, "table": {"a": [1, "b"]}, "raw": bytearray(b"\xff\x00")}
    headers["nothing"] = None
    async with node.channel() as channel:
        message = aio_pika.Message(b"{}", headers=headers, content_type="application/json")
        await channel.default_exchange.publish(message, name)
    async with consuming(broker, name) as session:
        (delivery,) = await arriving(session, 1)
    assert delivery.message.headers == {
        "text": "ü", "number": "42", "yes": "true", "table": '{"a":[1,"b"]}', "raw": b"\xff\x00",
    }  # fmt: skip
    assert delivery.message.position == f"{name}#{delivery.message.message_id}"


# ------------------------------------------------------------------------------------------------- unreadable values
class RawProperties(Basic.Properties):
    """One property as given, byte by byte: the client itself would not write it."""

    def __init__(self, name: str, encoded: bytes) -> None:
        super().__init__(message_id="so that the client adds none")
        self._raw = struct.pack(">H", self.flags[name]) + encoded

    def marshal(self) -> bytes:
        return self._raw


class RawText(str):
    def encode(self, *_: object, **__: object) -> bytes:
        return NOT_UTF8


NOT_UTF8 = b"r\xe9f"
MICROSECONDS = struct.pack(">Q", 1_763_700_000 * 10**6)


def entry(name: bytes, kind: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + kind + value


def sized(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def nested(depth: int, kind: bytes) -> bytes:
    content = b""
    for _ in range(depth):
        content = (b"\x01n" if kind == b"F" else b"") + kind + sized(content)
    return content


UNREADABLE = {
    "microseconds": ("timestamp", MICROSECONDS),
    "the last timestamp": ("timestamp", b"\xff" * 8),
    "message id": ("message_id", bytes([len(NOT_UTF8)]) + NOT_UTF8),
    "header name": ("headers", sized(entry(NOT_UTF8, b"S", sized(b"value")) + entry(b"z", b"I", bytes(4)))),
    "header value": ("headers", sized(entry(b"at", b"T", MICROSECONDS))),
    "inside of headers": (
        "headers",
        sized(entry(b"list", b"A", sized(b"T" + MICROSECONDS + b"F" + sized(entry(NOT_UTF8, b"t", b"\1"))))),
    ),
    "nested tables": ("headers", sized(nested(5_000, b"F"))),
    "nested lists": ("headers", sized(entry(b"list", b"A", sized(nested(5_000, b"A"))))),
}


async def test_an_unreadable_value_costs_neither_its_message_nor_the_others(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue(x_delivery_limit=20)
    async with node.channel() as channel:
        await channel.declare_exchange(name, "fanout", durable=False)
        wire = await channel.get_underlay_channel()
        await wire.queue_bind(name, name)
        for what, (property_name, encoded) in UNREADABLE.items():
            await wire.basic_publish(what.encode(), routing_key=name, properties=RawProperties(property_name, encoded))
            await wire.basic_publish(b"good", routing_key=name)
        await wire.basic_publish(b"routing key", exchange=name, routing_key=RawText("any"))
        await wire.basic_publish(b"good", routing_key=name)
        await wire.exchange_delete(name)
    expected = [body for what in [*UNREADABLE, "routing key"] for body in (what.encode(), b"good")]
    for count in (1, 2, 3):  # the broker's own header is read beside those that are not
        async with consuming(broker, name) as session:
            deliveries = await arriving(session, len(expected))
            assert sorted(bodies(deliveries)) == sorted(expected)
            assert {delivery.count for delivery in deliveries} == {count}
            assert not await until_idle(session)
            if count == 3:
                await session.settle(deliveries)
    assert await remaining(broker, name) == []
    read = {delivery.message.body.decode(): delivery.message for delivery in deliveries}
    assert read["message id"].message_id == "réf"
    headers = {what: {k: v for k, v in read[what].headers.items() if k != "x-delivery-count"} for what in UNREADABLE}
    assert headers["header name"] == {"réf": "value", "z": "0"}
    assert headers["header value"] == {}, "a time that no date holds is none (R41)"
    assert headers["inside of headers"] == {"list": '[null,{"réf":true}]'}


def test_what_the_client_could_read_it_reads_as_before_and_what_is_cut_short_is_refused() -> None:
    table: Any = {"": "ü", "n": -1, "none": None, "yes": True, "in": {"a": [1, {"b": "c"}, []], "e": {}}, "f": 0.5}
    encoded = encode.field_table(table)
    assert decode.by_type(encoded + b"next", "table") == decode.field_table(encoded) == (len(encoded), table)
    for kind, whole in (("table", encoded), ("table", sized(b"\x05name")), ("timestamp", MICROSECONDS)):
        for cut in (whole[:-1], whole[:3], b""):
            with pytest.raises(ValueError):
                decode.by_type(cut, kind)


# ------------------------------------------------------------------------------------------------- sessions that end
async def test_a_deleted_queue_ends_the_session(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue()
    await broker.publish(name, numbered(1))
    async with consuming(broker, name) as session:
        (delivery,) = await arriving(session, 1)
        async with node.channel() as channel:
            await channel.queue_delete(name)
        assert "was the queue deleted?" in await ended(session)
        assert delivery.epoch.ended
        await session.settle([delivery])
        assert not await session.idle()
    with pytest.raises(BrokerUnavailable, match=rf"has no queue '{name}'.*create it"):
        await broker.open([subscribed(name)], WIDE)


async def test_a_closed_connection_ends_the_session_and_the_next_one_works(
    node: Node, broker: RabbitmqBroker, caplog: pytest.LogCaptureFixture
) -> None:
    name = await node.queue()
    await broker.publish(name, numbered(3))
    async with consuming(broker, name) as session:
        first, *held = await arriving(session, 3)
        await session.settle([first])
        await node.ctl("close_all_connections", "the test wants it")
        assert "the test wants it" in await ended(session)
        await session.settle(held)
        await session.stop_fetching()
    async with consuming(broker, name) as session:
        again = await arriving(session, 2)
        assert bodies(again) == [b"0001", b"0002"]
        assert all(delivery.suspect for delivery in again)
        await session.settle(again)
    await broker.publish(name, numbered(1))  # its connection was closed as well
    assert await remaining(broker, name) == [b"0000"]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.kill
async def test_a_killed_broker_ends_the_session_and_loses_nothing(node: Node, broker: RabbitmqBroker) -> None:
    names = [await node.queue(), await node.queue(type="classic")]
    for name in names:
        await broker.publish(name, numbered(20))
    async with consuming(broker, names[0]) as session:
        held = await arriving(session, 20)
        await asyncio.to_thread(node.server.wait_until_saved, *names)
        node.server.kill()
        assert node.server.has_saved(*names)
        assert "connection lost" in await ended(session)
        await session.settle(held)
        with pytest.raises(BrokerUnavailable, match="cannot connect"):
            await broker.open([subscribed(names[0])], WIDE)
        with pytest.raises(BrokerUnavailable):
            await broker.publish(names[0], numbered(1))
        (finding,) = await broker.check(subscribed(names[0]))
        assert (finding.level, "cannot connect" in finding.text) == ("error", True)
    await asyncio.to_thread(node.server.start)
    await opening(broker, names[0])
    if not await node.exists(names[1]) and (await node.ctl("version")).startswith("3.10."):
        # Before 3.11 a restart under load may lose a durable classic queue: rabbitmq/rabbitmq-server#4563.
        del names[1]
    for name in names:
        async with consuming(broker, name) as session:
            await session.settle(await arriving(session, 20))
        await broker.publish(name, numbered(1))


async def test_a_connection_with_nothing_but_deliveries_lives_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ sends no heartbeats meanwhile, and the client gives up: here after 2 s."""
    monkeypatch.setattr(aiormq.Connection, "HEARTBEAT_GRACE_MULTIPLIER", 1)
    broker = RabbitmqBroker(Settings(rabbitmq=f"{node.server.address}?heartbeat=1"))
    name = await node.queue(type="classic")

    async def lives_on() -> bool:
        await broker.publish(name, numbered(400))
        with contextlib.suppress(SessionEnded):
            async with consuming(broker, name, Bounds(lanes=1, group=1, room=1)) as session:
                end = time.monotonic() + 4.0
                while time.monotonic() < end:
                    await session.settle(await session.fetch())
                    await asyncio.sleep(0.02)
                await session.fetch()
                assert not await session.idle()
                return True
        return False

    with Pauses() as pauses:
        while not await lives_on():
            assert pauses.seconds > 0.5, "it was given up, and the machine did not stand still"
            pauses.seconds = 0.0
    await broker.close()


async def test_a_connection_that_falls_silent_ends_the_session(node: Node) -> None:
    """No FIN, no RST: only the missing heartbeats tell."""
    silent = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if not silent.is_set():
                    writer.write(data)

    pumps: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", node.server.port)
        pumps.append(asyncio.create_task(pump(reader, far_writer)))
        pumps.append(asyncio.create_task(pump(far_reader, writer)))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    broker = RabbitmqBroker(Settings(rabbitmq=f"amqp://guest:guest@127.0.0.1:{port}/?heartbeat=1"))
    name = await node.queue()
    try:
        await broker.publish(name, numbered(1))
        async with consuming(broker, name) as session:
            held = await arriving(session, 1)
            assert session.silence is None
            silent.set()
            await session.settle(held)
            await until(lambda: session.silence is not None)
            assert not held[0].epoch.ended, "before it is given up"
            await ended(session, within=15.0)
    finally:
        await broker.close()
        proxy.close()
        for task in pumps:
            task.cancel()


async def test_a_drained_session_leaves_nothing_unacked(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue(type="classic")
    await broker.publish(name, numbered(300))
    async with consuming(broker, name, Bounds(lanes=4, group=32, room=72)) as session:
        running = (await arriving(session, 100))[:100]
        await session.stop_fetching()
        assert not await session.fetch()
        await session.settle(running)
    assert await node.has(name, ready=200, unacked=0)
    assert len(await remaining(broker, name)) == 200


async def test_a_draining_session_leaves_new_messages_to_others(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue()
    async with consuming(broker, name) as draining:
        await draining.stop_fetching()
        async with consuming(broker, name) as other:
            await broker.publish(name, numbered(10))
            assert len(await arriving(other, 10)) == 10


@pytest.mark.parametrize(("version", "handed_over"), [("4.2.6", 2), ("4.3.0", 0)])
async def test_what_arrives_until_the_broker_knows_of_a_drain_is_handed_over_where_a_return_counts(
    node: Node, broker: RabbitmqBroker, version: str, handed_over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = lambda server: nack_is_free({**server, "version": version})  # noqa: E731
    monkeypatch.setattr("idemconsumer.brokers.rabbitmq.rabbitmq_session.nack_is_free", says)
    name = await node.queue()
    async with consuming(broker, name) as session:
        await until(lambda: session._consumers._consumers)
        await broker.publish(name, numbered(1))
        await until(lambda: not_fetched(session))  # and nobody has fetched it
        real = session._consumers.cancel

        async def cancel() -> None:
            await broker.publish(name, numbered(2)[1:])
            await until(lambda: not_fetched(session) == handed_over)
            await real()

        monkeypatch.setattr(session._consumers, "cancel", cancel)
        late = await session.stop_fetching()
        assert bodies(late) == [message.body for message in numbered(handed_over)]
        await session.settle(late)
        assert not await session.fetch()
    assert len(await remaining(broker, name)) == 2 - handed_over


async def test_closing_is_bounded_when_the_broker_does_not_answer(
    node: Node, broker: RabbitmqBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await node.queue()
    session = await broker.open([subscribed(name)], WIDE)
    tuned(monkeypatch, rabbitmq_farewell=0.2)

    async def silent(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(session._channel, "close", silent)
        async with asyncio.timeout(PATIENCE):
            await session.close()
    with pytest.raises(SessionEnded, match="closed"):
        await session.fetch()


# ------------------------------------------------------------------------------------------------------ publishing
async def alarmed(node: Node) -> bool:
    """The alarm is raised a moment after the command has returned."""
    return "memory" in await node.ctl("eval", "rabbit_alarm:get_alarms().")


async def test_consuming_goes_on_while_publishers_are_blocked(
    node: Node, broker: RabbitmqBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, rabbitmq_confirm_patience=600.0)  # the node takes seconds to be told, and more on a busy machine
    name, target = await node.queue(), await node.queue()
    await broker.publish(name, numbered(20))
    async with consuming(broker, name) as session:
        try:
            await node.ctl("set_vm_memory_high_watermark", "0")
            await until(lambda: alarmed(node))
            publishing = asyncio.create_task(broker.publish(target, numbered(1)))
            await session.settle(await arriving(session, 20))
            await until_idle(session)

            await until(lambda: node.has(name, ready=0, unacked=0))
            assert not publishing.done()
        finally:
            await node.ctl("set_vm_memory_high_watermark", "0.4")
        await publishing
    assert await remaining(broker, target) == [b"0000"]


async def test_an_unconfirmed_publish_says_that_there_may_be_an_alarm(
    node: Node, broker: RabbitmqBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await node.queue()
    await broker.publish(name, numbered(1))
    try:
        await node.ctl("set_vm_memory_high_watermark", "0")
        await until(lambda: alarmed(node))
        with monkeypatch.context() as brief:
            tuned(brief, rabbitmq_confirm_patience=1.0)
            with pytest.raises(BrokerUnavailable, match=f"{name}.*alarm"):
                await broker.publish(name, numbered(1))
    finally:
        await node.ctl("set_vm_memory_high_watermark", "0.4")
    await broker.publish(name, numbered(1))


async def test_a_publish_that_a_queue_refuses_is_an_error(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue(type="classic", x_max_length=1, x_overflow="reject-publish")
    with pytest.raises(BrokerUnavailable, match=name):
        await broker.publish(name, numbered(3))


async def test_one_id_to_two_queues_at_once_never_hides_a_missing_queue(node: Node, broker: RabbitmqBroker) -> None:
    """The client finds a returned message by its id alone: it would fail the other publish, and confirm this one."""
    name = await node.queue()
    same = [Outgoing(b"x", key="same")]
    for _ in range(5):
        for queues in ((name, "nobody-made-this"), ("nobody-made-this", name)):
            sent = (broker.publish(queue, same) for queue in queues)
            answers = dict(zip(queues, await asyncio.gather(*sent, return_exceptions=True), strict=True))
            assert answers[name] is None
            assert isinstance(answers["nobody-made-this"], BrokerUnavailable)


async def test_messages_are_published_in_order(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue()
    await broker.publish(name, numbered(200))
    async with consuming(broker, name, Bounds(lanes=8, group=32)) as session:
        assert bodies(await arriving(session, 200)) == [message.body for message in numbered(200)]


# --------------------------------------------------------------------------------------------------- check, settings
async def test_check_fails_on_a_delivery_limit_without_a_dead_letter_exchange(
    node: Node, broker: RabbitmqBroker
) -> None:
    name = await node.queue(x_delivery_limit=20)
    errors = [found.text for found in await broker.check(subscribed(name)) if found.level == "error"]
    assert len(errors) == 1
    assert "delivery limit 20 and no dead-letter exchange" in errors[0]
    assert "rabbitmqctl set_policy" in errors[0]
    await node.ctl("set_policy", f"keep-{name}", f"^{name}$", '{"dead-letter-exchange":"dlx"}')

    async def content() -> bool:  # a policy takes a moment to be applied
        return all(found.level == "ok" for found in await broker.check(subscribed(name)))

    await until(content)


async def test_check_is_content_with_dead_letters_that_go_to_the_default_exchange(
    node: Node, broker: RabbitmqBroker
) -> None:
    aside = await node.queue()
    name = await node.queue(x_delivery_limit=20, x_dead_letter_exchange="", x_dead_letter_routing_key=aside)
    reachable, limit = await broker.check(subscribed(name))
    assert (reachable.level, limit.level) == ("ok", "ok")
    assert "go to the default exchange" in limit.text


@pytest.mark.parametrize("arguments", [{}, {"x_max_age": "1h"}])
async def test_a_stream_is_refused(node: Node, broker: RabbitmqBroker, arguments: dict[str, str]) -> None:
    name = await node.queue(type="stream", **arguments)
    with pytest.raises(ConfigurationError, match=r"is a stream.*use a quorum queue"):
        await broker.open([subscribed(name)], WIDE)
    without = RabbitmqBroker(Settings(rabbitmq=node.server.address))
    (found,) = await without.check(subscribed(name))
    assert (found.level, "is a stream" in found.text) == ("error", True)


async def test_a_queue_that_was_made_anew_as_a_stream_is_refused_too(node: Node, broker: RabbitmqBroker) -> None:
    name = await node.queue()
    async with consuming(broker, name) as session:
        async with node.channel() as channel:
            await channel.queue_delete(name)
            await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "stream"})
        await ended(session)
    with pytest.raises(ConfigurationError, match="is a stream"):
        await broker.open([subscribed(name)], WIDE)


@pytest.mark.parametrize("arguments", [{}, {"type": "classic"}, {"type": "classic", "x_expires": 600_000}])
async def test_asking_for_a_stream_makes_nothing_and_refuses_no_queue(
    node: Node, broker: RabbitmqBroker, arguments: dict[str, Any]
) -> None:
    name = await node.queue(**arguments)
    async with consuming(broker, name, WIDE):
        pass
    with pytest.raises(BrokerUnavailable, match="has no queue"):
        await broker.open([subscribed(f"{name}-missing")], WIDE)
    assert f"{name}-missing" not in await node.ctl("list_queues", "-q", "name")


@pytest.mark.parametrize(
    ("server", "free"),
    [
        ({"product": "RabbitMQ", "version": "3.10.8"}, False),
        ({"product": "RabbitMQ", "version": "4.2.6"}, False),
        ({"product": "RabbitMQ", "version": "4.3.0"}, True),
        ({"product": b"RabbitMQ", "version": b"4.10.1"}, True),
        ({"product": "RabbitMQ", "version": "5.0-rc.1"}, True),
        ({"product": "LavinMQ", "version": "4.3.0"}, False),
        ({"product": "RabbitMQ", "version": "unknown"}, False),
        ({}, False),
    ],
)
def test_who_counts_a_nack(server: dict[str, object], free: bool) -> None:
    assert nack_is_free(server) is free


@pytest.mark.parametrize(("version", "nacks"), [("4.2.6", 0), ("4.3.0", 1)])
async def test_a_drain_gives_back_by_a_nack_only_where_that_costs_no_delivery(
    node: Node, broker: RabbitmqBroker, version: str, nacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = lambda server: nack_is_free({**server, "version": version})  # noqa: E731
    monkeypatch.setattr("idemconsumer.brokers.rabbitmq.rabbitmq_session.nack_is_free", says)
    name = await node.queue()
    await broker.publish(name, numbered(4))
    async with consuming(broker, name, WIDE) as session:
        taken = await arriving(session, 4)
        assert taken[0].epoch.returns_count == (nacks == 0)
        real, sent = session._wire.basic_nack, []

        async def nack(tag: int, **how: Any) -> None:
            sent.append((tag, how))
            await real(tag, **how)

        session._wire.basic_nack = nack  # type: ignore[method-assign,assignment]
        await session.stop_fetching()
        await session.settle(taken[:1])
        await session.release(taken[1:])
    assert len(sent) == nacks
    async with consuming(broker, name, WIDE) as session:
        assert sorted(bodies(await arriving(session, 3))) == [message.body for message in numbered(4)[1:]]


async def test_check_says_when_it_cannot_read_limits(node: Node) -> None:
    name = await node.queue()
    for management in (None, "http://guest:wrong@127.0.0.1:1", f"{node.server.management}/nowhere"):
        broker = RabbitmqBroker(Settings(rabbitmq=node.server.address, rabbitmq_management=management))
        reachable, unread = await broker.check(subscribed(name))
        assert (reachable.level, unread.level) == ("ok", "warning")
        assert name in unread.text


@pytest.mark.parametrize(
    ("queue", "version", "level", "text"),
    [
        ({"type": "quorum"}, "3.13.7", "ok", "no delivery limit"),
        ({"type": "quorum"}, "4.1.0", "error", "limit 20 (the default of RabbitMQ 4)"),
        ({"type": "quorum", "arguments": {"x-delivery-limit": -1}}, "4.1.0", "ok", "no delivery limit"),
        ({"type": "quorum", "arguments": {"x-dead-letter-exchange": "dlx"}}, "4.1.0", "ok", "go to 'dlx'"),
        ({"type": "quorum", "arguments": {"x-dead-letter-exchange": ""}}, "4.1.0", "ok", "go to the default exch"),
        (
            {"type": "quorum", "effective_policy_definition": {"dead-letter-exchange": ""}},
            "4.1.0",
            "ok",
            "go to the default exchange",
        ),
        (
            {
                "type": "quorum",
                "arguments": {"x-delivery-limit": 30},
                "effective_policy_definition": {"delivery-limit": 5, "dead-letter-exchange": "dlx"},
            },
            "4.1.0",
            "warning",
            "limit 5, below 15",
        ),
        ({"type": "classic", "effective_policy_definition": []}, "3.10.8", "ok", "no limit"),
        ({"type": "classic", "arguments": {"x-message-ttl": 5}}, "3.10.8", "warning", "message TTL"),
        ({"type": "classic", "arguments": {"x-max-length": 5}}, "3.10.8", "warning", "drop-head"),
        (
            {"type": "classic", "arguments": {"x-max-length": 5, "x-overflow": "reject-publish"}},
            "3.10.8",
            "ok",
            "no limit",
        ),
        ({"type": "classic", "durable": False}, "3.10.8", "warning", "not durable"),
        ({"type": "stream"}, "3.10.8", "error", "stream"),
    ],
)
def test_limits_that_lose_messages_are_found(queue: dict[str, Any], version: str, level: str, text: str) -> None:
    (found,) = limits("rabbitmq:orders", {"name": "orders", **queue}, version)
    assert found.level == level
    assert text in found.text


async def test_tls_with_a_client_certificate(node: Node) -> None:
    name, made = await node.queue(), node.certificates
    named = f"cafile={made.authority}&certfile={made.certificate}&keyfile={made.key}"
    broker = RabbitmqBroker(Settings(rabbitmq=f"{node.tls_address}?{named}"))
    try:
        await broker.publish(name, numbered(1))
        async with consuming(broker, name) as session:
            await session.settle(await arriving(session, 1))
    finally:
        await broker.close()


async def test_tls_with_a_server_that_is_trusted_whoever_it_is(node: Node) -> None:
    made = node.certificates
    named = f"no_verify_ssl=1&certfile={made.certificate}&keyfile={made.key}"
    broker = RabbitmqBroker(Settings(rabbitmq=f"{node.tls_address}?{named}"))
    async with consuming(broker, await node.queue()):
        pass
    await broker.close()


async def test_tls_refuses_a_server_that_nobody_vouches_for(node: Node) -> None:
    with pytest.raises(BrokerUnavailable, match=r"certificate of .* is not accepted"):
        await RabbitmqBroker(Settings(rabbitmq=node.tls_address)).open([subscribed("any")], WIDE)


async def test_tls_without_the_client_certificate_is_refused_by_the_server(node: Node) -> None:
    settings = Settings(rabbitmq=f"{node.tls_address}?cafile={node.certificates.authority}")
    with pytest.raises(BrokerUnavailable):
        await RabbitmqBroker(settings).open([subscribed("any")], WIDE)


async def test_a_wrong_password_is_unavailable_and_the_password_is_not_said(node: Node) -> None:
    address = node.server.address.replace("guest:guest", "guest:hunter2")
    with pytest.raises(BrokerUnavailable, match="cannot connect") as caught:
        await RabbitmqBroker(Settings(rabbitmq=address)).open([subscribed("any")], WIDE)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Settings(), "IDEMCONSUMER_RABBITMQ=amqp://"),
        (Settings(rabbitmq="amqps://h/?cafile=/no/such.pem"), "/no/such.pem"),
        (Settings(rabbitmq="amqps://h/?certfile=/no/such.pem"), "/no/such.pem"),
        (Settings(rabbitmq="amqps://h/?keyfile=/no/such.pem"), "a key needs its certificate; .*/no/such.pem"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings: Settings, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        RabbitmqBroker(settings)


# ------------------------------------------------------------------------------------------------------------ prefetch
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_the_single_active_consumer_is_not_cancelled_for_another_prefetch(
    node: Node, broker: RabbitmqBroker, queue_type: str
) -> None:
    name = await node.queue(type=queue_type, x_single_active_consumer=True)
    await broker.publish(name, numbered(60))
    share = 4
    growing = Bounds(lanes=4, group=8, share=lambda source: share)
    async with consuming(broker, name, growing) as active:
        held = await arriving(active, 4)
        async with consuming(broker, name, growing) as standby:
            share = 16
            for _ in range(3):  # it asks for more, and must not lose its place in front of the other one for that
                await active.settle(held[:1])
                held = held[1:] + await arriving(active, 1)
            assert not await standby.fetch()
            assert bodies(held) == [b"0003", b"0004", b"0005", b"0006"]
