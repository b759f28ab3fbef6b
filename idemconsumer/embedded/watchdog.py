"""Ends a server when the process that started it has ended, by whatever cause."""

from __future__ import annotations

import subprocess
from pathlib import Path

from idemconsumer import forks


class Watchdog:
    """Ends process groups and removes a folder when this process has ended, by whatever cause.

    It is a shell at the other end of a pipe, which the kernel closes even after SIGKILL. (PR_SET_PDEATHSIG would act
    when the *thread* that started the server ends.)
    """

    _SCRIPT = """
groups=
while read -r next; do groups=$next; done
for group in $groups; do kill -s "$1" -- "-$group" 2>/dev/null; done
for group in $groups; do
    tries=0
    while [ $tries -lt 100 ] && kill -s 0 -- "-$group" 2>/dev/null; do tries=$((tries + 1)); sleep 0.1; done
    kill -s KILL -- "-$group" 2>/dev/null
done
[ -z "$2" ] || rm -rf -- "$2"
"""

    def __init__(self, last_signal: str, remove: Path | None) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "watchdog", last_signal, str(remove or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # a Ctrl-C, or a kill of the process group, must not end the watchdog
        )
        forks.not_inherited(self, Watchdog._pipe)

    def watch(self, *groups: int) -> None:
        """End these process groups, instead of those of the previous call."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(" ".join(map(str, groups)).encode() + b"\n")

    def dismiss(self) -> None:
        """End the watchdog: the caller has cleaned up itself."""
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdin is not None
        self._shell.stdin.close()

    def _pipe(self) -> list[int]:
        """The pipe, which a forked child must not hold open: it would keep the server running."""
        return [] if self._shell.stdin is None or self._shell.stdin.closed else [self._shell.stdin.fileno()]
