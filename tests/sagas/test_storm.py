"""Many sagas while their workers are killed and frozen: all end, once, and no owner follows a later one.

This is a test of liveness. A storm meets the narrow races too rarely to prove their rules; `test_fence` does that.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from idemconsumer.rules.values import State
from tests.sagas.deployed import Ends, Order
from tests.sagas.deployment import Deployment, Process, prepare
from tests.support.away import away
from tests.support.sagas import Bench
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database

pytestmark = [pytest.mark.kill, pytest.mark.slow]

WORKERS: Final = 3
LEASE: Final = 1.0
STORM: Final = 45.0  # seconds after which the workers are left alone; most storms are over before that
BOUND: Final = 120.0  # seconds from the first kill to the last end

EFFECTS: Final[dict[Ends, list[str]]] = {
    "booked": ["created", "finished"],
    "declined": ["created", "cancelled ride {}"],
    "refused": ["created", "cancelled ride {}"],
}
CALLS: Final[dict[Ends, list[str]]] = {
    "booked": ["charge"], "declined": ["charge"], "refused": ["charge", "refund 7"],
}  # fmt: skip


@pytest.fixture
async def deployment(postgres18: PostgresServer, tmp_path: Path) -> AsyncIterator[Deployment]:
    with fresh_database(postgres18.dsn) as dsn, closing(prepare(Bench(dsn))) as bench:
        async with away(dsn) as far:
            environment = {"SAGA_LEASE": str(LEASE), "IDEMCONSUMER_DSN": far}
            with closing(Deployment(bench, tmp_path, environment)) as deployment:
                yield deployment


class Storm:
    """Each second a kill; now and then a worker is frozen for two leases. A killed one is replaced at once."""

    def __init__(self, deployment: Deployment, sagas: int, chance: random.Random) -> None:
        self._deployment = deployment
        self._sagas = sagas
        self._chance = chance
        self.kills = self.freezes = 0
        self._thaws: set[asyncio.Task[None]] = set()

    async def rage(self, seconds: float) -> None:
        """Until all sagas have ended, at most for so long."""
        end = time.monotonic() + seconds
        while not over(self._deployment.bench, self._sagas) and time.monotonic() < end:
            alive = [process for process in self._deployment.processes if process.alive]
            if self._chance.random() < 0.4:
                self._freeze(self._chance.choice(alive))
            await asyncio.sleep(self._chance.uniform(0.2, 0.8))
            self._chance.choice(alive).kill()
            self.kills += 1
            self._deployment.start()
            await asyncio.sleep(0.5)
        await asyncio.gather(*self._thaws)

    def _freeze(self, process: Process) -> None:
        async def thaw() -> None:
            await asyncio.sleep(2 * LEASE)
            if process.alive:
                process.signal(signal.SIGCONT)

        process.signal(signal.SIGSTOP)
        self.freezes += 1
        self._thaws.add(asyncio.create_task(thaw()))


def over(bench: Bench, sagas: int) -> bool:
    ((ended,),) = bench.run("select count(*) from idemconsumer.record where state in (3, 4, 5)")
    return bool(ended == sagas) and not bench.held


@pytest.mark.parametrize("sagas", [30, pytest.param(300, marks=pytest.mark.long)])
async def test_a_storm_of_kills_and_freezes_loses_no_saga_and_repeats_no_effect(
    deployment: Deployment, sagas: int
) -> None:
    seed = int(os.environ.get("STORM_SEED", random.SystemRandom().randrange(10_000)))
    chance = random.Random(seed)
    kinds: list[Ends] = ["booked", "booked", "declined", "refused"]
    orders = [Order(f"s{n}", ends=chance.choice(kinds), pause=chance.uniform(0.01, 0.15)) for n in range(sagas)]
    bench, storm = deployment.bench, Storm(deployment, sagas, chance)
    for _ in range(WORKERS):
        await deployment.started()
    for order in orders:
        deployment.publish(order)
    begun = time.monotonic()
    await storm.rage(STORM)
    # A message whose worker was killed before it settled it comes again, as a duplicate.
    while not over(bench, sagas) or bench.run("select 1 from idemconsumer.queue"):
        assert time.monotonic() - begun < BOUND, f"seed {seed}: {bench.run('select count(*) from idemconsumer.saga')}"
        await asyncio.sleep(0.1)
    took = time.monotonic() - begun
    for process in deployment.processes:
        if process.alive:
            await process.drain()

    print(f"seed {seed}: {took:.0f} s, {storm.kills} kills, {storm.freezes} freezes,", takeovers(bench), "takeovers")
    assert bench.letters == []
    ends: Counter[int] = Counter(state for (state,) in bench.run("select state from idemconsumer.record"))
    booked = sum(order.ends == "booked" for order in orders)
    assert ends == {State.COMPLETED: booked, State.FAILED: sagas - booked}, f"seed {seed}"
    for order in orders:
        told = f"seed {seed}, {order}"
        assert deployment.effects(order.id) == [step.format(order.id) for step in EFFECTS[order.ends]], told
        assert sorted(name for name, _ in deployment.asked(order.id)) == CALLS[order.ends], told
    assert bench.run("select old_token, token from owner_change where token < old_token") == [], f"seed {seed}"
    taken_over = "select old_token, token from owner_change where worker is not null and worker <> old_worker"
    assert bench.run(taken_over + " and token <= old_token") == [], f"seed {seed}: a new owner with an old token"
    assert bench.run("select 1 from idemconsumer.queue") == []


def takeovers(bench: Bench) -> int:
    ((count,),) = bench.run("select count(*) from owner_change where token > old_token")
    return int(count)
