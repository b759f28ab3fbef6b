"""Sagas of two versions while a deployment rolls, workers are killed, and connections stall and break.

As `test_storm` this is a test of liveness, and of nobody running what is another version's (L28). The short one meets
one trouble after another, at points where its sagas halt. It fails without L28, L29 and L37. It does not notice a fence
without tokens, nor a step under a lease that is nearly over (L38), which take two writers within milliseconds, nor code
that swallows its cancellation (L34), which it has not: these are in `test_fence`, `test_lease` and `test_endless`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Final

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.rules.values import State
from tests.sagas.deployed import Order
from tests.sagas.deployment import Deployment, Process, prepare
from tests.support.away import away
from tests.support.sagas import Bench
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database
from tests.support.servers.proxy import Proxy
from tests.support.waiting import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]

SAGAS: Final = 24
LEASE: Final = 1.0
NOTES: Final = {"SAGA_VERSION": "2", "SAGA_NOTES": "1", "IDEMCONSUMER_BUILD": "with notes"}
BOUND: Final = 120.0  # seconds from the first trouble to the last end


@pytest.fixture
def deployment(postgres18: PostgresServer, tmp_path: Path) -> Iterator[Deployment]:
    with (
        fresh_database(postgres18.dsn) as dsn,
        closing(prepare(Bench(dsn))) as bench,
        closing(Deployment(bench, tmp_path, {"SAGA_LEASE": str(LEASE), "REMOTE_DSN": dsn})) as deployment,
    ):
        yield deployment


class Fleet:
    """Workers of both versions, each behind a proxy of its own."""

    def __init__(self, deployment: Deployment, far: str, proxies: AsyncExitStack, chance: random.Random) -> None:
        """`far`: its database as workers reach it."""
        self._deployment = deployment
        self._far = far
        self._proxies = proxies
        self._chance = chance
        self.version: dict[int, str] = {}  # by pid
        self._alive: list[tuple[Process, Proxy]] = []
        self.kills = self.stalls = 0

    async def add(self, version: str) -> None:
        proxy = await self._proxies.enter_async_context(Proxy(int(str(conninfo_to_dict(self._far)["port"]))))
        dsn = make_conninfo(self._far, host="127.0.0.1", port=proxy.port)
        process = self._deployment.start(IDEMCONSUMER_DSN=dsn, SAGA_VERSION=version)
        self.version[process.pid] = version
        self._alive.append((process, proxy))

    async def replace(self, version: str | None = None) -> None:
        """Kill one; instead of it comes one of this version, or of the same."""
        killed, _ = self._chance.choice(self._alive)
        self._alive = [each for each in self._alive if each[0] is not killed]
        killed.kill()
        self.kills += 1
        await self.add(version or self.version[killed.pid])
        self._deployment.bench.run("update idemconsumer.queue set visible_at = now()")  # what it had: else in 10 s

    async def roll(self, version: str) -> None:
        """All are killed at once, and workers of this version are ready."""
        old, self._alive = self._alive, []
        for process, _ in old:
            process.kill()
            await self.add(version)
        self._deployment.bench.run("update idemconsumer.queue set visible_at = now()")
        await asyncio.gather(*(process.ready() for process, _ in self._alive))

    async def stall(self) -> None:
        """All that one worker says and hears is lost for two leases; then its connections break."""
        _, proxy = self._chance.choice(self._alive)
        self.stalls += 1
        proxy.freeze()
        await asyncio.sleep(2 * LEASE)
        proxy.cut()
        proxy.thaw()
        await proxy.restore()


def claimed(bench: Bench) -> int:
    ((count,),) = bench.run("select count(*) from idemconsumer.record")
    return int(count)


def over(bench: Bench, sagas: int) -> bool:
    ((ended,),) = bench.run("select count(*) from idemconsumer.record where state in (3, 4, 5)")
    return bool(ended == sagas) and not bench.held


@pytest.mark.long
async def test_a_rolling_deployment_in_a_storm_loses_no_saga_and_mixes_no_versions(
    deployment: Deployment,
) -> None:
    seed = int(os.environ.get("STORM_SEED", random.SystemRandom().randrange(10_000)))
    chance, bench, sagas = random.Random(seed), deployment.bench, SAGAS
    orders = [Order(f"s{n}", pause=chance.uniform(0.2, 0.4)) for n in range(sagas)]
    begun = time.monotonic()
    async with away(bench.dsn) as far, AsyncExitStack() as proxies:
        fleet = Fleet(deployment, far, proxies, chance)
        for _ in range(2):
            await fleet.add("1")
        for order in orders[: sagas // 2]:
            deployment.publish(order)
        await until(lambda: claimed(bench) == sagas // 2, "the old workers have begun their sagas")
        await fleet.roll("2")
        for order in orders[sagas // 2 :]:
            deployment.publish(order)
        await until(lambda: claimed(bench) == sagas, "the new workers have begun theirs")
        left = bench.run("select count(*) from idemconsumer.saga where version = '1' and parked is null")
        assert left > [(0,)], "old sagas wait for an old worker, and nobody has put them aside"
        await fleet.add("1")
        stalling = asyncio.create_task(fleet.stall())
        await asyncio.sleep(chance.uniform(0.5, 1.0))
        await fleet.replace()
        await stalling
        while not over(bench, sagas):
            left = bench.run("select version, worker, parked, error from idemconsumer.saga")
            assert time.monotonic() - begun < BOUND, f"seed {seed}: {left}"
            await asyncio.sleep(0.1)
        took = time.monotonic() - begun
        deployment.close()
    print(f"seed {seed}: {took:.0f} s, {fleet.kills} kills, {fleet.stalls} stalls")
    assert bench.letters == []
    assert bench.run("select count(*) from idemconsumer.record where state = %s", (State.COMPLETED,)) == [(sagas,)]
    for order in orders:
        told = f"seed {seed}, {order}"
        assert deployment.effects(order.id) == ["created", "finished"], told
        assert [name for name, _ in deployment.asked(order.id)] == ["charge"], told
        pids = bench.run("select pid from effect where saga = %s", (order.id,))
        assert len({fleet.version[pid] for (pid,) in pids}) == 1, told
    began = {fleet.version[pid] for (pid,) in bench.run("select pid from effect")}
    assert began == {"1", "2"}, f"seed {seed}: sagas of both versions"
    assert bench.run("select old_token, token from owner_change where token < old_token") == [], f"seed {seed}"


async def test_each_trouble_of_a_deployment_once(deployment: Deployment) -> None:
    bench = deployment.bench
    port = int(str(conninfo_to_dict(bench.dsn)["port"]))
    async with Proxy(port) as proxy:
        stalling = make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port)
        hogged = deployment.start(SAGA_VERSION="1", SAGA_TIMEOUT="1s")
        await hogged.ready()
        deployment.publish(Order("hogged", halt="between", how="hog"))
        await deployment.halted("hogged")

        stalled = deployment.start(SAGA_VERSION="1", IDEMCONSUMER_DSN=stalling)
        await stalled.ready()
        deployment.publish(Order("stalled", halt="in call"))
        assert await deployment.halted("stalled") == stalled.pid
        proxy.freeze()
        await until(lambda: not hogged.alive, "a worker whose event loop stands still is ended")

        first = deployment.start(SAGA_VERSION="2")
        await first.ready()
        deployment.publish(Order("new"))
        await until(lambda: deployment.effects("new") == ["created", "finished"], "a worker of version 2 runs its own")
        second = deployment.start(**NOTES)
        await second.ready()
        first.kill()
        first = deployment.start(SAGA_VERSION="2")  # started again after a canary, and older all the same
        await first.ready()
        await until(lambda: abandoned_for(bench, 2 * LEASE), "the worker of version 2 has looked at those of version 1")
        assert bench.letters == [], "they wait for a worker of theirs"

        first.signal(signal.SIGSTOP)
        deployment.publish(Order("noted", halt="in the last tx"))
        assert await deployment.halted("noted") == second.pid
        second.kill()
        first.signal(signal.SIGCONT)
        await until(
            lambda: first.said("saga left to a worker of another build"),
            "the older worker meets a step that it does not know",
        )
        assert bench.letters == []

        for environment in NOTES, {"SAGA_VERSION": "1"}:
            deployment.start(**environment)
        await deployment.ended(4)
        proxy.cut()
        proxy.thaw()
        await proxy.restore()
        await until(lambda: stalled.said("lease registered again"), "it has lost its saga, and lives")
    assert bench.letters == []
    for name in ("hogged", "stalled", "new", "noted"):
        noted = ["noted"] if name == "noted" else []
        assert deployment.effects(name) == ["created", *noted, "finished"], name
        assert [called for called, _ in deployment.asked(name)] == ["charge"], name
    assert bench.run("select old_token, token from owner_change where token < old_token") == []


def abandoned_for(bench: Bench, seconds: float) -> bool:
    """No saga of version 1 has had a live worker for so long."""
    ((left, held),) = bench.run(
        "select count(*), count(*) filter (where w.until > clock_timestamp() - make_interval(secs => %s))"
        " from idemconsumer.saga as s left join idemconsumer.worker as w on w.id = s.worker where s.version = '1'",
        (seconds,),
    )
    return bool(left and not held)
