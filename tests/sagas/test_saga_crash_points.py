"""A worker dies at any point of a saga; another one ends it, and no step has its effect twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import pytest

from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import State
from idemconsumer.settings import load
from tests.sagas import crashing_saga as crashing
from tests.support import forked
from tests.support.points import Points
from tests.support.sagas import Bench
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database
from tests.support.waiting import until

# How often each point is passed on the way of each kind of saga; the worker dies at each of these times.
PASSES: Final[dict[str, dict[Point | SagaPoint, int]]] = {
    "plain": {
        Point.CLAIMED: 1,
        Point.SETTLING: 1,
        Point.SETTLED: 1,
        SagaPoint.STEP_OPENING: 2,
        SagaPoint.STEP_COMMITTING: 2,
        SagaPoint.STEP_COMMITTED: 2,
        SagaPoint.INTENDING: 1,
        SagaPoint.INTENDED: 1,
        SagaPoint.CALLED: 1,
        SagaPoint.STEP_RECORDED: 1,
        Point.SEALING: 1,
        Point.COMMITTED: 1,
    },
    "flaky": {SagaPoint.RELEASED: 1, SagaPoint.STEP_OPENING: 3},
    "sleepy": {SagaPoint.PAUSING: 1, SagaPoint.PAUSED: 1},
    "refused": {
        SagaPoint.STEP_RECORDED: 2,
        Point.REJECTING: 1,
        Point.REJECTED: 1,
        SagaPoint.UNDOING: 2,
        SagaPoint.CALLED: 2,
        SagaPoint.UNDONE: 2,
        Point.SEALING: 1,
        Point.COMMITTED: 1,
    },
}

CASES: Final = [
    (name, point, nth)
    for name, passes in PASSES.items()
    for point, times in passes.items()
    for nth in range(1, times + 1)
    if not (name != "plain" and nth <= PASSES["plain"].get(point, 0) and point not in (Point.SEALING, Point.COMMITTED))
]

ENDS: Final = {
    "plain": (State.COMPLETED, ["created", "booked"], ["charge"]),
    "flaky": (State.COMPLETED, ["created", "stumbled", "booked"], ["charge"]),
    "sleepy": (State.COMPLETED, ["created", "booked"], ["charge"]),
    "refused": (State.FAILED, ["created", "undo created"], ["charge", "refuse", "refund 7"]),
}


def test_every_point_of_a_saga_is_among_those_that_a_worker_dies_at() -> None:
    assert {point for _, point, _ in CASES} >= set(SagaPoint)


@pytest.fixture(scope="module")
def _crash_database(postgres18: PostgresServer) -> Iterator[Bench]:
    with fresh_database(postgres18.dsn) as dsn, closing(Bench(dsn)) as bench:
        bench.run("create table remote (at bigint generated always as identity, key uuid, name text)")
        bench.run("create table step_ok (id text)")
        yield bench


@pytest.fixture
def scene(_crash_database: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    _crash_database.clear()
    _crash_database.run("truncate remote, step_ok, idemconsumer.queue")
    monkeypatch.setenv("IDEMCONSUMER_DSN", _crash_database.dsn)
    return _crash_database


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize(("name", "point", "nth"), CASES, ids=lambda value: str(value))
async def test_another_worker_ends_what_a_dead_one_began(
    scene: Bench, points: Points, name: str, point: Point | SagaPoint, nth: int
) -> None:
    scene.run("select idemconsumer.publish(%s, jsonb_build_object('id', %s::text))", (crashing.QUEUE, name))
    died = await asyncio.to_thread(
        forked.run, "tests.sagas.crashing_saga", f"{point}:{nth}", env=os.environ, seconds=30
    )
    assert died.returncode == -signal.SIGKILL, died.stdout
    scene.run("update idemconsumer.worker set until = clock_timestamp() - interval '1 s'")
    scene.run("update idemconsumer.queue set visible_at = clock_timestamp()")

    def ended() -> bool:
        queued = scene.run("select 1 from idemconsumer.queue")
        return not queued and not scene.held and bool(scene.run("select 1 from idemconsumer.record"))

    worker = crashing.app.worker(load(concurrency=2), points)
    running = asyncio.create_task(worker.run())
    await until(ended, "the saga has ended")
    worker.drain()
    await running

    state, effects, remote = ENDS[name]
    assert (scene.state, scene.effects, scene.letters) == (state, effects, [])
    calls = scene.run("select key, name from remote order by at")
    assert list(dict.fromkeys(called for _, called in calls)) == remote
    assert len({key for key, _ in calls}) == len(remote), "each call has one key"
    unstored = point is SagaPoint.CALLED
    assert len(calls) == len(remote) + unstored, "only a call whose output was not stored is repeated"
