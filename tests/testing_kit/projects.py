"""Tests of users, in a project of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options, str(folder)]
    command += ["-o", "asyncio_default_fixture_loop_scope=function"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
