"""Retention: what leaves, what stays, and that one process at a time does it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from idemconsumer.sql.queries import load
from idemconsumer.stores.migrations import migrate
from idemconsumer.worker import retention as upkeep
from idemconsumer.worker.retention import Retention, prune_once
from tests.support.waiting import PATIENCE, until

SCHEMA = "idemconsumer"
OLD, NEW = "2 hours", "1 minute"


@pytest.fixture
def store(database: str) -> str:
    migrate(database, SCHEMA)
    with psycopg.connect(database) as connection:
        connection.execute(
            "insert into idemconsumer.scope (name, retain) values ('short', '1 hour'), ('long', '1 day')"
        )
    return database


def insert(dsn: str, label: str, *, scope: str = "short", state: int = 3, age: str = OLD, count: int = 1) -> None:
    """Final records, as the engine writes them: in a transaction that is opened and sealed."""
    with psycopg.connect(dsn) as connection:
        connection.execute("select set_config('idemconsumer.open', 't', true)")
        connection.execute(
            "with made as ("
            " insert into idemconsumer.record (key, scope_id, state, changed_at)"
            " select sha256(convert_to(%(label)s || n, 'UTF8')), s.id, %(state)s,"
            "        clock_timestamp() - %(age)s::interval"
            " from generate_series(1, %(count)s) n, idemconsumer.scope s where s.name = %(scope)s"
            " returning key) "
            "insert into idemconsumer.result"
            " select key, convert_to(%(label)s, 'UTF8'), 'text/plain' from made",
            {"label": label, "state": state, "age": age, "count": count, "scope": scope},
        )
        connection.execute("select idemconsumer.seal('t')")


def left(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select convert_from(s.body, 'UTF8') from idemconsumer.record r full join idemconsumer.result s using (key)"
        ).fetchall()
    return sorted(str(label) for (label,) in rows)


async def test_final_records_past_their_scopes_retention_go_with_their_results(store: str) -> None:
    insert(store, "completed")
    insert(store, "failed", state=4)
    insert(store, "dead", state=5)
    with psycopg.connect(store) as connection:
        connection.execute(
            "insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, key,"
            " body, headers, attempts, first_at, last_at) select key, '', '', '', '', '', '', key, '', '', 1, now(),"
            " now() from idemconsumer.record where state = 5"
        )
    insert(store, "pending", state=0)
    insert(store, "fresh", age=NEW)
    insert(store, "kept longer", scope="long")

    assert await prune_once(store, SCHEMA) == 2

    assert left(store) == ["dead", "fresh", "kept longer", "pending"]
    assert await prune_once(store, SCHEMA) == 0


async def test_attempts_that_nobody_came_back_for_go_too(store: str) -> None:
    with psycopg.connect(store) as connection:
        connection.execute(
            "insert into idemconsumer.attempt (key, scope_id, count, changed_at) "
            "select convert_to(age, 'UTF8'), s.id, 1, clock_timestamp() - age::interval "
            "from unnest(%s::text[]) age, idemconsumer.scope s where s.name = 'short'",
            [[OLD, NEW]],
        )

    await prune_once(store, SCHEMA)

    with psycopg.connect(store) as connection:
        assert connection.execute("select key from idemconsumer.attempt").fetchall() == [(NEW.encode(),)]


async def test_a_dry_run_counts_and_deletes_nothing(store: str) -> None:
    insert(store, "completed", count=3)

    assert await prune_once(store, SCHEMA, dry_run=True) == 3
    assert left(store) == ["completed"] * 3


async def test_all_blocks_are_walked_and_reported(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_BLOCKS", 4)
    insert(store, "completed", count=1_000)
    seen: list[tuple[int, int]] = []

    assert await prune_once(store, SCHEMA, progress=lambda done, of: seen.append((done, of))) == 1_000

    assert len(seen) > 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


async def test_of_two_at_once_one_prunes(store: str) -> None:
    insert(store, "completed", count=10)
    async with await psycopg.AsyncConnection.connect(store, autocommit=True) as other:
        async with other.transaction():
            await other.execute("select from idemconsumer.record for update")  # the first one stalls here
            first = asyncio.create_task(prune_once(store, SCHEMA))
            await until(lambda: somebody_waits(other))

            assert await prune_once(store, SCHEMA) is None

        assert await first == 10


class Rival:
    """Takes the lock between the first two ranges of somebody's pass."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def __call__(self, done: int, _of: int) -> None:
        """The progress of that pass."""
        if done == 1:
            query = "select pg_advisory_xact_lock(hashtextextended('idemconsumer.prune.' || %s, 0))"
            self._connection.execute(query, [SCHEMA])

    def release(self) -> None:
        self._connection.rollback()


@pytest.fixture
def rival(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rival]:
    monkeypatch.setattr("idemconsumer.worker.retention._BLOCKS", 1)
    insert(store, "completed", count=1_000)
    with psycopg.connect(store) as connection:
        yield Rival(connection)


async def test_a_pass_that_has_begun_waits_for_its_turn(store: str, rival: Rival) -> None:
    passing = asyncio.create_task(prune_once(store, SCHEMA, progress=rival))
    async with await psycopg.AsyncConnection.connect(store, autocommit=True) as other:
        await until(lambda: somebody_waits(other))
    rival.release()
    assert await passing == 1_000


async def test_a_turn_is_not_waited_for_without_end(store: str, rival: Rival, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemconsumer.worker.retention._LOCK_TIMEOUT", "50ms")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        await prune_once(store, SCHEMA, progress=rival)


async def somebody_waits(connection: psycopg.AsyncConnection) -> bool:
    # pg_stat_activity would be the same for all of this transaction.
    cursor = await connection.execute("select from pg_locks where not granted")
    return await cursor.fetchone() is not None


async def test_one_range_is_read_by_its_blocks_and_not_by_a_scan_of_the_table(store: str) -> None:
    insert(store, "completed", count=200_000, age=NEW)
    bounds = {"low": "(256,0)", "high": "(320,0)"}
    async with await psycopg.AsyncConnection.connect(store, autocommit=True) as connection:
        await connection.execute("analyze idemconsumer.record")
        for name in ("prune", "prunable"):
            query = load(SCHEMA)[name]
            cursor = await connection.execute(b"explain " + query, bounds)
            plan = "\n".join(line for (line,) in await cursor.fetchall())
            assert "Tid Range Scan on record" in plan, plan
            assert "Seq Scan on record" not in plan


async def test_upkeep_says_once_that_it_fails_and_goes_on_when_it_can(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    runs = 0
    working = asyncio.Event()

    async def prune(dsn: str, schema: str) -> int:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise psycopg.OperationalError("server closed the connection")
        if runs > 5:
            working.set()
        return 0

    class Log:
        def warning(self, event: str, **fields: object) -> None:
            said.append(event)

        info = warning

    monkeypatch.setattr(upkeep, "prune_once", prune)
    monkeypatch.setattr(upkeep, "log", Log())
    task = asyncio.create_task(Retention(store, SCHEMA, 0.001).run())
    async with asyncio.timeout(PATIENCE):
        await working.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert said == ["pruning failed, will retry", "pruning works again"]
