"""Programs of ours in processes that are forked from one which has imported the package: a start takes a tenth.

To whoever starts it such a process is as one of `subprocess.Popen`: a child with a number of its own, killed and waited
for as any other. What differs: the command line that the kernel shows, what an import does, the seed of hashes, which
those of one test process have in common, and that nothing is destroyed at its end, after `atexit`. Who tests one of
these starts a real one.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, AnyStr, Final

from tests.support import ROOT

HIGH: Final = 500  # above every descriptor that somebody gives a process
READY: Final = b"ready"
_PR_SET_CHILD_SUBREAPER: Final = 36
_SECONDS: Final = 60.0
_ELSE: Final = subprocess.Popen
# Read when the interpreter starts, or as modules are imported.
_READ_BEFORE: Final = re.compile("PYTHON|LANG|LC_|TZ$|LD_|MALLOC|OPENSSL|SSL|PSYCOPG|AIOKAFKA|PURE_PYTHON")


class _Server:
    """Of one process. What it forks is a child of that process."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking
        self._before = _read_before(os.environ)
        self._lock = threading.Lock()

    def can_be(self, environment: Mapping[str, str]) -> bool:
        return _read_before(environment) == self._before

    def fork(self, request: Mapping[str, object], descriptors: Sequence[int]) -> int:
        data = json.dumps({**request, "parent": os.getpid()}).encode()
        with self._lock:
            # The parent of what is forked ends, and the child becomes that of the next ancestor that takes orphans.
            _take_orphans(True)
            try:
                socket.send_fds(self._asking, [data], descriptors)
                answer = self._asking.recv(32)
            finally:
                _take_orphans(False)
        if not answer:
            raise OSError("the fork server has ended")
        return int(answer)


_server: _Server | None = None
_starting: Final = threading.Lock()


class Popen(subprocess.Popen[AnyStr]):
    """As `subprocess.Popen`: what is to run as `python -m` is forked, and everything else is started."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Sequence[int], cwd: Any, env: Any,
        startupinfo: Any, creationflags: int, shell: bool,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: bool, gid: Any, gids: Any, uid: Any, umask: int, start_new_session: bool, process_group: int,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        others = (executable, preexec_fn, gid, gids, uid)
        server = None
        if (
            not shell
            and max(pass_fds, default=0) < HIGH
            and others == (None,) * 5
            and _is_module(args)
            and os.path.isdir(cwd or ".")
        ):
            server = _started()
        if server is None or not server.can_be(environment):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, process_group,
            )  # fmt: skip
            return
        given: tuple[int, int, int] = (p2cread, c2pwrite, errwrite)
        own: list[int] = [descriptor if descriptor >= 0 else at for at, descriptor in enumerate(given)]
        request = {
            "words": list(args[2:]), "environment": environment, "folder": os.path.abspath(os.fspath(cwd or ".")),
            "session": start_new_session, "group": process_group, "numbers": [0, 1, 2, *pass_fds],
        }  # fmt: skip
        try:
            self.pid = server.fork(request, [*own, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    module: str, *words: str, env: Mapping[str, str], seconds: float, folder: Path = ROOT, given: str | None = None,
    stderr: int = subprocess.STDOUT,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As `python -m MODULE WORDS`, to its end; its `stdout` has both outputs, unless `stderr` is another place."""
    command, pipe = [sys.executable, "-m", module, *words], subprocess.PIPE
    with Popen(
        command, cwd=folder, env=env, text=True, errors="replace",
        stdin=subprocess.DEVNULL if given is None else pipe, stdout=pipe, stderr=stderr,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(given, seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


async def start(*command: str, **options: Any) -> Process:
    """As `asyncio.create_subprocess_exec`."""
    await asyncio.to_thread(_started)
    subprocess.Popen = Popen  # type: ignore[misc]  # which is called before the next line waits for anything
    try:
        return await asyncio.create_subprocess_exec(*command, **options)
    finally:
        subprocess.Popen = _ELSE  # type: ignore[misc]


def everywhere(asking: socket.socket) -> None:
    """In a process that was forked: whatever it starts is forked by who answers there."""
    global _server
    with asking:
        high = fcntl.fcntl(asking.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    _server = _Server(socket.socket(fileno=high))
    subprocess.Popen = Popen  # type: ignore[misc]


def _is_module(args: object) -> bool:
    return isinstance(args, list | tuple) and len(args) > 2 and [*args[:2]] == [sys.executable, "-m"]


def _started() -> _Server | None:
    """None where a process cannot be given to another parent."""
    global _server
    if sys.platform != "linux":
        return None
    with _starting:
        if _server is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(_SECONDS)
            with theirs:
                command = [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())]
                quiet = subprocess.DEVNULL
                _kept.append(subprocess.Popen(command, cwd=ROOT, stdin=quiet, stdout=quiet, pass_fds=[theirs.fileno()]))
            if ours.recv(32) != READY:
                raise OSError("the fork server could not begin")
            _server = _Server(ours)
        return _server


_kept: Final[list[subprocess.Popen[bytes]]] = []


def _read_before(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_BEFORE.match(name)}


def _take_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
