"""R18: a whole worker behind PgBouncer's transaction pooling: lanes, sagas, the Postgres queue, the lease, pruning."""

from __future__ import annotations

import asyncio
from collections import Counter

import psycopg
import pytest

from idemconsumer import App, Saga, Tx
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.errors import ConfigurationError
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Outgoing
from idemconsumer.settings import Settings
from tests.support.relaying import Taking
from tests.support.servers.made import PrivatePgBouncer
from tests.support.servers.pgbouncer import CARRIED, PgBouncer, carry
from tests.support.tuning import tuned
from tests.support.workers import Bench, Item, connected, note, prepare


@pytest.fixture
def direct(database: str) -> str:
    """A migrated database whose role carries the settings."""
    prepare(database)
    carry(database, CARRIED | {"idle_in_transaction_session_timeout": "30s"})  # no longer than the lease of sagas
    return database


@pytest.fixture(params=[False, True], ids=["debian", "newer"])
def pooler(request: pytest.FixtureRequest, direct: str, private_pgbouncer: PrivatePgBouncer) -> PgBouncer:
    return private_pgbouncer(direct, "transaction", newer=request.param)


async def test_messages_and_sagas_are_applied_once(
    direct: str, pooler: PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    taking = Taking()
    bench = connected(Bench(pooler.dsn), monkeypatch, kafka=taking)
    app = App("pooled")

    @app.idempotent_handler("postgres:joined", key="id")
    async def joined(item: Item, tx: Tx) -> None:
        await note(tx, item)
        await app.publish("kafka:out", {"id": item.id}, tx=tx)

    @app.idempotent_handler("postgres:leased", key="id")
    async def leased(item: Item, saga: Saga) -> None:
        await saga.tx("first", step, f"{item.id} first")
        await saga.tx("second", step, f"{item.id} second")

    async def step(tx: Tx, name: str) -> None:
        await tx.execute("insert into effect (id) values (%s)", (name,))

    direct_bench = Bench(direct)
    with psycopg.connect(direct) as publisher:
        publisher.read_only = False
        for number in [*range(30), *range(30)]:
            for queue in ("joined", "leased"):
                body = f'{{"id": "{number}", "entity": ""}}'
                publisher.execute("select idemconsumer.publish_bytes(%s, convert_to(%s, 'UTF8'))", (queue, body))
    await bench.until_empty(app, prune_every=0.1, kafka="127.0.0.1:1")
    wanted = [f"{number}{step}" for number in range(30) for step in ("", " first", " second")]
    assert Counter(direct_bench.effects()) == Counter(wanted)
    assert direct_bench.do("select 1 from idemconsumer.queue") == []
    assert direct_bench.do("select 1 from idemconsumer.outbox") == []
    assert sorted(taking.bodies) == sorted(f'{{"id":"{number}"}}'.encode() for number in range(30))
    assert direct_bench.do("select 1 from idemconsumer.worker where until > clock_timestamp()") == []


async def test_a_worker_that_is_not_told_its_settings_does_not_start(
    database: str, private_pgbouncer: PrivatePgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(database)
    ignoring = {"ignore_startup_parameters": "options"}
    bench = connected(Bench(private_pgbouncer(database, "transaction", settings=ignoring).dsn), monkeypatch)
    app = App("pooled")

    @app.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    with pytest.raises(ConfigurationError, match="the role must have them"):
        await bench.until_empty(app)


BOUNDS = Bounds(lanes=1, group=1, room=5)
QUEUE = Subscription("postgres:q", "handle", "pooled")


async def test_the_queue_is_listened_to_by_the_servers_own_address_or_polled(
    direct: str, pooler: PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for listen_dsn, listeners in ((None, 0), (direct, 1)):
        session = await PostgresBroker(Settings(dsn=pooler.dsn, listen_dsn=listen_dsn)).open([QUEUE], BOUNDS)
        query = "select count(*) from pg_stat_activity where datname = current_database() and query like 'listen %'"
        assert Bench(direct).do(query) == [(listeners,)]
        tuned(monkeypatch, queue_look_pause=1.0 if listen_dsn is None else 3_600.0)
        waiting = asyncio.create_task(session.fetch())
        await asyncio.sleep(0)
        await PostgresBroker(Settings(dsn=pooler.dsn)).publish("q", [Outgoing(b"{}")])
        async with asyncio.timeout(30):
            fetched = list(await waiting)
            while not fetched:
                fetched = list(await session.fetch())
        await session.settle(fetched)
        await session.close()


async def test_an_address_to_listen_at_that_is_a_poolers_is_refused(pooler: PgBouncer) -> None:
    broker = PostgresBroker(Settings(dsn=pooler.dsn, listen_dsn=pooler.dsn))
    with pytest.raises(ConfigurationError, match="`listen_dsn` leads to a pooler"):
        await broker.open([QUEUE], BOUNDS)
    (finding,) = await broker.check(QUEUE)
    assert finding.level == "error"
