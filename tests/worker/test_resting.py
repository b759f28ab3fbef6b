"""R45: what a worker holds that has nothing to do."""

from __future__ import annotations

import pytest

from idemconsumer import App, Saga, Tx
from idemconsumer.worker.capacity import resting_connections
from tests.support.tuning import tuned
from tests.support.workers import Bench

HELD = (
    "select count(*)::int from pg_stat_activity where datname = current_database()"
    " and application_name like 'idemconsumer shop%'"
)


@pytest.mark.parametrize("sagas", [False, True])
async def test_a_worker_with_nothing_to_do_holds_what_check_says(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, sagas: bool
) -> None:
    tuned(monkeypatch, pool_idle=0.1)
    app = App("shop")

    @app.idempotent_handler("postgres:mails", key="id")
    async def send(item: dict[str, str], tx: Tx) -> None: ...

    if sagas:

        @app.idempotent_handler("postgres:rides", key="id")
        async def book(item: dict[str, str], saga: Saga) -> None: ...

    resting = resting_connections(app.bound_handlers(bench.settings()))
    async with bench.running(app) as running:
        for name in ("mails", "rides")[: 1 + sagas]:
            for number in range(20):
                bench.do("select idemconsumer.publish(%s, jsonb_build_object('id', %s::text))", name, str(number))
        await running.until_count(applied=20 * (1 + sagas))
        await running.until(lambda: bench.do(HELD) == [(resting,)])
