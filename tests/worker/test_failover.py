"""R19: an address with several hosts leads to the primary, also when that is another one than before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from psycopg.conninfo import make_conninfo

from idemconsumer import App, Tx
from idemconsumer.embedded.postgres import EmbeddedPostgres
from tests.support.servers.made import PrivatePostgres
from tests.support.servers.standby import Standby
from tests.support.tuning import tuned
from tests.support.workers import Bench, Item, connected, note, prepare


@pytest.fixture
def primary(private_postgres: PrivatePostgres) -> EmbeddedPostgres:
    server = private_postgres()
    prepare(server.dsn)
    return server


@pytest.fixture
def standby(primary: EmbeddedPostgres) -> Iterator[Standby]:
    with closing(Standby(primary)) as server:
        yield server


@pytest.mark.kill
@pytest.mark.parametrize(
    ("source", "wanted"), [("memory:q", {}), ("postgres:q", {"target_session_attrs": "read-write"})]
)
async def test_a_worker_goes_on_at_the_standby_that_was_promoted(
    primary: EmbeddedPostgres, standby: Standby, monkeypatch: pytest.MonkeyPatch, source: str, wanted: dict[str, str]
) -> None:
    # The standby comes first, so that whoever takes the first host never gets to write.
    dsn = make_conninfo(
        primary.dsn,
        host="127.0.0.1,127.0.0.1",
        port=f"{standby.port},{primary.port}",
        **wanted,
    )
    bench = connected(Bench(dsn), monkeypatch)
    tuned(monkeypatch, queue_visibility=2.0)  # until what was in hand is delivered again
    app, begun, killed = App("failover"), 0, asyncio.Event()

    @app.idempotent_handler(source, key="id", group_size=4)
    async def handle(item: Item, tx: Tx) -> None:
        nonlocal begun
        begun += 1
        await note(tx, item)
        if begun > 100:  # so that there is a midst, however long the kill takes
            await killed.wait()

    items = [Item(str(number)) for number in range(300)]
    if source == "memory:q":
        await bench.publish("q", *items, *items)
    else:
        bench.enqueue("q", *items)
    async with bench.running(app) as running:
        await running.until(lambda: running.worker.counts.get("applied", 0) >= 50)
        await asyncio.to_thread(primary.kill)
        before = running.worker.counts["applied"]
        assert before < 300, "killed in the midst"
        killed.set()
        await asyncio.to_thread(standby.promote)
        survivor = Bench(standby.dsn)
        assert len(survivor.effects()) >= before, "what was acknowledged is there"
        await running.until(lambda: len(set(survivor.effects())) == 300)
        if source == "memory:q":
            await running.until_count(duplicate=300)
        else:
            await running.until(lambda: survivor.do("select 1 from idemconsumer.queue") == [])
    assert Counter(survivor.effects()) == Counter(item.id for item in items)
