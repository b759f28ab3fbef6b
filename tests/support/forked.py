"""Programs of ours in processes that are forked from one which has imported the package: a start takes a tenth."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

_IMPORTED: Final = [
    __name__,
    "idemconsumer.process.child",
    "idemconsumer.worker.worker",
    "idemconsumer.testing.crash",
    "idemconsumer.brokers.kafka.broker",
    "idemconsumer.brokers.rabbitmq.broker",
    "idemconsumer.brokers.sqs.broker",
]


def run(module: str, *words: str, env: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """As `python -m MODULE WORDS`, to its end; a negative `returncode` is the signal that killed it.

    Its `stdout` has both outputs. What it registers with `atexit` is not called.
    """
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with NamedTemporaryFile() as output:
        process = context.Process(target=_run, args=(module, words, dict(env), output.name), daemon=True)
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([module, *words], seconds, Path(output.name).read_bytes())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess([module, *words], code, Path(output.name).read_text("utf-8", "replace"))


def _run(module: str, words: Sequence[str], env: Mapping[str, str], output: str) -> None:
    with open(output, "ab", buffering=0) as written:
        for descriptor in (1, 2):
            os.dup2(written.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
