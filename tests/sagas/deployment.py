"""Real worker processes of `deployed`, killed, frozen and woken from outside, and a database that notes each owner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from idemconsumer.process.child import LIFELINE
from tests.sagas import deployed
from tests.sagas.deployed import Order
from tests.support import ROOT, forked
from tests.support.pids import frozen
from tests.support.sagas import Bench
from tests.support.waiting import until

# Every change of a saga's row in the order in which the row was changed: its lock is held while this is written.
_AUDIT = """
create table owner_change (
    id bigint generated always as identity, at timestamptz not null default clock_timestamp(),
    key bytea, old_token bigint, token bigint, old_worker bigint, worker bigint, state smallint
);
create function note_owner() returns trigger language plpgsql as $$
begin
    insert into owner_change (key, old_token, token, old_worker, worker, state)
    values (coalesce(new.key, old.key), old.token, new.token, old.worker, new.worker, new.state);
    return null;
end $$;
create trigger note_owner after insert or update or delete on idemconsumer.saga
    for each row execute function note_owner();
"""

_WRITTEN = (
    "idemconsumer.record", "idemconsumer.result", "idemconsumer.saga", "idemconsumer.step", "idemconsumer.dead_letter",
    "idemconsumer.attempt", "idemconsumer.queue", "effect", "owner_change",
)  # fmt: skip


def prepare(bench: Bench) -> Bench:
    """`bench.effects` is not for this database: its effects are those of `deployed`."""
    bench.run("drop table effect")
    bench.script(deployed.TABLES + _AUDIT)
    return bench


# Workers are started as their launcher would, so that signals reach them directly.
_LIFELINE, _ = os.pipe()


class Process:
    """One worker process."""

    def __init__(
        self, log: Path, environment: Mapping[str, str], concurrency: int, app: str = "tests.sagas.deployed:app"
    ) -> None:
        self._log = log
        command = [sys.executable, "-m", "idemconsumer", "run", app, "--log-format", "json"]
        with log.open("wb") as stream:
            self._process = forked.Popen(
                [*command, "--concurrency", str(concurrency)], pass_fds=(_LIFELINE,), stdout=stream, stderr=stream,
                cwd=ROOT, env={**os.environ, **environment, LIFELINE: str(_LIFELINE)},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def frozen(self) -> bool:
        return frozen(self.pid)

    def said(self, event: str) -> list[dict[str, Any]]:
        """Its log lines of this event."""
        lines = self._log.read_text().splitlines()
        told = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in told if line["event"] == event]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    async def ready(self) -> None:
        """It has a lease and looks for sagas."""
        await until(lambda: any(line["feed"] == "saga" for line in self.said("consuming")), "a worker is ready")

    async def drain(self) -> None:
        """Not before it is ready: a process that has no handler for SIGTERM yet dies of it, with code -15."""
        await self.ready()
        self.signal(signal.SIGTERM)
        code = await asyncio.to_thread(self._process.wait, 30)
        assert code == 0, f"exit code {code}\n{self._log.read_text()}"


class Deployment:
    """The processes of one test on one database. Ended with SIGKILL by `close`."""

    def __init__(self, bench: Bench, folder: Path, environment: Mapping[str, str], *, concurrency: int = 4) -> None:
        self.bench = bench
        self._folder = folder
        self._environment = {"IDEMCONSUMER_DSN": bench.dsn, **environment}
        self._concurrency = concurrency
        self.processes: list[Process] = []
        bench.clear()
        bench.run("truncate remote, halted, owner_change, idemconsumer.queue")

    def start(self, **environment: str) -> Process:
        """`environment`: of this process alone."""
        log = self._folder / f"worker-{len(self.processes)}.log"
        process = Process(log, {**self._environment, **environment}, self._concurrency)
        self.processes.append(process)
        return process

    async def started(self) -> Process:
        process = self.start()
        await process.ready()
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()

    def publish(self, order: Order) -> None:
        body = msgspec.json.encode(order).decode()
        self.bench.run("select idemconsumer.publish(%s, %s::jsonb)", (deployed.QUEUE, body))

    async def halted(self, saga: str) -> int:
        """That saga has come to its halt; the pid of the process that it halts in, which is frozen if it is to be."""
        found: list[tuple[Any, ...]] = []

        def there() -> bool:
            found[:] = self.bench.run("select pid from halted where saga = %s", (saga,))
            return bool(found)

        await until(there, f"{saga} halts")
        return int(found[0][0])

    async def ended(self, count: int = 1) -> None:
        def over() -> bool:
            ((n,),) = self.bench.run("select count(*) from idemconsumer.record where state in (3, 4)")
            return bool(n == count) and not self.bench.held

        await until(over, f"{count} sagas have ended")

    def effects(self, saga: str) -> list[str]:
        return [step for (step,) in self.bench.run("select step from effect where saga = %s order by id", (saga,))]

    def asked(self, saga: str) -> list[tuple[str, int]]:
        """What the remote did, each with how often it was asked under that key."""
        return [(n, c) for n, c in self.bench.run("select name, asked from remote where saga = %s", (saga,))]

    def contents(self) -> list[object]:
        """All that a worker may write for its messages."""
        return [self.bench.script(f"select * from {table} order by 1, 2") for table in _WRITTEN]
