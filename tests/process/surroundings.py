"""What a process sees of itself, as a line of JSON; with a word more, also what one that it starts sees."""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path


def main() -> None:
    seen = {
        "words": sys.argv[1:],
        "file": sys.argv[0],
        "name": __name__,
        "folder": os.getcwd(),
        "path": sys.path,
        "environment": dict(os.environ),
        "descriptors": sorted(filter(is_open, map(int, os.listdir("/proc/self/fd")))),
        "terminal": [os.isatty(number) for number in range(3)],
        "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
        "signals": [str(signal.getsignal(number)).partition(" at ")[0] for number in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "main": threading.current_thread() is threading.main_thread(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "kernel": Path("/proc/self/comm").read_text(),
        "ours": [name for name in sys.modules if name.startswith("tests")],
    }
    atexit.register(print, "over", file=sys.stderr)
    own = {"parent": os.getppid(), "chance": random.random()}
    below = []
    if "starts" in sys.argv[1:]:
        reading, writing = os.pipe()
        command = [sys.executable, "-m", __spec__.name, "started"]
        started = subprocess.run(command, stdout=subprocess.PIPE, pass_fds=[writing], process_group=0, check=True)
        os.close(reading)
        below = json.loads(started.stdout)
        below[0]["descriptors"].remove(writing)
        below[1]["parent"] -= os.getpid()
    print(json.dumps([seen, own, below]))
    sys.exit(7 if "starts" in sys.argv[1:] else 0)


def is_open(descriptor: int) -> bool:
    """That by which they were listed is not any more."""
    with suppress(OSError):
        return bool(os.fstat(descriptor))
    return False


if __name__ == "__main__":
    main()
