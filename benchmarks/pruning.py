"""What pruning takes: its pace, what it leaves to a worker beside it, and a pass that has nothing to do."""

from __future__ import annotations

import asyncio
import secrets
import time

import psycopg

from benchmarks._crew import LANES, crew
from benchmarks._loads import Load
from benchmarks._measure import Figure, Result, Spread, Subject, Table, Target, side_by_side
from benchmarks._sizes import OURS
from benchmarks._stage import SCHEMA, Stage
from idemconsumer.worker.retention import prune_once

ALONE, BESIDE = "alone", "beside the pruner"


async def pruning(stage: Stage) -> Result:
    """Records with a result each; with and without a worker beside."""
    count = 50_000 if stage.quick else 300_000
    rounds = 2 if stage.quick else 5
    pace: dict[str, list[float]] = {ALONE: [], BESIDE: [], "nothing to do": []}
    async with crew(stage) as team:

        def subject(*, prune: bool) -> Subject:
            async def measured(number: int) -> float:
                with stage.database() as dsn:
                    await asyncio.to_thread(make_expired, dsn, count)
                    await team.ask(OURS, Load(prefix=secrets.token_hex(3), count=2_000), dsn)
                    pruner = _Pruner(dsn) if prune else None
                    load = Load(prefix=secrets.token_hex(3), count=10_000_000, seconds=1.0 if stage.quick else 8.0)
                    (answer,) = await team.ask(OURS, load, dsn)
                    if pruner is not None:
                        pace[BESIDE].append(pruner.pace(count))
                        await pruner.stop()
                    await team.close()
                    return float(answer["count"]) / float(answer["seconds"])

            return measured

        table = await side_by_side(
            "A worker beside the pruner",
            {ALONE: subject(prune=False), BESIDE: subject(prune=True)},
            [Target(BESIDE, ALONE, 0.9)],
            rounds=rounds,
            say=stage.say,
            facts={"lanes": LANES, "expired records": count},
        )
    for _ in range(rounds):
        with stage.database() as dsn:
            await asyncio.to_thread(make_expired, dsn, count)
            began = time.monotonic()
            await prune_once(dsn, SCHEMA)
            pace[ALONE].append(count / (time.monotonic() - began))
            await asyncio.to_thread(make_expired, dsn, count, expired=False)
            await prune_once(dsn, SCHEMA)
            began = time.monotonic()
            with psycopg.connect(dsn) as connection:
                connection.execute("update idemconsumer.upkeep set until = clock_timestamp()")
            await prune_once(dsn, SCHEMA, every=60.0)
            pace["nothing to do"].append((time.monotonic() - began) * 1e3)
    figures = [
        Figure(f"deleted {ALONE}", "keys/s", Spread.of(pace[ALONE])),
        Figure(f"deleted {BESIDE.replace('pruner', 'worker')}", "keys/s", Spread.of(pace[BESIDE])),
        Figure("a pass with nothing to do", "ms", Spread.of(pace["nothing to do"])),
    ]
    return Result("pruning", [table, Table("Pruning", figures, facts={"records": count})])


class _Pruner:
    """One pass, under way."""

    def __init__(self, dsn: str) -> None:
        self._began = time.monotonic()
        self._done = (0.0, 0.0)  # seconds, and the share
        self._task = asyncio.create_task(prune_once(dsn, SCHEMA, every=60.0, progress=self._note))

    def _note(self, done: int, ranges: int) -> None:
        self._done = (time.monotonic() - self._began, done / ranges)

    def pace(self, count: int) -> float:
        seconds, share = self._done
        return count * share / seconds if seconds else 0.0

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def make_expired(dsn: str, count: int, *, expired: bool = True) -> None:
    """Random keys, as hashes are, in the heap in the order of their time."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")  # the guard would note each row until the commit
        connection.execute("insert into idemconsumer.scope (name) values ('others') on conflict do nothing")
        connection.execute(
            "insert into idemconsumer.record (key, scope_id, state, fingerprint, canonical, changed_at)"
            " select sha256(int8send(n)), s.id, 3, sha256(int8send(-n)), substring(sha256(int8send(-n)) for 16),"
            " clock_timestamp() - make_interval(days => %s)"
            " from generate_series(1, %s::bigint) n, idemconsumer.scope s where s.name = 'others'",
            (15 if expired else 0, count),
        )
        connection.execute(
            "insert into idemconsumer.result (key, body, content_type)"
            " select key, '{\"ok\": true}', 'application/json' from idemconsumer.record on conflict do nothing"
        )
        connection.execute("vacuum analyze idemconsumer.record")
        connection.execute("vacuum analyze idemconsumer.result")
        connection.execute("checkpoint")
