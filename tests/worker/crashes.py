"""Runs the worker of `crashing_worker` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys


def payment(name: str, amount: int = 1) -> bytes:
    return json.dumps({"id": name, "amount": amount}).encode()


def work(dsn: str, *crash: str, **environment: str) -> int:
    """A worker until it has emptied the queue, or died; its exit status."""
    worker = subprocess.run(
        [sys.executable, "-m", "tests.worker.crashing_worker", *crash],
        env={**os.environ, "IDEMCONSUMER_DSN": dsn, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert worker.returncode in (0, -signal.SIGKILL), worker.stdout + worker.stderr
    return worker.returncode
