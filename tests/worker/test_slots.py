"""Schedules on a real database: each slot starts one saga (L53)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
import pytest

from idemconsumer import App, ConfigurationError, Saga, Tx
from idemconsumer.cli.inspect import findings
from idemconsumer.rules.schedules import Schedule
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings
from idemconsumer.sql.queries import load
from idemconsumer.worker.retention import prune_once
from idemconsumer.worker.schedule_starter import Schedules
from tests.support.inside import queries_of, replace_queries
from tests.support.logs import LogCapture, times
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned
from tests.support.waiting import until

HOURLY = Schedule("hourly", "0 * * * *", "UTC", "all", "report")


class Desk:
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.connection = psycopg.connect(dsn, autocommit=True)

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []

    def worker(self, schedule: Schedule = HOURLY) -> Schedules:
        return Schedules(self.dsn, "idemconsumer", "desk", [schedule], {"report": "postgres:~desk/report"})

    def missed(self, hours: int) -> None:
        """Nobody has looked since that many slots ago."""
        self.sql(
            "update idemconsumer.schedule set last = date_trunc('hour', clock_timestamp())"
            f" - interval '{hours} hours' + interval '1 minute'"
        )

    @property
    def keys(self) -> list[str]:
        return [key for (key,) in self.sql("select message_id from idemconsumer.queue order by message_id")]


@pytest.fixture
def desk(database: str) -> Iterator[Desk]:
    migrated(database, "idemconsumer")
    desk = Desk(database)
    with closing(desk.connection):
        yield desk


async def test_a_schedule_begins_with_its_next_slot(desk: Desk) -> None:
    assert 0 < await desk.worker().look() <= 30
    assert desk.keys == []


async def test_all_schedules_of_an_app_are_read_in_one_statement(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Schedule(f"s{n}", "0 0 1 1 *", "UTC", "last", "report") for n in range(10)]
    schedules, sent = Schedules(desk.dsn, "idemconsumer", "desk", many, {}), list[object]()
    await schedules.look()
    assert desk.sql("select count(*) from idemconsumer.schedule") == [(10,)]
    execute = psycopg.AsyncCursor.execute

    async def counted(cursor: psycopg.AsyncCursor[Any], query: bytes, *args: Any, **more: Any) -> Any:
        sent.append(query)
        return await execute(cursor, query, *args, **more)

    monkeypatch.setattr(psycopg.AsyncCursor, "execute", counted)
    assert 0 < await schedules.look() <= 30
    assert sent == [load("idemconsumer")["read_schedules"]]


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("a bug")])
async def test_what_goes_wrong_delays_schedules_and_is_said_once(
    desk: Desk, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tuned(monkeypatch, schedule_retry_pause=0.0)
    schedules, looks = desk.worker(), list[int]()
    look = schedules.look

    async def failing() -> float:
        looks.append(len(looks))
        if len(looks) <= 2:
            raise error
        return await look()

    monkeypatch.setattr(schedules, "look", failing)
    await desk.worker().look()
    desk.missed(1)
    running = asyncio.create_task(schedules.run())
    await until(lambda: len(desk.keys) == 1)
    await until(lambda: times(logged, "schedules are checked again") == 1)
    running.cancel()
    assert times(logged, "schedules could not be checked, will retry") == 1


async def test_of_twenty_workers_one_starts_each_slot(desk: Desk) -> None:
    await desk.worker().look()
    desk.missed(5)
    await asyncio.gather(*(desk.worker().look() for _ in range(20)))
    assert len(desk.keys) == len(set(desk.keys)) == 5
    (queue,) = set(desk.sql("select name from idemconsumer.queue"))
    assert queue == ("~desk/report",)


async def test_a_slot_is_started_with_the_mark_that_it_was(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.worker().look()
    desk.missed(1)
    before = desk.sql("select last from idemconsumer.schedule")

    async def dies(*given: object) -> None:
        raise psycopg.OperationalError("gone")

    with monkeypatch.context() as patched:
        patched.setattr("idemconsumer.worker.schedule_starter.enqueue", dies)
        with pytest.raises(psycopg.OperationalError):
            await desk.worker().look()
    assert (desk.keys, desk.sql("select last from idemconsumer.schedule")) == ([], before)
    await desk.worker().look()
    assert len(desk.keys) == 1


async def test_another_expression_catches_up_with_nothing(desk: Desk) -> None:
    """And the one before goes on while its workers live; a slot of both has one key."""
    await desk.worker().look()
    desk.missed(2)
    changed = Schedule("hourly", "*/30 * * * *", "UTC", "all", "report")
    await desk.worker(changed).look()
    assert desk.keys == []
    await desk.worker().look()
    assert len(desk.keys) == 2
    desk.missed(2)
    await desk.worker(changed).look()
    assert len(set(desk.keys)) >= 4
    assert len(desk.keys) - len(set(desk.keys)) == 2  # duplicates of one saga each


@pytest.mark.parametrize(("other", "caught_up"), [("3 hours", 0), ("8 days", 192), (None, 192)])
async def test_an_expression_that_is_changed_back_catches_up_with_nothing(
    desk: Desk, other: str | None, caught_up: int
) -> None:
    """Its row is that of a week ago. If nobody has looked at another one since, nobody has looked at all."""
    await desk.worker().look()
    desk.sql(
        "update idemconsumer.schedule set looked_at = clock_timestamp() - interval '8 days 2 hours',"
        " last = date_trunc('hour', clock_timestamp()) - interval '8 days' + interval '1 minute'"
    )
    if other is not None:
        await desk.worker(Schedule("hourly", "*/30 * * * *", "UTC", "all", "report")).look()
        noted = f"update idemconsumer.schedule set looked_at = clock_timestamp() - interval '{other}'"
        desk.sql(f"{noted} where rule like '*/30%'")
    while await desk.worker().look() < 0.1:
        pass
    assert len(desk.keys) == caught_up


async def test_the_databases_clock_decides(desk: Desk) -> None:
    await desk.worker().look()
    ahead = desk.worker()  # of a database that is five hours ahead of this machine
    queries = queries_of(ahead)
    read = queries["read_schedules"].replace(b"clock_timestamp()", b"clock_timestamp() + interval '5 hours'")
    replace_queries(ahead, queries | {"read_schedules": read})
    await ahead.look()
    assert len(desk.keys) == 5
    await desk.worker().look()
    assert len(desk.keys) == 5


async def test_a_worker_starts_the_saga_of_a_slot_that_came_while_none_ran(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", desk.dsn)
    desk.sql("create table seen (slot text)")
    app = App("desk")

    async def note(tx: Tx, slot: str) -> None:
        await tx.execute("insert into seen values (%s)", (slot,))

    @app.every("0 * * * *", name="hourly")
    @app.idempotent_handler("memory:reports", key="slot")
    async def report(given: dict[str, str], saga: Saga) -> str:
        await saga.tx("noted", note, given["slot"])
        return given["schedule"]

    settings = Settings(dsn=desk.dsn, concurrency=2)
    said = [each.text async for each in findings(app, settings) if each.subject == "schedule hourly"]
    assert said[0].startswith("0 * * * * UTC, starts report, catch_up last; next 2")
    await desk.worker().look()
    desk.missed(3)
    worker = app.worker(settings)
    running = asyncio.create_task(worker.run())
    await until(lambda: desk.sql("select 1 from seen") != [])
    await until(lambda: desk.sql("select 1 from idemconsumer.record where state = 3") != [])
    worker.drain()
    await running
    ((slot,),) = desk.sql("select slot from seen")
    outcome = await app.result(report, key=f"hourly@{slot[:16]}Z")
    assert (outcome.state, outcome.result) == (State.COMPLETED, b'"hourly"')
    await app.close()


async def test_a_schedule_is_forgotten_when_nobody_has_looked_at_it_for_ninety_days(desk: Desk) -> None:
    """However long ago its last slot was: one that is looked at may have a slot each year."""
    yearly = Schedule("yearly", "0 0 1 1 *", "UTC", "all", "report")
    await desk.worker().look()
    await desk.worker(yearly).look()
    desk.sql(
        "update idemconsumer.schedule set looked_at = now() - interval '91 days', last = now() - interval '300 days'"
    )
    await desk.worker(yearly).look()
    await prune_once(desk.dsn, "idemconsumer")
    assert [name for (name,) in desk.sql("select name from idemconsumer.schedule")] == ["yearly"]
    assert desk.sql("select looked_at > now() - interval '1 hour' from idemconsumer.schedule") == [(True,)]


def test_only_sagas_are_scheduled_and_each_name_once() -> None:
    app = App("desk")

    @app.idempotent_handler("memory:a", key="slot")
    async def joined(given: dict[str, str], tx: Tx) -> None: ...

    @app.every("0 * * * *")
    @app.idempotent_handler("memory:b", key="slot")
    async def report(given: dict[str, str], saga: Saga) -> None: ...

    with pytest.raises(ConfigurationError, match=r"@app\.every does not decorate a saga of this app"):
        app.every("0 * * * *")(joined)
    with pytest.raises(ConfigurationError, match="two schedules are named 'report'"):
        app.every("5 * * * *")(report)


class _Report(msgspec.Struct):
    customer: str
    slot: str = ""


class _Fresh(msgspec.Struct):
    slot: datetime

    def __post_init__(self) -> None:
        if self.slot < datetime.now(UTC):
            raise ValueError("it is too old")


async def _by_fresh(given: _Fresh, saga: Saga) -> None: ...


async def _by_customer(given: _Report, saga: Saga) -> None: ...


async def _by_slot(given: dict[str, str], saga: Saga) -> None: ...


@pytest.mark.parametrize(
    ("fn", "options", "why"),
    [
        (_by_customer, {}, "customer"),
        (_by_slot, {"tenant": "customer"}, "customer"),
        (_by_slot, {"decode": lambda body, message: {}}, None),
        (_by_fresh, {}, None),
    ],
)
async def test_a_saga_that_cannot_take_a_slot_is_refused_when_its_worker_starts(
    fn: Any, options: Any, why: str | None
) -> None:
    """Each slot was a dead letter, the first of them at three in the morning."""
    app = App("desk")
    app.every("0 * * * *", name="hourly")(app.idempotent_handler("memory:b", key="slot", name="report", **options)(fn))
    if why is None:
        app.worker(Settings())
        return
    with pytest.raises(ConfigurationError, match=f"schedule 'hourly': 'report' cannot take what .*{why}.*; let its"):
        app.worker(Settings())
    found = [each async for each in findings(app, Settings())]
    assert any(each.level == "error" and "'report' cannot take what" in each.text for each in found)
