"""Runs a real launcher, kills what it is told to, and counts effects from outside."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psycopg

from tests.support import ROOT, forked
from tests.support.pids import alive, children
from tests.support.waiting import until

STORM_PATIENCE = 150.0  # seconds until a wait is given up as lost

Event = Callable[[], Coroutine[object, object, None]]


class Mill:
    """One launcher with its workers, and the witness table they write to."""

    def __init__(self, dsn: str, far: str, environment: Mapping[str, str], *, workers: int, seed: int) -> None:
        """`far`: the same database as its workers reach it."""
        self._dsn = dsn
        self._environment = {**os.environ, "IDEMCONSUMER_DSN": far, **environment}
        self._workers = workers
        self._chance = random.Random(seed)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._log = Path(os.environ.get("KILL_LOG", os.devnull)).open("ab")  # noqa: SIM115 - closed in stop

    def start(self) -> None:
        command = [sys.executable, "-m", "idemconsumer", "run", "tests.kill.app:app"]
        options = ["--workers", str(self._workers), "--concurrency", "4", "--max-restarts", "100"]
        self._launcher = forked.Popen(
            [*command, *options], cwd=ROOT, env=self._environment, stdout=self._log, stderr=self._log
        )

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        assert self._launcher is not None
        return self._launcher

    def children(self) -> list[int]:
        return children(self.launcher.pid)

    async def kill_child(self) -> None:
        """SIGKILL one worker; its launcher starts another."""
        await until(self._kill_one, "a worker lives", STORM_PATIENCE)

    def _kill_one(self) -> bool:
        """False if there is none, or the one that was chosen has just ended by itself."""
        if workers := [child for child in self.children() if alive(child)]:
            with suppress(ProcessLookupError):
                os.kill(self._chance.choice(workers), signal.SIGKILL)
                return True
        return False

    async def kill_launcher(self) -> None:
        """SIGKILL the parent. Its workers must end by themselves; then another one is started."""
        orphans = self.children()
        self.launcher.kill()
        self.launcher.wait()
        await until(lambda: not any(map(alive, orphans)), "orphaned workers end", STORM_PATIENCE)
        self.start()

    async def drain(self) -> int:
        """SIGTERM; the exit code. Not before there is a worker: a launcher that is still importing dies of it, as any
        program does, and has nothing to drain."""
        await until(self.children, "the launcher has started a worker", STORM_PATIENCE)
        self.launcher.terminate()
        return await asyncio.to_thread(self.launcher.wait, STORM_PATIENCE)

    def stop(self) -> None:
        if self._launcher is not None and self._launcher.poll() is None:
            orphans = self.children()
            self._launcher.kill()
            self._launcher.wait()
            for child in orphans:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        self._log.close()

    async def applied(self) -> int:
        """Rows in the witness; -1 while the database is away."""
        try:
            async with await psycopg.AsyncConnection.connect(self._dsn, connect_timeout=2) as connection:
                row = await (await connection.execute("select count(distinct id) from witness")).fetchone()
                return int(row[0]) if row else 0
        except psycopg.OperationalError:
            return -1

    async def through(self, events: list[Event], total: int) -> None:
        """Let each event happen at its share of the progress, in random order, then wait for all messages."""
        self._chance.shuffle(events)
        for number, event in enumerate(events, start=1):
            mark = total * number // (len(events) + 2)
            await until(partial(self._reached, mark), f"{mark} of {total} applied", STORM_PATIENCE)
            await event()
        await until(partial(self._reached, total), f"all {total} applied", STORM_PATIENCE)

    async def _reached(self, count: int) -> bool:
        return await self.applied() >= count

    async def effects(self) -> list[str]:
        """Whose rows are in the witness, in the order of their inserts."""
        async with await psycopg.AsyncConnection.connect(self._dsn) as connection:
            rows = await (await connection.execute("select id from witness order by place")).fetchall()
        return [name for (name,) in rows]

    async def verdict(self, expected: set[str]) -> tuple[int, int]:
        """(lost, twice)"""
        async with await psycopg.AsyncConnection.connect(self._dsn) as connection:
            rows = await (await connection.execute("select id, count(*) from witness group by id")).fetchall()
        counts: dict[str, int] = dict(rows)
        return len(expected - counts.keys()), sum(count - 1 for count in counts.values())
