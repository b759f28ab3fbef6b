"""A server of the tests, and what is known of it: its store, its mode and its interface."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Final

import psycopg
import pytest
import redis

from idemconsumer.embedded.postgres import free_port
from idemconsumer.message import keys
from idemconsumer.stores.redis.scripts import name_of
from tests.http.blackbox.client import Service, new
from tests.http.blackbox.served.behaviour import Gate
from tests.http.blackbox.served.config import Config, Interface, Store
from tests.support.waiting import eventually

OWN: Final = os.environ.get("IDEMCONSUMER_BLACKBOX_URL")
MODES: Final[list[tuple[Store, str]]] = [
    ("postgres", "leased"), ("postgres", "joined"), ("redis", "leased"), ("hybrid", "leased"), ("hybrid", "joined"),
]  # fmt: skip
INTERFACES: Final[list[Interface]] = ["asgi", "wsgi"]


@dataclass
class Running:
    """A server process, on a port that stays the same when it is started again."""

    interface: Interface
    config: Config
    port: int = field(default_factory=free_port)
    process: BaseProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        from tests.http.blackbox.served import serving  # its imports cost a second, for those who have a server

        self.process = serving.start(self.interface, self.config, self.port)
        eventually(self._accepts, f"the server does not come up:\n{self._log()}")

    def _accepts(self) -> bool:
        assert self.process is not None
        assert self.process.is_alive(), f"the server has ended:\n{self._log()}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _log(self) -> str:
        log = self.config.folder / f"{self.port}.log"
        return log.read_text()[-3000:] if log.exists() else ""

    def gone(self) -> None:
        """Wait for a server that kills itself."""
        assert self.process is not None
        self.process.join(45)
        assert self.process.exitcode is not None, "the server lives on"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()


@dataclass
class Place:
    """A store, a mode, and a server for it."""

    store: Store
    mode: str
    interface: Interface
    running: Running | None = None

    def __str__(self) -> str:
        return f"{self.store}-{self.mode}-{self.interface}"

    @property
    def joined(self) -> bool:
        return self.mode == "joined"

    @property
    def server(self) -> Running:
        if self.running is None:
            pytest.skip("needs a server that it may start")
        return self.running

    def service(self, running: Running | None = None) -> Service:
        if OWN and running is None:
            return Service(OWN, os.environ.get("IDEMCONSUMER_BLACKBOX_MODE", self.mode))
        return Service((running or self.server).url, self.mode)

    def gate(self) -> Gate:
        return Gate(self.server.config.folder, new())

    def dead_letters(self) -> int:
        with psycopg.connect(self.server.config.effects) as db:
            row = db.execute("select count(*) from idemconsumer.dead_letter").fetchone()
            assert row is not None
            return int(row[0])

    def unmark(self) -> None:
        """Let Redis forget who asks Postgres (H33): it would do so five seconds after the process has died."""
        if self.store == "hybrid":
            assert self.server.config.redis is not None
            with redis.Redis.from_url(self.server.config.redis) as client:
                client.flushall()

    def lose(self, key: str, route: str = "orders") -> None:
        """Let the lease of the process that has died with this key be over, by the clock of its store."""
        digest = keys.digest("blackbox", "acme", f"POST /{self.mode}/{route}", key)
        config = self.server.config
        if self.store == "redis":
            assert config.redis is not None
            with redis.Redis.from_url(config.redis) as client:
                assert client.hset(name_of(digest), "u", 0) == 0
            return
        with psycopg.connect(config.effects) as db:
            lost = "update idemconsumer.worker set until = now() - interval '1 s' where id = "
            found = db.execute(f"{lost} (select worker from idemconsumer.request where key = %s)", (digest,))
            assert found.rowcount == 1


def places(*stores: Store) -> list[Place]:
    """Every mode of these stores under every interface."""
    return [Place(store, mode, each) for store, mode in MODES if store in stores for each in INTERFACES]
