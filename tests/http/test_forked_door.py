"""The front door in the children of a server that has answered before it forked (H50, O26)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.ledger import Ledger
from tests.support.servers.redis import RedisServer
from tests.support.waiting import PATIENCE


@pytest.mark.parametrize(("kind", "store"), [("wsgi", "hybrid"), ("asgi", "redis")])
async def test_parent_and_children_each_answer(
    ledger: Ledger, redis_server: RedisServer, kind: str, store: str
) -> None:
    redis_server.ask("FLUSHALL")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.http.forking_door", kind, store],
        cwd=ROOT, env={**os.environ, "IDEMCONSUMER_DSN": ledger.dsn, "IDEMCONSUMER_REDIS": redis_server.address},
        capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr
