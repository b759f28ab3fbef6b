"""Where the tests' servers have their folders: in memory, if the machine has enough of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

MEMORY: Final = Path("/dev/shm")
_NEEDED: Final = 12 * 2**30  # bytes; what a whole run puts there is less than a third of it


def keep_in_memory() -> None:
    """Choose the folder of temporary files, here and in child processes, unless TMPDIR has chosen it.

    There an fsync costs nothing, and no other work on the disk can hold one up. A server that is killed finds its
    files again all the same.
    """
    if "TMPDIR" not in os.environ and _roomy():
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def _roomy() -> bool:
    try:
        place = os.statvfs(MEMORY)
        numbers = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(numbers["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return False
    # Postgres, which does not run as root, has its programs copied there.
    runs = not place.f_flag & os.ST_NOEXEC
    return runs and os.access(MEMORY, os.W_OK) and min(free, place.f_bavail * place.f_frsize) > _NEEDED
