"""Whole worker processes that are killed, or frozen past their lease and woken again: who takes over, and when."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from idemconsumer.rules.values import State
from tests.sagas.deployed import Order, Place
from tests.sagas.deployment import Deployment, Process, prepare
from tests.support.sagas import Bench
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database
from tests.support.waiting import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]

LEASE: Final = 1.0


@pytest.fixture(scope="module")
def _deployment_database(postgres18: PostgresServer) -> Iterator[Bench]:
    with fresh_database(postgres18.dsn) as dsn, closing(Bench(dsn)) as bench:
        yield prepare(bench)


@pytest.fixture
def deployment(_deployment_database: Bench, tmp_path: Path) -> Iterator[Deployment]:
    with closing(Deployment(_deployment_database, tmp_path, {"SAGA_LEASE": str(LEASE)})) as deployment:
        yield deployment


async def halted_worker(deployment: Deployment, order: Order) -> tuple[Process, Process]:
    """Of two workers, the one whose saga has come to its halt, and the other one."""
    while len(pair := [process for process in deployment.processes if process.alive]) < 2:
        await deployment.started()
    deployment.publish(order)
    pid = await deployment.halted(order.id)
    halted, other = sorted(pair, key=lambda process: process.pid != pid)
    return halted, other


# -------------------------------------------------------------------------------------------------------------- frozen
async def frozen_worker(deployment: Deployment, order: Order) -> tuple[Process, Process]:
    """As `halted_worker`. Neither loses its saga because the machine stands still: the one is at its halt before its
    lease could be over, and the other one has a long lease."""
    frozen = deployment.start(SAGA_LEASE="3")
    await frozen.ready()
    deployment.publish(order)
    assert await deployment.halted(order.id) == frozen.pid
    other = deployment.start(SAGA_LEASE="60")
    await other.ready()
    return frozen, other


@pytest.mark.parametrize("place", ["in tx", "in call", "between", "in the last tx"])
async def test_a_worker_frozen_past_its_lease_and_woken_writes_nothing(deployment: Deployment, place: Place) -> None:
    frozen, other = await frozen_worker(deployment, Order("r", halt=place, how="freeze"))
    await deployment.ended()
    before = deployment.contents()

    assert frozen.frozen
    frozen.signal(signal.SIGCONT)
    await until(lambda: bool(frozen.said("fenced")), "the woken worker says that it is fenced")
    await frozen.drain()

    assert deployment.contents() == before
    assert deployment.bench.state is State.COMPLETED
    assert deployment.effects("r") == ["created", "finished"]
    assert deployment.asked("r") == [("charge", 2 if place == "in call" else 1)]
    await other.drain()


@pytest.mark.parametrize("place", ["in tx", "in call", "between"])
async def test_a_worker_woken_while_another_one_is_at_its_saga_does_not_disturb_it(
    deployment: Deployment, place: Place
) -> None:
    bench = deployment.bench
    frozen, other = await frozen_worker(deployment, Order("r", halt=place, how="freeze", pause=0.7))
    taken_over = "select token from owner_change where old_worker <> worker"
    await until(lambda: bool(bench.run(taken_over)), "the saga is taken over")
    ((token,),) = bench.run(taken_over)
    before = bench.run("select * from effect where pid = %s", (frozen.pid,))

    frozen.signal(signal.SIGCONT)
    await until(lambda: bool(frozen.said("fenced")), "the woken worker says that it is fenced")
    assert bench.run("select token from idemconsumer.saga") == [(token,)], "the other one is still at it"
    await deployment.ended()
    await frozen.drain()

    assert bench.run("select * from effect where pid = %s", (frozen.pid,)) == before
    assert deployment.effects("r") == ["created", "finished"]
    assert len(deployment.asked("r")) == 1
    written_since = "select name from idemconsumer.step where token <> %s order by name"
    assert bench.run(written_since, (token,)) == ([] if place == "in tx" else [("created",)])
    await other.drain()


# -------------------------------------------------------------------------------------------------------- resume times
@pytest.mark.parametrize(
    ("stop", "place"),
    [("SIGKILL", "between"), ("SIGKILL", "in tx"), ("SIGSTOP", "in tx")],
)
@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])
async def test_a_saga_goes_on_within_its_lease_and_one_second(
    deployment: Deployment, stop: str, place: Place, rounds: int
) -> None:
    """From the signal to the first effect of the other worker, by the database's clock. The transaction of a frozen
    worker ends with `idle_in_transaction_session_timeout`, which is the lease. Other work on the machine may delay some
    rounds, and no rule of ours would delay but some."""
    times: list[float] = []
    in_time = 0
    while in_time < rounds and len(times) < 2 * rounds + 3:
        number = len(times)
        order = Order(f"r{number}", halt=place, how="freeze" if stop == "SIGSTOP" else "hang")
        stopped, other = await halted_worker(deployment, order)
        at = deployment.bench.run("select at from halted where saga = %s", (order.id,))
        if stop == "SIGKILL":
            at = deployment.bench.run("select clock_timestamp()")
            stopped.kill()
        await deployment.ended(number + 1)
        first = deployment.bench.run("select min(at) from effect where saga = %s and pid = %s", (order.id, other.pid))
        times.append((first[0][0] - at[0][0]).total_seconds())
        in_time += times[-1] <= LEASE + 1
        assert deployment.effects(order.id) == ["created", "finished"]
        stopped.kill()
    told = ", ".join(f"{seconds:.2f}" for seconds in times)
    print(f"{stop} {place}, lease {LEASE:g} s: goes on after {told} s")
    assert in_time == rounds, told
