"""From a POST by a real broker to its answer: 202, relay, broker, worker, GET (H46). Also while the relay is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from idemconsumer import App, ConfigurationError, Key, Result, Tx
from idemconsumer.http import AcceptLater
from idemconsumer.message.origin import ACCEPTED
from idemconsumer.ports.observer import Point
from tests.http.site import Client, by_header, client, problem
from tests.support.brokers import Brokers
from tests.support.servers.made import Server
from tests.support.waiting import PATIENCE, until
from tests.support.workers import Bench, connected, prepare
from tests.worker.crashes import work
from tests.worker.crashing_worker import Payment

KEYS = [f"p-{n}" for n in range(6)]


@pytest.fixture
def bench(database: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    prepare(database)
    bench = connected(Bench(database), monkeypatch)
    bench.do("drop table effect")
    bench.do("create table effect (id text, amount int, place bigint generated always as identity)")
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    return bench


@pytest.fixture
async def brokers(kafka: Server, rabbitmq: Server, sqs: Server) -> AsyncIterator[Brokers]:
    made = Brokers(kafka, rabbitmq, sqs)
    await made.create()
    yield made
    await made.delete()


def shop(*sources: str) -> tuple[App, Any]:
    """The app of `crashing_worker`, and its handler, which answers as well."""
    app = App("crashing")
    key, tenant = Key.header("Idempotency-Key"), Key.header("Account")

    @app.idempotent_handler(*sources, key=key, tenant=tenant)
    async def pay(payment: Payment, tx: Tx) -> Result:
        await tx.execute("insert into effect values (%s, %s)", (payment.id, payment.amount))
        return Result({"paid": payment.id}, 201)

    return app, pay


async def post(http: Client, key: str, **more: Any) -> Any:
    return await http.post(json={"id": key, "amount": 1}, key=key, **more)


async def at(app: App, pay: Any, key: str) -> str:
    return f"/pays/{await app.accepted_id(pay, key=key, tenant='t')}"


async def all_done(http: Client, app: App, pay: Any, *keys: str) -> bool:
    """Those that a worker has done before it was killed have the answer of its handler, 200."""
    answers = [await http.http.get(await at(app, pay, key), headers={"X-Tenant": "t"}) for key in keys]
    assert all(answer.status_code in (200, 201, 202) for answer in answers)
    return all(answer.status_code != 202 for answer in answers)


async def on_the_topic(server: str, topic: str) -> list[bytes]:
    async with AIOKafkaConsumer(bootstrap_servers=server) as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        end, found = (await consumer.end_offsets([partition]))[partition], list[bytes]()
        async with asyncio.timeout(PATIENCE):
            while len(found) < end:
                for records in (await consumer.getmany(timeout_ms=500)).values():
                    found += [dict(record.headers)[ACCEPTED] for record in records]
    return found


async def test_by_each_broker_it_is_done_once_and_answered(bench: Bench, brokers: Brokers) -> None:
    schemes = ("kafka", "rabbitmq", "sqs")
    app, pay = shop(*(f"{scheme}:{brokers.name}" for scheme in schemes))
    later = {scheme: AcceptLater(app, pay, tenant=by_header, path="/pays", via=f"{scheme}:{brokers.name}")
             for scheme in schemes}  # fmt: skip
    for scheme, door in later.items():
        async with client(door) as http:
            answers = [await post(http, scheme, path="/pays") for _ in range(3)]
            assert [(each.status_code, each.headers["location"]) for each in answers] == [
                (202, await at(app, pay, scheme))
            ] * 3
    assert bench.do("select count(*) from idemconsumer.outbox") == [(3,)], "a repetition sends no second message"

    async with client(later["sqs"]) as http, bench.running(app, **brokers.addresses):
        await until(lambda: all_done(http, app, pay, *schemes))
        other = await http.http.get(await at(app, pay, "kafka"), headers={"X-Tenant": "other"})
        assert (other.status_code, problem(other)) == (404, "not-found")
        assert (await post(http, "kafka", path="/pays")).status_code == 201
    assert sorted(bench.effects()) == sorted(schemes)
    assert len(await on_the_topic(brokers.kafka.address, brokers.name)) == 1
    await app.close()


@pytest.mark.kill
@pytest.mark.slow
async def test_a_relay_that_is_killed_behind_its_sending_has_it_done_once(bench: Bench, brokers: Brokers) -> None:
    source = f"kafka:{brokers.name}"
    app, pay = shop(source)
    async with client(AcceptLater(app, pay, tenant=by_header, path="/pays", via=source)) as http:
        for key in KEYS:
            assert (await post(http, key, path="/pays")).status_code == 202
        crash = {"CRASH_ACCEPTS": "1", "CRASH_SOURCE": source, "IDEMCONSUMER_KAFKA": brokers.kafka.address,
                 "IDEMCONSUMER_KAFKA_SESSION_TIMEOUT": "6"}  # fmt: skip
        assert await asyncio.to_thread(work, bench.dsn, Point.RELAYED, **crash) == -signal.SIGKILL, "never came there"
        assert bench.do("select count(*) from idemconsumer.outbox") == [(len(KEYS),)], "sent, and not marked so"
        async with bench.running(app, kafka=brokers.kafka.address):
            await until(lambda: all_done(http, app, pay, *KEYS))
            for key in KEYS:
                again = await post(http, key, path="/pays")
                assert again.status_code in (200, 201)
    sent = await on_the_topic(brokers.kafka.address, brokers.name)
    assert (len(sent), len(set(sent))) == (2 * len(KEYS), len(KEYS)), "each was sent twice"
    assert sorted(bench.effects()) == KEYS
    await app.close()


async def test_a_handler_that_would_find_another_key_is_refused_when_the_door_is_made(bench: Bench) -> None:
    app = App("shop")

    @app.idempotent_handler("kafka:orders", key=Key.offset(), tenant=Key.header("Account"))
    async def by_offset(payment: Payment, tx: Tx) -> None: ...

    @app.idempotent_handler("kafka:others", key="id")
    async def of_nobody(payment: Payment, tx: Tx) -> None: ...

    with pytest.raises(ConfigurationError, match="its `key` is Kafka offset, which is not known before it is sent"):
        AcceptLater(app, by_offset, tenant=by_header, path="/pays", via="kafka:orders")
    with pytest.raises(ConfigurationError, match="has no `tenant`"):
        AcceptLater(app, of_nobody, tenant=by_header, path="/pays", via="kafka:others")


async def test_a_body_that_names_another_key_is_422_and_stores_nothing(bench: Bench) -> None:
    app = App("shop")

    @app.idempotent_handler("postgres:orders", key="id", tenant=Key.header("Account"))
    async def pay(payment: Payment, tx: Tx) -> None: ...

    async with client(AcceptLater(app, pay, tenant=by_header, path="/pays", via="postgres:orders")) as http:
        differs = await http.post(json={"id": "other", "amount": 1}, key="k", path="/pays")
        assert (differs.status_code, problem(differs)) == (422, "key-differs")
        assert bench.do("select from idemconsumer.record") == []
        assert (await http.post(json={"id": "k", "amount": 1}, key="k", path="/pays")).status_code == 202
        for id in ("", "a\0", "a" * 2000):  # it is the body that is wrong, and not the header
            wrong = await http.post(json={"id": id, "amount": 1}, key="k", path="/pays")
            assert (wrong.status_code, problem(wrong)) == (400, "unreadable")
    await app.close()
