"""Workers on record (O13), and one that is asked to leave (O15)."""

from __future__ import annotations

import pytest

from idemconsumer import App, ConfigurationError, Saga, Tx
from idemconsumer.admin.control import Controls
from idemconsumer.ports.broker import Lag
from idemconsumer.worker import steering
from idemconsumer.worker.reporting import Reporting
from idemconsumer.worker.retention import prune_once
from tests.support.logs import LogCapture, times
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE
from tests.support.workers import SCHEMA, Bench, Item, note


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leaves is off the record, however slow the database is just then."""
    tuned(monkeypatch, steering_farewell=PATIENCE)


@pytest.fixture
def app() -> App:
    app = App("shop")

    @app.idempotent_handler("postgres:mails", key="id")
    async def send(item: Item, tx: Tx) -> None:
        await note(tx, item)

    @app.idempotent_handler("postgres:rides", key="id")
    async def book(item: Item, saga: Saga) -> None:
        await saga.tx("noted", note, item)

    return app


async def test_a_worker_is_on_record_from_its_start_to_its_end(bench: Bench, app: App) -> None:
    controls = Controls(bench.dsn, SCHEMA)
    async with bench.running(app) as running:
        bench.enqueue("mails", Item("a"))
        await running.until_count(applied=1)
        (line,) = await controls.workers("shop")
        assert (line.app, line.state, line.version, line.live) == ("shop", "running", steering._version(), True)
        assert line.handlers["send"].sources == ["postgres:mails"]
        assert await controls.workers("elsewhere") == []
    assert await controls.workers() == []


async def test_it_says_what_it_has_done_and_comes_back_if_its_row_was_pruned(
    bench: Bench, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, steering_pause=0.1, steering_retry_pause=0.1)
    monkeypatch.setattr(Reporting, "lag", {"postgres:mails": Lag(7)})
    outcomes = (
        "select handlers #>> '{send,outcomes,applied}' from idemconsumer.process where state = 'running'"
        " and handlers #>> '{send,lag,postgres:mails,messages}' = '7'"
    )
    async with bench.running(app) as running:
        bench.enqueue("mails", Item("a"))
        await running.until(lambda: bench.do(outcomes) == [("1",)])
        bench.do("delete from idemconsumer.process; select setval('idemconsumer.process_id_seq', 1, false)")
        await running.until(lambda: bench.do(outcomes) == [("1",)])
        assert bench.do("select * from idemconsumer.sequences_behind()") == [], "as after a restore (R43)"


async def test_one_that_was_killed_is_lost_for_an_hour(bench: Bench, app: App) -> None:
    bench.do(
        "insert into idemconsumer.process (app, host, pid, place, version, state, handlers, started_at, seen_at)"
        " select 'shop', 'box', n, 0, '0.1', 'running', '{}', now(), now() - n * interval '1 minute'"
        " from unnest(array[1, 61]) as n"
    )
    controls = Controls(bench.dsn, SCHEMA)
    assert [line.state for line in await controls.workers()] == ["lost", "lost"]
    await prune_once(bench.dsn, SCHEMA)
    assert [line.pid for line in await controls.workers()] == [1]


async def test_a_program_that_runs_sagas_is_listed_by_its_lease(bench: Bench, app: App) -> None:
    """It is on no record."""
    async with bench.running(app) as running:
        bench.enqueue("rides", Item("a"))
        await running.until_count(applied=1)
        bench.do("update idemconsumer.process set pid = -1")
        other, unknown = await Controls(bench.dsn, SCHEMA).workers()
    assert (other.pid, unknown.state, unknown.id, list(unknown.handlers)) == (-1, "unrecorded", None, ["book"])


async def test_one_is_drained_and_the_other_goes_on(bench: Bench, app: App, logged: LogCapture) -> None:
    controls = Controls(bench.dsn, SCHEMA)
    recorded = "select count(*)::int from idemconsumer.process"
    async with bench.running(app) as stays:
        await stays.until(lambda: bench.do(recorded) == [(1,)])
        async with bench.running(app) as leaves:
            await leaves.until(lambda: bench.do(recorded) == [(2,)])
            first, second = sorted(line.id or 0 for line in await controls.workers())
            assert await controls.drain(second, by="ann", reason="its machine is replaced")
            await leaves.until(leaves.task.done)
        assert not stays.task.done()
        bench.enqueue("mails", Item("a"))
        await stays.until_count(applied=1)
        assert [line.id for line in await controls.workers()] == [first]
        with pytest.raises(ConfigurationError, match=f"no live worker has the id {second}; live are: {first} "):
            await controls.drain(second, by="ann")
    (entry,) = await controls.audit()
    assert (entry.what, entry.by, entry.reason) == ("drain", "ann", "its machine is replaced")
    assert entry.target.startswith(f"worker {second} (shop, ")
    assert times(logged, "draining") == 2
