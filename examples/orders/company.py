"""The processes of the two services: two front doors, and a worker of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from idemconsumer.embedded.postgres import free_port
from idemconsumer.embedded.watchdog import Watchdog
from tests.support.pids import alive, children, frozen
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]


class Company:
    """Each process has a group of its own, and dies at the latest with us, however we end. So does a launcher, and its
    worker leaves then."""

    def __init__(self, dsn: str, far: str, kafka: str) -> None:
        """`far`: the same database as these processes reach it."""
        self.dsn = dsn
        self.kafka = kafka
        self.doors = {"FastAPI": free_port(), "Django": free_port()}
        # The caller's own settings are not for these processes.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
        servers = {"IDEMCONSUMER_DSN": far, "IDEMCONSUMER_KAFKA": kafka}
        self._environment = clean | servers | {"IDEMCONSUMER_DRAIN_TIMEOUT": "2"}
        fastapi = ["uvicorn", "examples.orders.web:api", "--port", str(self.doors["FastAPI"]), "--log-level", "error"]
        django = ["examples.orders.web_django", str(self.doors["Django"])]
        self._commands = {
            "FastAPI": fastapi,
            "Django": django,
            "worker": ["idemconsumer", "run", "examples.orders.app:shop"],
            "consumer": ["idemconsumer", "run", "examples.orders.app:stock"],
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._watchdog = Watchdog("KILL", None)

    @property
    def names(self) -> list[str]:
        return list(self._commands)

    def start(self, name: str) -> None:
        # A seat of its own in the Kafka group: who comes back under its name has its partitions at once.
        seat = {"IDEMCONSUMER_KAFKA_GROUP_INSTANCE_ID": name, "IDEMCONSUMER_LOG_LEVEL": "error"}
        self._running[name] = subprocess.Popen(
            [sys.executable, "-m", *self._commands[name]],
            cwd=ROOT, env=self._environment | seat, start_new_session=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._watch()

    def kill(self, name: str) -> None:
        """SIGKILL, of a launcher and its worker alike, which would leave in good order if it learnt of that."""
        running = self._running.pop(name)
        running.send_signal(signal.SIGSTOP)  # it starts no other one meanwhile
        eventually(lambda: frozen(running.pid) or not alive(running.pid))
        for pid in (*children(running.pid), running.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.wait()
        self._watch()

    def _watch(self) -> None:
        self._watchdog.watch(*(each.pid for each in self._running.values()))

    def close(self) -> None:
        for name in list(self._running):
            self.kill(name)
        self._watchdog.dismiss()

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            cursor = await connection.execute(query.encode())
            return await cursor.fetchall()

    async def count(self, query: str) -> int:
        return int((await self.rows(query))[0][0])
