"""Worker processes that run many random programs side by side, left alone or killed again and again."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.sagas.deployment import Process
from tests.sagas.programs.interpreter import QUEUE, Seen
from tests.sagas.programs.judged import End, ends
from tests.sagas.programs.on_record import RECORD, TABLES
from tests.sagas.programs.source import Program, signals
from tests.support.sagas import Bench

WORKERS: Final = 4
LANES: Final = 8
_TICK: Final = 0.05
_BETWEEN: Final = 50  # steps that finish from one kill to the next: on a slow machine nothing would go on otherwise
_AROUND: Final = 20  # sagas: how early or late a signal comes


class Killed:
    """Plays programs on one database. `close` ends what runs."""

    def __init__(self, bench: Bench, far: str, folder: Path, chance: random.Random) -> None:
        """`far`: the database as workers reach it."""
        self._bench, self._folder, self._chance = bench, folder, chance
        self._record = folder / "record"
        self._record.touch()
        self._environment = {"IDEMCONSUMER_DSN": far, RECORD: str(self._record)}
        self._workers: list[Process] = []
        self._started = 0
        self.kills = 0
        bench.script(TABLES)

    @property
    def takeovers(self) -> int:
        ((count,),) = self._bench.run("select count(*) from idemconsumer.history where what = 'lost'")
        return int(count)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _start(self) -> None:
        log = self._folder / f"worker-{self._started}.log"
        self._started += 1
        self._workers.append(Process(log, self._environment, LANES, "tests.sagas.programs.on_record:app"))

    async def play(self, programs: Mapping[str, Program], *, kills: bool, seconds: float) -> dict[str, End]:
        """To the ends of these sagas. AssertionError if there is one left after so many seconds."""
        for saga, program in programs.items():
            body = json.dumps({"id": saga, "program": program})
            self._bench.run("select idemconsumer.publish(%s, %s::jsonb)", (QUEUE, body))
        unsent = [(n, saga, name) for n, saga in enumerate(programs) for name in signals(programs[saga])]
        self._chance.shuffle(unsent)
        while len(self._workers) < WORKERS:
            self._start()
        end, next_kill, enough = time.monotonic() + seconds, time.monotonic() + self._chance.uniform(0.1, 0.4), 0
        while unsent or not self._over():
            assert time.monotonic() < end, f"not over: {self._left()}"
            unsent = self._send(unsent, len(programs))
            if kills and time.monotonic() > next_kill and self._progress() > enough:
                self._kill()
                next_kill = time.monotonic() + self._chance.uniform(0.2, 1.0)
                enough = self._progress() + _BETWEEN
            await asyncio.sleep(self._chance.uniform(0, 2 * _TICK))
        calls = [(key, name) for key, name in self._bench.run("select key, name from remote")]
        return ends(self._bench, programs, calls, self._seen())

    def _progress(self) -> int:
        """Each step that has finished, and each saga that was taken over, makes it more."""
        ((last,),) = self._bench.run("select last_value from idemconsumer.saga_token")
        return int(last)

    def _kill(self) -> None:
        """One that is at work, if another one is too."""
        ready = [worker for worker in self._workers if any(line["feed"] == "saga" for line in worker.said("consuming"))]
        if len(ready) < 2:
            return
        killed = self._chance.choice(ready)
        killed.kill()
        self.kills += 1
        self._workers.remove(killed)
        self._start()
        self._bench.run("update idemconsumer.queue set visible_at = now()")  # what it had: else in 10 s

    def _send(self, unsent: list[tuple[int, str, str]], sagas: int) -> list[tuple[int, str, str]]:
        """Signals for what has begun, some too early and some late; those that are left."""
        ((waiting,),) = self._bench.run("select count(*) from idemconsumer.queue where name = %s", (QUEUE,))
        left = []
        for n, saga, name in unsent:
            if n < sagas - waiting + self._chance.randint(-_AROUND, _AROUND):
                self._bench.run(
                    "select idemconsumer.signal('programs', 'book', %s, %s, to_jsonb(%s::text))", (saga, name, name)
                )
            else:
                left.append((n, saga, name))
        return left

    def _over(self) -> bool:
        return not self._bench.run(
            "select from idemconsumer.saga where parked is null union all select from idemconsumer.queue limit 1"
        )

    def _left(self) -> object:
        return self._bench.run(
            "select encode(key, 'hex'), handler, state, due - now(), attempt, suspicion, error from idemconsumer.saga"
        ), self._bench.run("select name, count(*) from idemconsumer.queue group by name")

    def _seen(self) -> dict[str, list[Seen]]:
        """By saga, from the file."""
        runs: dict[str, dict[tuple[int, int], Seen]] = defaultdict(dict)
        for line in self._record.read_text().splitlines():
            saga, token, number, *got = json.loads(line)
            seen = runs[saga].setdefault((token, number), Seen(token, number))
            if got:
                seen.got(*got)
        return {saga: list(its.values()) for saga, its in runs.items()}
