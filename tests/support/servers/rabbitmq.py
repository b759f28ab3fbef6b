"""RabbitMQ for tests: a node of its own, with its own name daemon and the management plugin."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from idemconsumer.embedded.postgres import free_port
from tests.support.servers.processes import Processes, need

_BIN = Path("/usr/lib/rabbitmq/bin")
_START_SECONDS = 90.0
_STOP_SECONDS = 30.0


class RabbitMQ:
    """`config` adds lines to rabbitmq.conf, as `{"listeners.ssl.1": "127.0.0.1:5671"}`.

    A restart keeps ports and data.
    """

    def __init__(self, *, config: Mapping[str, str] | None = None) -> None:
        need("RabbitMQ")
        self._processes = Processes("rabbitmq")
        self.port, self.management_port, distribution, self._names_port = (free_port() for _ in range(4))
        self.node = f"test{self.port}@localhost"
        folder = self._processes.folder
        self._pid_file = folder / "pid"
        lines = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "management.tcp.ip": "127.0.0.1",
            "management.tcp.port": str(self.management_port),
            **(config or {}),
        }
        (folder / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in lines.items()))
        (folder / "plugins").write_text("[rabbitmq_management].\n")
        cookie = folder / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(10))
        cookie.chmod(0o400)
        self._environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(self._names_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_PID_FILE": str(self._pid_file),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        }

    @property
    def address(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def management(self) -> str:
        """The address of the management API; user and password are `guest`."""
        return f"http://127.0.0.1:{self.management_port}"

    def start(self) -> None:
        """Return when AMQP and the management API answer."""
        if self._processes.running:
            return
        self._pid_file.unlink(missing_ok=True)
        # The name daemon in the foreground, and first: RabbitMQ would start one that outlives it.
        self._processes.spawn(["epmd", "-port", str(self._names_port), "-address", "127.0.0.1"])
        self._processes.wait_ready(self._names_answer, _START_SECONDS)
        self._processes.spawn([_BIN / "rabbitmq-server"], self._environment)
        self._processes.wait_ready(self._answers, _START_SECONDS)

    def stop(self) -> None:
        """An orderly shutdown."""
        self._processes.terminate(_STOP_SECONDS)

    def kill(self) -> None:
        self._processes.kill()

    def freeze(self) -> None:
        """It says nothing more, until `thaw()`; its connections stay open."""
        self._processes.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._processes.send(signal.SIGCONT)

    def close(self) -> None:
        self._processes.close()

    def ctl(self, *arguments: str) -> str:
        """What `rabbitmqctl` prints for these arguments."""
        command = [str(_BIN / "rabbitmqctl"), "-n", self.node, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=self._environment)
        return done.stdout

    def wait_until_saved(self, *queues: str) -> None:
        """Return when these durable queues, and all quorum queues that were declared, would outlive a `kill()`.

        RabbitMQ 3.10 confirms messages before it has saved, in names.dets and half a second to a second after the
        declaration, which log belongs to a quorum queue. Killed before that, it gives the queue a new log, which is
        empty, and no leader is ever elected for it. Terms and votes (meta.dets) are saved at once, and can be spared.
        """
        registry = self._processes.folder / "mnesia" / self.node / "quorum" / self.node

        def saved() -> bool:
            names = (registry / "names.dets").read_bytes()
            return self.has_saved(*queues) and all(
                entry.name.encode() in names for entry in registry.iterdir() if entry.is_dir()
            )

        self._processes.wait_ready(saved, 60.0)

    def has_saved(self, *queues: str) -> bool:
        """Whether its files know of these durable queues."""
        text = b""
        for file in (self._processes.folder / "mnesia" / self.node).glob("*.[LD][OC]*"):  # logs and tables
            with contextlib.suppress(FileNotFoundError):  # a log that has just become a table
                text += file.read_bytes()
        return all(queue.encode() in text for queue in queues)

    def _names_answer(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._names_port), 1.0):
            return True
        return False

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as amqp:
            amqp.sendall(b"AMQP\x00\x00\x09\x01")
            return amqp.recv(1) == b"\x01" and self._management_answers()  # the frame Connection.Start
        return False

    def _management_answers(self) -> bool:
        request = urllib.request.Request(f"{self.management}/api/overview")
        request.add_header("Authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=2.0) as answer:
            return bool(answer.status == 200)
        return False
