"""The services of the black box behind the servers that people deploy: gunicorn with its workers, uvicorn with several.

What is forked or spawned is theirs, and so is what becomes of a worker that dies, is replaced or is ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from tests.http.blackbox.places import Running
from tests.http.blackbox.served.config import Config, Interface
from tests.support import ROOT
from tests.support.pids import children
from tests.support.servers.processes import Processes
from tests.support.waiting import PATIENCE, eventually

_CONFIG: Final = "DEPLOYED_CONFIG"
_GUNICORN: Final = ("gunicorn", "--preload", "--workers", "2", "--bind", "127.0.0.1:{port}")
_UVICORN: Final = ("uvicorn", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning")


@dataclass(frozen=True)
class Way:
    """To serve a service: the command, but for its interpreter, and how many processes it has beside the first one."""

    name: str
    interface: Interface
    command: tuple[str, ...]
    workers: int = 2


_FLASK: Final = "tests.http.deployed:flask()"
SYNC: Final = Way("flask-sync", "wsgi", (*_GUNICORN, "--worker-class", "sync", _FLASK))
THREADS: Final = Way("flask-gthread", "wsgi", (*_GUNICORN, "--worker-class", "gthread", "--threads", "4", _FLASK))
LOOPS: Final = Way(
    "fastapi-uvicorn", "asgi",
    (*_GUNICORN, "--worker-class", "uvicorn.workers.UvicornWorker", "tests.http.deployed:fastapi()"),
)  # fmt: skip
DJANGO: Final = Way("django-sync", "django", (*_GUNICORN, "tests.http.django_shop.wsgi:application"))
DJANGO_ASYNC: Final = Way(
    "django-uvicorn", "django", (*_UVICORN, "--workers", "2", "tests.http.django_shop.asgi:application")
)
ON_UVLOOP: Final = Way("uvloop", "asgi", (*_UVICORN, "--loop", "uvloop", "--factory", "tests.http.deployed:fastapi"), 0)


@dataclass
class Deployed(Running):
    """A server with its workers. `more`: options of the server; `settings`: ours, as variables."""

    way: Way = SYNC
    more: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    processes: Processes = field(default_factory=lambda: Processes("deployed"))

    def start(self) -> None:
        told = asdict(self.config) | {"folder": str(self.config.folder)}
        command = [each.format(port=self.port) for each in self.way.command]
        env = {
            **os.environ, "XDG_RUNTIME_DIR": str(self.processes.folder), "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1", _CONFIG: json.dumps(told),
            "IDEMCONSUMER_DSN": self.config.dsn, "IDEMCONSUMER_REDIS_OUTAGE": self.config.outage, **self.settings,
        }  # fmt: skip
        self.processes.spawn([sys.executable, "-m", command[0], *self.more, *command[1:]], env)
        eventually(self._answers, "the server does not come up")
        eventually(lambda: len(self.workers) == self.way.workers, "all of its workers are there")

    def _answers(self) -> bool:
        assert self.processes.running, f"the server has ended:\n{self.said()}"
        with suppress(OSError), urlopen(f"{self.url}/effects/none", timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
        return False

    @property
    def workers(self) -> list[int]:
        return [pid for pid in children(self.processes.pid) if not _is_of_python(pid)]

    def said(self) -> str:
        return self.processes.log()[-3000:] if self.processes.log_path.exists() else ""

    def gone(self) -> None:
        eventually(lambda: not self.processes.running, "the server lives on")
        self.processes.kill()

    def kill(self) -> None:
        self.processes.close()


def _is_of_python(pid: int) -> bool:
    """What `multiprocessing` starts beside the processes that it spawns."""
    with suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


# -------------------------------------------------------------------------------------------- what the servers import
def given() -> Config:
    """In the process of a server."""
    told = json.loads(os.environ[_CONFIG])
    return Config(**{**told, "folder": Path(told["folder"])})


def flask() -> Any:
    from tests.http.blackbox.served import wsgi

    return wsgi.flask(given())


def fastapi() -> Any:
    from tests.http.blackbox.served import asgi

    return asgi.make(given())
