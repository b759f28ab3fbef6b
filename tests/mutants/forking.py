"""Runs pytest again and again, each time in a child of a process that has imported what is not ours, which is half of
a short run. Nothing of the package is imported here, so each child has it as it stands in the folder by then.

A line of JSON on stdin asks for a run; two on stdout say the number of its process, and how it has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

_OTHERS: Final = (
    "pytest", "_pytest.doctest", "_pytest.logging", "_pytest.unittest", "pytest_asyncio.plugin", "pytest_timeout",
    "xdist.plugin", "anyio.pytest_plugin", "_hypothesis_pytestplugin", "hypothesis", "click.testing", "cronsim",
    "httpx", "jmespath", "msgspec", "psycopg", "psycopg_pool", "redis.asyncio", "structlog", "tenacity",
)  # fmt: skip


def main() -> None:
    for name in _OTHERS:
        importlib.import_module(name)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            _run(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(asked: Mapping[str, Any]) -> None:
    """In the child, which ends with it."""
    os.setsid()  # so that all that it starts can be ended with it
    os.environ.update(asked["environment"])
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor, source in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(source, descriptor)
    sys.exit(importlib.import_module("pytest").main(asked["words"]))


if __name__ == "__main__":
    main()
