"""What the servers have in common: a scratch folder, processes that a watchdog ends, readiness by polling."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from idemconsumer.embedded.watchdog import Watchdog
from tests.support.servers.installed import missing, packages
from tests.support.waiting import eventually

_POLL_SECONDS = 0.02


class ServerMissing(Exception):
    """A server cannot be had on this machine. The text says what to install."""


def need(server: str) -> None:
    """Raise `ServerMissing` unless all is there that this server needs."""
    if needs := missing(server):
        absent = ", ".join(need.what for need in needs)
        raise ServerMissing(f"{server} needs {absent}; apt-get install {packages(needs)}")


class Processes:
    """The processes of one server and its scratch folder; both end with the test session, however it ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"idemconsumer-{name}-"))
        self._running: list[subprocess.Popen[bytes]] = []
        self._watchdog = Watchdog("KILL", self.folder)
        self._log_start = 0

    @property
    def log_path(self) -> Path:
        return self.folder / "log"

    def log(self) -> str:
        """What the server has logged since its last start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def spawn(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        """Start one process of the server; the one that is started last is the one that `terminate` asks."""
        with self.log_path.open("ab") as log:
            if not self._running:
                self._log_start = log.tell()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.folder, env=env, start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        self._watchdog.watch(*(each.pid for each in self._running))

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._running[-1].pid

    @property
    def running(self) -> bool:
        return bool(self._running) and all(process.poll() is None for process in self._running)

    def wait_ready(self, ready: Callable[[], bool], seconds: float) -> None:
        """Poll until the server is ready; kill it and raise with the end of its log when it is not in time."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running or time.monotonic() > deadline:
                state = f"is not ready after {seconds:g} s" if self.running else "ended"
                said = self.log()[-3000:]
                self.kill()
                raise RuntimeError(f"{self.name} {state}; its log ends:\n{said}")
            time.sleep(_POLL_SECONDS)

    def terminate(self, seconds: float) -> None:
        """SIGTERM to the last process; what is still there when it has ended, or in time, is killed."""
        if self._running:
            self._running[-1].terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running[-1].wait(seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the server."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()
        self._watchdog.watch()

    def send(self, signal_number: signal.Signals) -> None:
        """To all of them: SIGSTOP makes them silent, SIGCONT ends that."""
        for process in self._running:
            os.killpg(process.pid, signal_number)
        if signal_number == signal.SIGSTOP:
            groups = {str(process.pid) for process in self._running}
            eventually(lambda: not _go_on(groups), "each thread of theirs has stopped")

    def close(self) -> None:
        """Kill the server and remove its folder; a second time does nothing."""
        if not self.folder.exists():
            return
        self.kill()
        self._watchdog.dismiss()
        shutil.rmtree(self.folder, ignore_errors=True)


def _go_on(groups: set[str]) -> bool:
    """Whether a thread of these process groups still runs: on another core it stops a moment after the signal."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _stat(process)[2] in groups and any(_stat(each)[0] not in "TZX" for each in process.glob("task/*")):
                return True
    return False


def _stat(process: Path) -> list[str]:
    """From its state on, behind its name."""
    return (process / "stat").read_text().rpartition(")")[2].split()
