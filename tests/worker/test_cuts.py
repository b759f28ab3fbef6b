"""Connections to the database are cut again and again, and the database is whole: the worker goes on (R8, P8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import App, Saga, Tx
from idemconsumer.embedded.postgres import EmbeddedPostgres
from tests.support.servers.made import PrivatePostgres
from tests.support.servers.proxy import Proxy
from tests.support.servers.standby import Standby
from tests.support.tuning import tuned
from tests.support.workers import Bench, Item, connected, note, prepare

CUTS = 4
EACH = 10  # messages of each mode before each cut


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
async def test_after_connections_were_cut_again_and_again_a_worker_goes_on_at_once(
    primary: EmbeddedPostgres, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some new connections lead to a standby meanwhile, as during a failover."""
    tuned(monkeypatch, queue_visibility=600.0)  # what is not given back is never seen again
    direct, app = Bench(primary.dsn), App("cuts")

    @app.idempotent_handler("postgres:joined", key="id", group_size=4, max_attempts=1)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    @app.idempotent_handler("postgres:sagas", key="id", max_attempts=1)
    async def follow(item: Item, saga: Saga) -> None:
        await saga.tx("noted", note, item)

    port = int(str(conninfo_to_dict(primary.dsn)["port"]))
    async with Proxy(port) as proxy:
        bench = connected(Bench(make_conninfo(primary.dsn, host="127.0.0.1", port=proxy.port)), monkeypatch)
        async with bench.running(app) as running:
            for cut in range(CUTS):
                for queue in ("joined", "sagas"):
                    direct.enqueue(queue, *(Item(f"{queue}-{cut}-{number}") for number in range(EACH)))
                await running.until(lambda cut=cut: len(direct.effects()) > 2 * cut * EACH)  # type: ignore[misc]
                proxy.lead_to(standby.port, port, port)
                proxy.cut()
                await proxy.restore()
            proxy.lead_to(port)
            await running.until(lambda: len(set(direct.effects())) == 2 * CUTS * EACH)
            await running.until(lambda: direct.do("select 1 from idemconsumer.queue") == [])
    assert set(Counter(direct.effects()).values()) == {1}
    assert direct.do("select 1 from idemconsumer.dead_letter") == []
    assert direct.attempts() == 0, "a cut is nobody's failed attempt"
