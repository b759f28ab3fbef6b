"""Retention: what leaves, what stays, and that one process at a time does it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import psycopg
import pytest

from idemconsumer.handlers.decorator import idempotent_handler
from idemconsumer.sql.queries import load
from idemconsumer.worker import retention as upkeep
from idemconsumer.worker.retention import Retention, prune_once
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

SCHEMA = "idemconsumer"
OLD, NEW = "2 hours", "1 minute"


@pytest.fixture
def store(database: str) -> str:
    migrated(database, SCHEMA)
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


async def test_what_is_known_of_an_acceptance_goes_with_its_record(store: str) -> None:
    """H49"""
    insert(store, "completed")
    insert(store, "pending", state=0)
    with psycopg.connect(store) as connection:
        connection.execute(
            "insert into idemconsumer.accepted (key, app, handler) select key, 'shop', 'pay' from idemconsumer.record"
        )

    await prune_once(store, SCHEMA)

    assert left(store) == ["pending"]
    with psycopg.connect(store) as connection:
        assert connection.execute("select key from idemconsumer.accepted").fetchall() == (
            connection.execute("select key from idemconsumer.record").fetchall()
        )


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
    tuned(monkeypatch, retention_blocks=4)
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


async def test_a_pruner_that_is_stopped_gives_the_pass_back(store: str) -> None:
    insert(store, "completed", count=10)
    async with await psycopg.AsyncConnection.connect(store, autocommit=True) as other, other.transaction():
        await other.execute("select from idemconsumer.record for update")  # the pass stalls here
        stopped = asyncio.create_task(prune_once(store, SCHEMA))
        await until(lambda: somebody_waits(other))

        stopped.cancel()
        await asyncio.wait([stopped])

    assert stopped.cancelled()
    assert await prune_once(store, SCHEMA, every=60.0) == 10


async def test_a_turn_is_not_waited_for_without_end(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, retention_blocks=1, retention_lock_patience=0.05)
    insert(store, "completed", count=1_000)
    with psycopg.connect(store) as rival:

        def hold(done: int, ranges: int) -> None:
            rival.execute("select from idemconsumer.upkeep for update")

        with pytest.raises(psycopg.errors.LockNotAvailable):
            await prune_once(store, SCHEMA, progress=hold)


# ------------------------------------------------------------------------------------- one pruner for the schema (R27)
def do(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())


def overdue(dsn: str) -> None:
    """As after a while: the next pass is due, or who has one in hand has not been heard of."""
    do(dsn, "update idemconsumer.upkeep set until = clock_timestamp()")


async def test_of_six_workers_one_prunes_and_not_before_the_next_pass_is_due(store: str) -> None:
    insert(store, "completed", count=10)
    passes = await asyncio.gather(*(prune_once(store, SCHEMA, every=60.0) for _ in range(6)))
    assert sorted(passes, key=str) == [10, None, None, None, None, None]

    insert(store, "completed", count=20)
    assert await prune_once(store, SCHEMA, every=60.0) is None
    overdue(store)
    do(store, "delete from idemconsumer.upkeep_range")  # as if these were in blocks of their own
    assert await prune_once(store, SCHEMA, every=60.0) == 20


async def test_a_person_does_not_wait_until_a_pass_is_due(store: str) -> None:
    assert await prune_once(store, SCHEMA, every=60.0) == 0
    insert(store, "completed")
    assert await prune_once(store, SCHEMA) == 1


async def test_a_pruner_that_has_died_is_replaced(store: str) -> None:
    insert(store, "completed")
    do(store, "update idemconsumer.upkeep set by = 'who died', until = clock_timestamp() + interval '1 minute'")
    assert await prune_once(store, SCHEMA, every=60.0) is None
    assert await prune_once(store, SCHEMA) is None

    overdue(store)
    assert await prune_once(store, SCHEMA, every=60.0) == 1


async def test_a_pruner_that_was_replaced_stops(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, retention_blocks=1)
    insert(store, "completed", count=1_000)
    seen: list[int] = []

    def replaced(done: int, ranges: int) -> None:
        do(store, "update idemconsumer.upkeep set by = 'another'")
        seen[:] = [done, ranges]

    pruned = await prune_once(store, SCHEMA, progress=replaced)
    assert seen[0] == 1 < seen[1]
    assert pruned == 1_000 - len(left(store))


# -------------------------------------------------------------------------- only where something can have expired (R28)
async def looked_at(dsn: str) -> int:
    """How many ranges a worker's pass looks at."""
    seen = [0]
    overdue(dsn)
    await prune_once(dsn, SCHEMA, every=60.0, progress=lambda done, _: seen.append(done))
    return seen[-1]


