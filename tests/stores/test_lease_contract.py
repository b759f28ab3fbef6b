"""PostgresLeases passes the suite of leases."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest

from idemconsumer.handlers.arguments import Tx
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leases import PostgresLeases
from tests.support.ledger import SCHEMA, Ledger

for each in ("lease_contract", "step_contract", "fence_contract"):
    pytest.register_assert_rewrite(f"tests.stores.{each}")

from tests.stores.lease_contract import LeaseStoreContract  # noqa: E402
from tests.stores.lease_harness import LeaseHarness, LeaseWorker  # noqa: E402


class Lease:
    """A lease that no thread keeps: it lasts for an hour, or until it is ended."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        ((self.worker,),) = ledger.run(
            "insert into idemconsumer.worker (name, lease, until, runs)"
            " values ('test', '1 hour', clock_timestamp() + interval '1 hour', '[]') returning id"
        )

    async def good(self, timeout: float) -> None:
        return

    async def expire(self) -> None:
        self._ledger.run(
            "update idemconsumer.worker set until = clock_timestamp() - interval '1 second' where id = %s",
            [self.worker],
        )


class PostgresHarness:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def worker(self) -> LeaseWorker:
        lease = Lease(self._ledger)
        store = await PostgresStore.open(self._ledger.dsn, SCHEMA, connections=8, longest_run=30.0)
        return LeaseWorker(store, PostgresLeases(store.pool, lease), lease.expire)

    async def write(self, tx: Tx, effect: str) -> None:
        await tx.execute("insert into witness (id) values (%s)", (effect,))

    async def break_transaction(self, tx: Tx) -> None:
        with pytest.raises(psycopg.errors.UndefinedTable):
            await tx.execute("select from nowhere")

    async def commit(self, tx: Tx) -> None:
        with suppress(psycopg.Error):
            await tx.connection.execute("commit")

    async def effects(self) -> list[str]:
        return self._ledger.effects

    async def letters(self) -> list[tuple[str, int]]:
        return self._ledger.letters

    async def history(self, key: bytes) -> list[tuple[str, str | None]]:
        rows = self._ledger.run("select what, detail from idemconsumer.history where key = %s order by id", [key])
        return [(what, detail) for what, detail in rows]


class TestPostgres(LeaseStoreContract):
    @pytest.fixture
    def harness(self, shared_ledger: Ledger) -> LeaseHarness:
        return PostgresHarness(shared_ledger)
