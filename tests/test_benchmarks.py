"""The pieces of the benchmarks run: a few messages through each consumer that needs nothing but what the tests have."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks import __main__ as command
from benchmarks import front_door, old_snapshot, report
from benchmarks._brokers import PostgresQueue, SqsQueue
from benchmarks._child import child
from benchmarks._loads import Load
from benchmarks._measure import Figure, Ratio, Result, Spread, Table, Target, side_by_side
from benchmarks._sizes import OURS
from benchmarks._stage import CLAIM, PAYMENT, SCHEMA, SEEN, Stage
from benchmarks.end_to_end import Consumer, consume
from benchmarks.kept_keys import settings_for
from benchmarks.long_runs import fitting, make_records
from benchmarks.rivals import arrivals
from benchmarks.rivals.store import PIPELINED, Hand
from benchmarks.store_path import SCRIPT, pgbench
from idemconsumer.sql.queries import load
from idemconsumer.stores.migrations import migrate
from tests.support.servers.made import PostgresServer, Server
from tests.support.waiting import PATIENCE


@pytest.fixture
def stage(postgres18: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("IDEMCONSUMER_DSN", postgres18.dsn)
    with Stage(quick=True) as stage:
        yield stage


@pytest.mark.parametrize("name", ["bare", "bare, autocommit", "by hand", "textbook", "group 32", OURS, PIPELINED])
async def test_a_consumer_of_the_store_path_applies_its_load(name: str, database: str) -> None:
    migrate(database, "idemconsumer")
    with psycopg.connect(database, autocommit=True) as connection:
        for table in (PAYMENT, SEEN, CLAIM):
            connection.execute(table)
        async with child("benchmarks.rivals.store") as running:
            given = {"prefix": "p", "count": 50}
            answer = await running.ask(dsn=database, name=name, lanes=2, load=given)
            await running.ask(close=True)
        assert answer["seconds"] > 0
        assert connection.execute("select count(*), count(distinct id) from payment").fetchone() == (50, 50)


@pytest.mark.parametrize("name", ["bare", "by hand", OURS, PIPELINED])
@pytest.mark.parametrize(("does", "left"), [("two", 90), ("read", 100)])
async def test_a_consumer_sends_two_statements_a_message(name: str, does: str, left: int, stage: Stage) -> None:
    with stage.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("insert into stock select n, 10 from generate_series(0, 9) n")
        async with child("benchmarks.rivals.store") as running:
            given = {"prefix": "p", "count": 10, "does": does, "hot": 10}
            await running.ask(dsn=dsn, name=name, lanes=2, load=given)
            await running.ask(close=True)
        assert connection.execute("select count(*), count(distinct id) from payment").fetchone() == (10, 10)
        assert connection.execute("select sum(qty) from stock").fetchone() == (left,)


async def test_a_distant_database_answers_later_and_loses_no_byte(stage: Stage) -> None:
    port = int(str(conninfo_to_dict(stage.postgres)["port"]))
    async with child("benchmarks.delaying") as proxy:
        near = make_conninfo(stage.postgres, host="127.0.0.1", port=await proxy.ask(port=port, round_trip=0.0))
        far = make_conninfo(stage.postgres, host="127.0.0.1", port=await proxy.ask(port=port, round_trip=0.02))
        with psycopg.connect(near) as one, psycopg.connect(far) as other:
            sent = os.urandom(5_000_000)  # more than fits into the buffers of its sockets
            for connection in (one, other):
                assert connection.execute("select %b::bytea", (sent,), binary=True).fetchone() == (sent,)
            before = time.perf_counter()
            other.execute("select 1")
            assert time.perf_counter() - before >= 0.02


async def test_pgbench_sends_what_the_engine_sends(stage: Stage) -> None:
    binary = shutil.which("pgbench")
    if binary is None:
        pytest.skip("no pgbench; apt-get install postgresql")
    with stage.database() as dsn:
        assert await pgbench(binary, dsn, seconds=1) > 0
        with psycopg.connect(dsn) as connection:
            row = connection.execute(
                "select count(*), count(r.key) from payment p left join idemconsumer.record r on r.xmin = p.xmin"
            ).fetchone()
    assert row is not None
    assert row[0] == row[1] > 0  # each payment in one transaction with its record
    values = {"seal": "'bench'", "lock_timeout": "'10s'"}
    for name in ("begin", "open", "seal"):
        sent = (load(SCHEMA)[name].decode() % values).replace('"', "") + ";"
        assert " ".join(sent.split()) in " ".join(SCRIPT.split())


# ------------------------------------------------------------------------------------------------------------- latency
@pytest.mark.parametrize("name", ["bare", OURS])
async def test_each_arrival_is_timed_up_to_its_commit(name: str, stage: Stage) -> None:
    with stage.database() as dsn:
        question = {"dsn": dsn, "name": name, "lanes": 2, "rate": 500.0, "load": {"prefix": "p", "count": 50}}
        async with child("benchmarks.rivals.arrivals") as running:
            middle, most = await running.ask(**question)
            with psycopg.connect(dsn) as connection:
                assert connection.execute("select count(distinct id) from payment").fetchone() == (50,)
            if name == OURS:
                with pytest.raises(RuntimeError, match="ended with exit code"):  # what was not applied has no time
                    await running.ask(**question)
    assert 0 < middle <= most


async def test_by_hand_a_free_connection_takes_the_next_arrival() -> None:
    others: list[object] = []
    done = asyncio.Event()

    async def apply(connection: Any, payment: dict[str, Any]) -> None:
        if connection == "slow":
            await done.wait()
            return
        others.append(payment["id"])
        if len(others) == 9:
            done.set()

    hand = Hand(["slow", "quick"], apply)  # type: ignore[list-item]
    async with asyncio.timeout(PATIENCE):
        assert len(await arrivals.measure(hand, Load(prefix="p", count=10), 10_000.0, lanes=2)) == 10


# ---------------------------------------------------------------------------------------------------------- end to end
@pytest.mark.parametrize("how", ["best", "plain", "dedup", "textbook"])
async def test_a_consumer_by_hand_empties_the_queue(how: str, stage: Stage) -> None:
    run = await consume(stage, PostgresQueue(), Consumer.module("hand", how), 50, most=100.0)
    assert run.applied == 50
    assert run.rate > 0
    assert run.memory > 1_000_000


async def test_our_own_consumer_empties_the_queue(stage: Stage) -> None:
    run = await consume(stage, PostgresQueue(), Consumer.ours(), 4_000, most=200.0)
    assert run.applied == 4_000
    assert run.busy > 0  # counted in hundredths of a second


async def test_a_queue_is_measured_by_the_statements_of_its_sessions(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_snapshot, "MARKS", [0, 10])
    (table,) = (await old_snapshot.old_snapshot(stage)).tables
    assert [figure.name for figure in table.figures] == [
        f"{name}, {gone:,} gone" for gone in (0, old_snapshot.AT_ONCE) for name in ("take one", "look")
    ]


def script(*lines: str, **more: Any) -> Consumer:
    """A consumer that does just this, with a connection to the database of the run."""
    connect = "import os, psycopg, time; c = psycopg.connect(os.environ['BENCH_DSN'], autocommit=True)"
    return Consumer(["-c", "\n".join([connect, *lines])], **more)


def inserts(ids: str) -> str:
    return f'c.execute("insert into payment (id, amount) select n::text, 1 from generate_series({ids}) n")'


async def test_a_consumer_that_ends_is_noticed_at_once(stage: Stage) -> None:
    async with asyncio.timeout(100):
        with pytest.raises(RuntimeError, match=r"ended with exit code 3 after 20 of 50 messages"):
            await consume(stage, PostgresQueue(), script(inserts("1, 20"), "exit(3)"), 50, most=200.0)


async def test_a_rival_that_stalls_is_slow_and_ours_is_refused(stage: Stage) -> None:
    stalls = [inserts("1, 20"), "time.sleep(60)"]
    run = await consume(stage, PostgresQueue(), script(*stalls), 50, most=1.0)
    assert run.applied == 20
    assert run.rate <= 18 / 1.0
    with pytest.raises(RuntimeError, match="applied 20 of 50 messages in 1 s"):
        await consume(stage, PostgresQueue(), script(*stalls, whole=True), 50, most=1.0)


async def test_who_applies_a_message_twice_is_refused(stage: Stage) -> None:
    twice = script(inserts("1, 20"), inserts("11, 20"), "time.sleep(60)")
    with pytest.raises(RuntimeError, match="applied 10 of 30 messages twice"):
        await consume(stage, PostgresQueue(), twice, 30, most=5.0)


async def test_a_run_lasts_until_the_broker_knows(stage: Stage) -> None:
    class Behind(PostgresQueue):
        asked = 0

        async def settled(self) -> bool:
            self.asked += 1
            return self.asked > 10

    run = await consume(stage, Behind(), script(inserts("1, 50"), "time.sleep(60)"), 50, most=10.0)
    assert run.rate < 45 / 0.5  # ten pauses


async def test_an_sqs_queue_knows_when_it_is_empty(stage: Stage, sqs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "sqs", sqs.address)
    async with SqsQueue.open(stage) as queue:
        run = await consume(stage, queue, Consumer.module("hand", "best"), 20, most=100.0)
        assert run.applied == 20
        assert await queue.settled()
        await queue.fill("", 1)
        assert not await queue.settled()


# ---------------------------------------------------------------------------------------------------------------- HTTP
@pytest.mark.parametrize("name", [front_door.PLAIN, *front_door.OURS])
async def test_a_service_is_asked_and_what_it_has_booked_is_counted(name: str, stage: Stage) -> None:
    async with child("benchmarks.rivals.callers") as callers, front_door.service(stage, name) as asked:
        for _ in range(1 if name == front_door.PLAIN else 2):
            seen = await front_door.ask(callers, asked, "p", clients=2, count=20)
            assert 0 < seen.middle <= seen.most
        await front_door.counted(asked, 20)
        with pytest.raises(RuntimeError, match=f"{name}: 21 payments are"):
            await front_door.counted(asked, 21)


# ---------------------------------------------------------------------------------------------------------- the results
def test_the_load_of_others_is_read_before_our_own(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([0.2, 7.0, 7.0, 7.0])

    async def part(stage: Stage) -> Result:
        return Result("part", [])

    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr(command, "PARTS", {"one": (part, 1), "two": (part, 1)})
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "PACKAGES", ["psycopg"])
    done = CliRunner().invoke(command.main, ["one", "two"])
    assert done.exit_code == 0, done.output
    results = [json.loads((tmp_path / f"{name}.json").read_bytes()) for name in ("one", "two")]
    assert all(result["machine"].endswith("load before 0.2") for result in results)
    assert results[0]["versions"].keys() == {"idemconsumer", "psycopg", "Postgres"}


def test_what_the_disk_has_no_room_for_is_said() -> None:
    sizes, skipped = fitting([0, 1_000_000, 50_000_000], free=2 * 10**9)
    assert sizes == [0, 1_000_000]
    assert skipped == {"50,000,000 records": "skipped, 24 GB needed and 2 GB free"}


async def test_kept_keys_are_records_with_their_index(stage: Stage) -> None:
    with stage.database() as dsn:
        await make_records(dsn, 11)
        with psycopg.connect(dsn) as connection:
            assert connection.execute("select count(distinct key) from idemconsumer.record").fetchone() == (11,)
            with pytest.raises(psycopg.errors.UniqueViolation):
                connection.execute("insert into idemconsumer.record select * from idemconsumer.record limit 1")


def test_fewer_keys_have_as_much_less_of_the_log_and_the_buffers() -> None:
    most, tenth = settings_for(100_000_000), settings_for(10_000_000)
    assert (most["max_wal_size"], tenth["max_wal_size"]) == ("32768MB", "3277MB")
    assert most["checkpoint_timeout"] == tenth["checkpoint_timeout"] == "30min"
    most_mb, tenth_mb = (int(each["shared_buffers"].removesuffix("MB")) for each in (most, tenth))
    assert abs(most_mb - 10 * tenth_mb) < 10


async def test_rounds_are_compared_with_their_neighbours_and_the_median_counts() -> None:
    ours, theirs = [30.0, 10.0, 40.0], [10.0, 10.0, 20.0]

    async def measure(values: list[float], number: int) -> float:
        return values[number]

    table = await side_by_side(
        "pace",
        {"ours": lambda n: measure(ours, n), "theirs": lambda n: measure(theirs, n)},
        [Target("ours", "theirs", 2.0), Target("ours", "nobody", 1.0)],
        rounds=3,
        say=lambda _: None,
    )
    assert [ratio.values for ratio in table.ratios] == [Spread(1.0, 2.0, 3.0)]
    assert table.ratios[0].met


def test_a_result_becomes_tables() -> None:
    ratio = Ratio(Target("ours", "theirs", 1.2, "at most"), Spread(1.0, 1.3, 1.4))
    table = Table("Cost", [Figure("ours", "ms", Spread(1.0, 2.0, 3.0), goal=2.5)], [ratio], {"lanes": 4})
    text = report.text(Result("part", [table], machine="2 cores", when="today"))
    assert "| ours | **2** (1 to 3) | ms | ≤ 2.5: met |" in text
    assert "| ours | theirs | **1.3** (1 to 1.4) | ≤ 1.2: missed |" in text


def test_small_loads_are_not_judged() -> None:
    ratio = Ratio(Target("ours", "theirs", 1.2), Spread(1.0, 1.3, 1.4))
    figure = Figure("ours", "ms", Spread(1.0, 2.0, 3.0), goal=2.5)
    text = report.text(Result("part", [Table("Cost", [figure], [ratio])], quick=True))
    assert "met" not in text
    assert "missed" not in text
    assert "| ≥ 1.2 |" in text


def test_what_has_a_goal_is_in_one_table() -> None:
    met, aimless = Figure("ours", "ms", Spread(1.0, 2.0, 3.0), goal=2.5), Figure("theirs", "ms", Spread(1.0, 2.0, 3.0))
    missed = Ratio(Target("ours", "theirs", 1.5), Spread(1.0, 1.3, 1.6))
    lines = report.targets([Result("part", [Table("Cost", [met, aimless], [missed])])]).splitlines()
    assert lines[2:] == [
        "| Cost | ours to theirs | ≥ 1.5 | 1.3 | **missed** |",
        "| Cost | ours, ms | ≤ 2.5 | 2 | met |",
    ]


def test_the_rates_beside_those_of_others_are_in_one_table() -> None:
    ours, theirs = (Figure(name, "messages/s", Spread(1.0, 2.0, 3.0)) for name in ("idemconsumer", "theirs"))
    tables = [Table("Kafka", [ours, theirs]), Table("Alone", [ours]), Table("Theirs", [theirs, ours])]
    lines = report.summary([Result("part", tables)]).splitlines()
    assert lines[2:] == ["| Kafka, messages/s | **2** | theirs 2 |"]
