"""`settle="finished"`: the message stays with its broker until its saga has ended, whoever ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import aio_pika
import msgspec
import pytest

from idemconsumer import App, Retry, Saga, Tx
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.ports.broker import Delivery
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import State
from tests.sagas import deployed
from tests.sagas.deployed import Order
from tests.sagas.deployment import Deployment, prepare
from tests.support.points import Points
from tests.support.sagas import Bench
from tests.support.servers.made import PostgresServer, PrivateRabbitMQ
from tests.support.servers.postgres import fresh_database
from tests.support.servers.rabbitmq import RabbitMQ
from tests.support.waiting import until
from tests.support.workers import Bench as WorkerBench
from tests.support.workers import connected
from tests.support.workers import prepare as prepare_witness


# ---------------------------------------------------------------------------------------------------------- the brokers
class Source(Protocol):
    """A queue of a real broker."""

    name: str
    environment: dict[str, str]

    async def publish(self, body: bytes) -> None: ...

    async def counts(self) -> tuple[int, int]:
        """Messages that anybody may have, and messages that are with a consumer."""
        ...


class OnRabbitmq:
    def __init__(self, server: RabbitMQ, queue: str) -> None:
        self._server = server
        self._queue = queue
        self.name = f"rabbitmq:{queue}"
        self.environment = {"IDEMCONSUMER_RABBITMQ": server.address}

    async def publish(self, body: bytes) -> None:
        async with await aio_pika.connect(self._server.address) as connection, connection.channel() as channel:
            await channel.declare_queue(self._queue, durable=True)  # classic, since it is counted at once
            await channel.default_exchange.publish(aio_pika.Message(body), self._queue)

    async def counts(self) -> tuple[int, int]:
        columns = ("name", "messages_ready", "messages_unacknowledged")
        told = await asyncio.to_thread(self._server.ctl, "list_queues", "-q", "--formatter=json", *columns)
        (row,) = [row for row in json.loads(told) if row["name"] == self._queue]
        return row["messages_ready"], row["messages_unacknowledged"]


class OnPostgres:
    def __init__(self, bench: Bench | WorkerBench) -> None:
        self._run = bench.script if isinstance(bench, Bench) else bench.do
        self.name = f"postgres:{deployed.QUEUE}"
        self.environment: dict[str, str] = {}

    async def publish(self, body: bytes) -> None:
        self._run(f"select idemconsumer.publish('{deployed.QUEUE}', '{body.decode()}')")

    async def counts(self) -> tuple[int, int]:
        ((ready, held),) = self._run(
            "select count(*) filter (where visible_at <= clock_timestamp()),"
            " count(*) filter (where visible_at > clock_timestamp()) from idemconsumer.queue"
        )
        return ready, held


@pytest.fixture(scope="module")
def _deployment_database(postgres18: PostgresServer) -> Iterator[Bench]:
    with fresh_database(postgres18.dsn) as dsn, closing(Bench(dsn)) as bench:
        yield prepare(bench)


@pytest.fixture(scope="module")
def node(private_rabbitmq: PrivateRabbitMQ) -> RabbitMQ:
    """Of these tests alone, which ask it how many messages are with a consumer."""
    return private_rabbitmq()


@pytest.fixture(params=["postgres", "rabbitmq"])
def source(request: pytest.FixtureRequest, _deployment_database: Bench) -> Source:
    if request.param == "postgres":
        return OnPostgres(_deployment_database)
    return OnRabbitmq(request.getfixturevalue("node"), f"rides-{uuid4().hex}")


@pytest.fixture
def deployment(_deployment_database: Bench, source: Source, tmp_path: Path) -> Iterator[Deployment]:
    # A saga that hangs is to hang for as long as it takes to count, with a program that starts an Erlang of its own.
    options = {"SAGA_SETTLE": "finished", "SAGA_LEASE": "60", "SAGA_TIMEOUT": "300s"}
    environment = {"SAGA_SOURCE": source.name, **options, **source.environment}
    with closing(Deployment(_deployment_database, tmp_path, environment)) as deployment:
        yield deployment


async def until_counts(source: Source, ready: int, held: int) -> None:
    seen = list[tuple[int, int]]()

    async def counted() -> bool:
        seen.append(await source.counts())
        return seen[-1] == (ready, held)

    try:
        await until(counted)
    except AssertionError as error:
        raise AssertionError(f"{ready} ready and {held} held, not {seen}") from error


async def begin(deployment: Deployment, source: Source) -> Any:
    """A worker whose saga hangs between two steps, the message still being with the broker."""
    await source.publish(msgspec.json.encode(Order("r", halt="between")))
    worker = await deployment.started()
    assert await deployment.halted("r") == worker.pid
    await until_counts(source, ready=0, held=1)
    return worker


# ------------------------------------------------------------------------------------------------------ whole processes
@pytest.mark.kill
@pytest.mark.slow
async def test_the_message_of_a_killed_worker_is_redelivered_and_settled_when_the_saga_has_ended(
    deployment: Deployment, source: Source
) -> None:
    killed = await begin(deployment, source)
    killed.kill()
    deployment.bench.run("update idemconsumer.worker set until = clock_timestamp() - interval '1 second'")
    other = await deployment.started()
    await deployment.ended()
    await until_counts(source, ready=0, held=0)
    assert deployment.effects("r") == ["created", "finished"]
    assert deployment.asked("r") == [("charge", 1)]
    assert deployment.bench.state is State.COMPLETED
    await other.drain()


@pytest.mark.kill
@pytest.mark.slow
async def test_a_drain_leaves_the_message_with_the_broker_and_the_saga_to_anybody(
    deployment: Deployment, source: Source
) -> None:
    drained = await begin(deployment, source)
    await drained.drain()
    assert deployment.bench.run("select worker from idemconsumer.saga") == [(None,)]
    await until_counts(source, ready=1, held=0)
    other = await deployment.started()
    await deployment.ended()
    await until_counts(source, ready=0, held=0)
    assert deployment.effects("r") == ["created", "finished"]
    await other.drain()


# ---------------------------------------------------------------------------------------------------- the order of acts
@pytest.fixture
async def scene(postgres18: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerBench]:
    with fresh_database(postgres18.dsn) as dsn:
        prepare_witness(dsn)
        yield connected(WorkerBench(dsn), monkeypatch)


async def write(tx: Tx, name: str) -> None:
    await tx.execute("insert into effect (id) values (%s)", (name,))


@pytest.mark.parametrize("settle", ["claimed", "finished"])
@pytest.mark.parametrize("scheme", ["memory", "postgres", "rabbitmq"])
async def test_the_broker_is_told_once_and_when_the_handler_asks_for_it(
    scene: WorkerBench, request: pytest.FixtureRequest, scheme: str, settle: Any
) -> None:
    body, name, address = b'{"id": "r"}', f"{scheme}:{deployed.QUEUE}", None
    if scheme == "memory":
        await scene.publish(deployed.QUEUE, body)
    elif scheme == "postgres":
        await OnPostgres(scene).publish(body)
    else:
        queue = OnRabbitmq(request.getfixturevalue("node"), f"rides-{uuid4().hex}")
        await queue.publish(body)
        name, address = queue.name, queue.environment["IDEMCONSUMER_RABBITMQ"]
    app = App("settling")

    @app.idempotent_handler(name, key="id", lease="1m", settle=settle)
    async def ride(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", write, "first")

    async with scene.running(app, rabbitmq=address) as running:
        await running.until_count(applied=1)
        await running.leave()
        seen = [point for point, _ in running.points.seen]
    assert (seen.count(Point.SETTLED), seen.count(Point.COMMITTED)) == (1, 1)
    after = Point.COMMITTED if settle == "finished" else Point.CLAIMED
    assert seen.index(after) < seen.index(Point.SETTLING)
    if settle == "claimed":
        assert seen.index(Point.SETTLED) < seen.index(SagaPoint.STEP_OPENING)
    assert scene.effects() == ["first"]


async def test_a_message_is_kept_by_its_broker_between_two_attempts(
    scene: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, tries, told = App("settling"), 0, list[bool]()
    settle = MemorySession.settle

    async def noted(session: MemorySession, deliveries: Sequence[Delivery]) -> None:
        told.append(bool(scene.do("select 1 from idemconsumer.saga")))
        await settle(session, deliveries)

    monkeypatch.setattr(MemorySession, "settle", noted)

    @app.idempotent_handler("memory:rides", key="id", lease="1m", settle="finished", backoff="10ms, 10ms")
    async def ride(order: dict[str, Any], saga: Saga) -> None:
        nonlocal tries
        await saga.tx("first", write, "first")
        tries += 1
        if tries < 4:
            raise Retry
        await saga.tx("second", write, "second")

    await scene.publish("rides", b'{"id": "r"}')
    async with scene.running(app) as running:
        await running.until(lambda: bool(told))
        await running.leave()
    assert told == [False], "told once, when the saga was over"
    assert scene.effects() == ["first", "second"]


async def test_a_message_whose_worker_left_in_the_middle_comes_again_and_is_settled_at_the_end(
    scene: WorkerBench,
) -> None:
    app, begun, go = App("settling"), asyncio.Event(), asyncio.Event()

    @app.idempotent_handler("memory:rides", key="id", lease="1m", settle="finished")
    async def ride(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", write, "first")
        begun.set()
        await go.wait()
        await saga.tx("second", write, "second")

    await scene.publish("rides", b'{"id": "r"}')
    points = Points()
    cut_off = app.worker(scene.settings(), points)
    running_once = asyncio.create_task(cut_off.run())
    await begun.wait()
    cut_off.abort()
    await asyncio.gather(running_once, return_exceptions=True)
    assert points.count(Point.SETTLING) == 0
    go.set()
    async with scene.running(app) as running:
        await running.until(lambda: running.points.count(Point.SETTLED) > 0)
        await running.leave()
    assert scene.effects() == ["first", "second"]
    await until(lambda: not scene.do("select 1 from idemconsumer.saga"), "the saga has ended")
