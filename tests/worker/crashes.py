"""Runs the worker of `crashing_worker` as a process of its own."""

from __future__ import annotations

import json
import os
import signal

from tests.support import forked


def payment(name: str, amount: int = 1) -> bytes:
    return json.dumps({"id": name, "amount": amount}).encode()


def work(dsn: str, *crash: str, **environment: str) -> int:
    """A worker until it has emptied the queue, or died; its exit status."""
    variables = {**os.environ, "IDEMCONSUMER_DSN": dsn, **environment}
    worker = forked.run("tests.worker.crashing_worker", *crash, env=variables, seconds=90)
    assert worker.returncode in (0, -signal.SIGKILL), worker.stdout
    return worker.returncode
