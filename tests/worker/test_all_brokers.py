"""Faults that meet a worker of all four brokers at once: one handler, four sources, nothing lost and nothing twice."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from hashlib import sha256

import pytest

from idemconsumer import App, Message, Tx
from idemconsumer.ports.observer import Point
from tests.support.brokers import SCHEMES, Brokers
from tests.support.logs import LogCapture, times
from tests.support.servers.made import PrivatePostgres, Server
from tests.support.workers import Bench, Item, Running, body, note, prepare
from tests.worker.crashes import payment, work

EACH = 6


@pytest.fixture
async def brokers(kafka: Server, rabbitmq: Server, sqs: Server) -> AsyncIterator[Brokers]:
    made = Brokers(kafka, rabbitmq, sqs)
    await made.create()
    yield made
    await made.delete()


def ids(scheme: str) -> list[str]:
    return [f"{scheme}-{n}" for n in range(EACH)]


ALL = sorted(each for scheme in SCHEMES for each in ids(scheme))


async def until_applied(running: Running, bench: Bench) -> None:
    await running.until(lambda: len(bench.effects()) >= len(ALL))


@pytest.mark.kill
async def test_a_database_that_goes_and_comes_back_costs_no_message(
    brokers: Brokers, private_postgres: PrivatePostgres, logged: LogCapture
) -> None:
    server = private_postgres()
    prepare(server.dsn)
    bench, app, inside, go = Bench(server.dsn), App("all"), set[str](), asyncio.Event()

    @app.idempotent_handler(*brokers.sources, key="id", group_size=4)
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        if message.source not in inside:
            inside.add(message.source)
            await go.wait()

    for scheme in SCHEMES:
        await brokers.publish(server.dsn, scheme, *(body(Item(each)) for each in ids(scheme) * 2))
    async with bench.running(app, concurrency=8, **brokers.addresses) as running:
        await running.until(lambda: inside >= set(brokers.sources))
        await asyncio.to_thread(server.kill)
        go.set()
        await running.until(lambda: times(logged, "store unreachable, waiting") == 1)
        await asyncio.to_thread(server.start)
        await until_applied(running, bench)
    assert sorted(bench.effects()) == ALL
    assert bench.attempts() == 0
    server.stop()


async def test_what_cannot_be_read_is_a_letter_and_stops_nothing(brokers: Brokers, bench: Bench) -> None:
    app = App("all")

    @app.idempotent_handler(*brokers.sources, key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    for scheme in SCHEMES:
        bad = [b"{", b'{"id": "' + b"x" * 2_000 + b'"}']
        await brokers.publish(bench.dsn, scheme, *bad, *(body(Item(each)) for each in ids(scheme)))
    async with bench.running(app, max_message_bytes=1_000, **brokers.addresses) as running:
        await until_applied(running, bench)
        letters = "select split_part(source, ':', 1), reason from idemconsumer.dead_letter"
        await running.until(lambda: len(bench.do(letters)) >= 8)
        assert Counter(bench.do(letters)) == Counter(
            (scheme, reason) for scheme in SCHEMES for reason in ("undecodable", "oversized")
        )
    large = "select body, body_size, body_sha256 from idemconsumer.dead_letter where reason = 'oversized'"
    assert bench.do(large) == [(bad[1][:1_000], len(bad[1]), sha256(bad[1]).digest())] * len(SCHEMES)
    assert sorted(bench.effects()) == ALL


async def test_a_message_that_ends_its_connection_each_time_takes_no_other_along(
    brokers: Brokers, bench: Bench
) -> None:
    app = App("all")

    @app.idempotent_handler(*brokers.sources, key="id", max_attempts=1, backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        if item.id.endswith("bad"):
            await tx.execute("select pg_terminate_backend(pg_backend_pid())")
        await note(tx, item)

    for scheme in SCHEMES:
        await brokers.publish(bench.dsn, scheme, *(body(Item(each)) for each in [f"{scheme}-bad", *ids(scheme)]))
    async with bench.running(app, **brokers.addresses) as running:
        letters = "select split_part(source, ':', 1), reason from idemconsumer.dead_letter"
        await running.until(lambda: len(bench.do(letters)) >= 4)
        assert Counter(bench.do(letters)) == Counter((scheme, "lost_connection") for scheme in SCHEMES)
        await until_applied(running, bench)
    assert sorted(bench.effects()) == ALL


async def test_while_all_messages_fail_none_becomes_a_letter(
    brokers: Brokers, bench: Bench, logged: LogCapture
) -> None:
    """Those of each broker wait for the service that their handler needs."""
    app, up = App("all"), asyncio.Event()

    @app.idempotent_handler(*brokers.sources, key="id", max_attempts=5, backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        if not up.is_set():
            raise ConnectionError
        await note(tx, item)

    for scheme in SCHEMES:
        await brokers.publish(bench.dsn, scheme, *(body(Item(each)) for each in ids(scheme)))
    async with bench.running(app, concurrency=8, **brokers.addresses) as running:
        await running.until(lambda: times(logged, "all messages of a handler fail, trying one at a time") == 1)
        up.set()
        await until_applied(running, bench)
    assert sorted(bench.effects()) == ALL
    assert bench.do("select reason from idemconsumer.dead_letter") == []


@pytest.mark.kill
@pytest.mark.slow
# Those with sqs: and postgres: are in test_…_crash_points.py.
@pytest.mark.parametrize("scheme", ["kafka", pytest.param("rabbitmq", marks=pytest.mark.long)])
@pytest.mark.parametrize("point", [Point.SEALING, Point.COMMITTED])
async def test_a_crash_before_and_after_the_commit(brokers: Brokers, bench: Bench, scheme: str, point: Point) -> None:
    bench.do("drop table effect")
    bench.do("create table effect (id text, amount int, place bigint generated always as identity)")
    await brokers.publish(bench.dsn, scheme, *(payment(each) for each in ids(scheme) * 2))
    source = {"CRASH_SOURCE": f"{scheme}:{brokers.name}", "IDEMCONSUMER_HANDLERS": "pay"}
    source |= {f"IDEMCONSUMER_{broker.upper()}": address for broker, address in brokers.addresses.items()}
    source["IDEMCONSUMER_KAFKA_SESSION_TIMEOUT"] = "6"
    assert work(bench.dsn, f"{point}:2", **source) == -signal.SIGKILL, "it never came to this point"
    assert work(bench.dsn, **source) == 0
    assert sorted(bench.effects()) == ids(scheme)