async def test_a_pass_with_nothing_to_do_looks_at_nothing(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, retention_blocks=1)
    insert(store, "kept", age=NEW, count=500)
    ranges = await looked_at(store)
    assert ranges > 3
    assert await looked_at(store) == 0

    do(store, "update idemconsumer.upkeep_range set look_at = clock_timestamp() where low = 2")
    assert await looked_at(store) == 1
    insert(store, "more", age=NEW, count=500)  # some of it in the last range
    assert await looked_at(store) in (ranges, ranges - 1)
    do(store, "vacuum full idemconsumer.record")
    assert await looked_at(store) >= 2 * ranges - 1


async def test_a_range_is_looked_at_when_its_first_record_expires(store: str) -> None:
    """Or when what may come meanwhile could; and once a day, for what a person changes."""
    when = "select look_at - looked_at from idemconsumer.upkeep_range"
    with psycopg.connect(store, autocommit=True) as connection:
        insert(store, "first", age="20 minutes")
        insert(store, "second", age="10 minutes")
        insert(store, "pending", age="50 minutes", state=0)
        await looked_at(store)
        ((left,),) = connection.execute(when).fetchall()
        assert 0 < 40 * 60 - left.total_seconds() < 10

        connection.execute("delete from idemconsumer.record where state = 3")
        connection.execute("delete from idemconsumer.upkeep_range")
        await looked_at(store)
        assert connection.execute(when).fetchall() == [(timedelta(hours=1),)]

        connection.execute("update idemconsumer.scope set retain = '1 year'")
        connection.execute("delete from idemconsumer.upkeep_range")
        await looked_at(store)
        assert connection.execute(when).fetchall() == [(timedelta(days=1),)]


async def test_a_prune_waits_for_no_disk(store: str) -> None:
    """R29. Only what deletes records: nothing else may be lost."""
    do(
        store,
        "create table seen (how text); create function see() returns trigger language plpgsql as $$"
        " begin insert into seen values (current_setting('synchronous_commit')); return null; end $$;"
        " create trigger see after delete on idemconsumer.record for each row execute function see();"
        " create trigger see after update on idemconsumer.upkeep for each row when (new.ended_at is distinct from"
        " old.ended_at) execute function see()",
    )
    insert(store, "completed")
    assert await prune_once(store, SCHEMA) == 1
    with psycopg.connect(store) as connection:
        assert connection.execute("select how from seen").fetchall() == [("off",), ("on",)]


async def somebody_waits(connection: psycopg.AsyncConnection) -> bool:
    # pg_stat_activity would be the same for all of this transaction.
    cursor = await connection.execute("select from pg_locks where not granted")
    return await cursor.fetchone() is not None


async def test_one_range_is_read_by_its_blocks_and_not_by_a_scan_of_the_table(store: str) -> None:
    insert(store, "completed", count=200_000, age=NEW)
    bounds = {"low": 256, "from": "(256,0)", "to": "(320,0)"}
    async with await psycopg.AsyncConnection.connect(store, autocommit=True) as connection:
        await connection.execute("analyze idemconsumer.record")
        await connection.execute("set enable_seqscan = off")  # as `in_a_range`
        for name in ("prune_range", "prunable"):
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

    async def prune(dsn: str, schema: str, every: float) -> tuple[int, None]:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise psycopg.OperationalError("server closed the connection")
        if runs > 5:
            working.set()
        return 0, None

    class Log:
        def warning(self, event: str, **fields: object) -> None:
            said.append(event)

        info = warning

    monkeypatch.setattr(upkeep, "_prune", prune)
    monkeypatch.setattr(upkeep, "log", Log())
    task = asyncio.create_task(Retention(store, SCHEMA, 0.001).run())
    async with asyncio.timeout(PATIENCE):
        await working.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert said == ["pruning failed, will retry", "pruning works again"]


async def test_records_are_pruned_though_nothing_can_be_noted_of_letters(store: str) -> None:
    """R42"""

    @idempotent_handler("memory:q", key="id", retain_dead="1d")
    async def take(item: dict[str, str]) -> None: ...

    insert(store, "completed")
    do(store, "alter table idemconsumer.dead_retention rename to away")
    task = asyncio.create_task(Retention(store, SCHEMA, 60.0, [take.plan.bind("shop")]).run())
    await until(lambda: left(store) == [])
    task.cancel()
    await asyncio.wait([task])
