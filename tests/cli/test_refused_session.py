"""R17 as a person sees it: exit code 2, one line with what is wrong and what to run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import LiteralString, cast

import psycopg

from idemconsumer.process.child import Exit
from tests.support import forked
from tests.support.servers.made import PrivatePgBouncer
from tests.support.servers.postgres import migrated

APP = """
from idemconsumer import App, Saga, Tx

app = App("shop")

@app.idempotent_handler("postgres:orders", key="id")
async def take(order: dict, tx: Tx) -> None: ...

@app.idempotent_handler("postgres:rides", key="id")
async def book(ride: dict, saga: Saga) -> None: ...
"""


def idemconsumer(folder: Path, dsn: str, verb: str, *more: str) -> tuple[int, str]:
    command = ["idemconsumer", verb, "shop:app", "--dsn", dsn, *more]
    done = forked.run(*command, env=os.environ, seconds=60, folder=folder, stderr=subprocess.PIPE)
    return done.returncode, done.stdout + done.stderr


def test_what_check_prints_is_enough_to_run(database: str, private_pgbouncer: PrivatePgBouncer, tmp_path: Path) -> None:
    """At once, though sagas allow less than their own handlers would."""
    migrated(database, "idemconsumer")
    (tmp_path / "shop.py").write_text(APP)
    pooler = private_pgbouncer(database, "transaction", settings={"ignore_startup_parameters": "options"})

    code, said = idemconsumer(tmp_path, pooler.dsn, "run", "--log-format", "console")
    assert code == Exit.USAGE
    assert re.search(r"^error: database: .* the role must have them; run: ALTER ROLE .*$", said, re.MULTILINE)

    code, said = idemconsumer(tmp_path, pooler.dsn, "check")
    assert code == Exit.ERROR
    found = re.search(r"run: (ALTER ROLE .*); then", said)
    assert found is not None
    with psycopg.connect(database) as connection:
        connection.execute(cast(LiteralString, found[1]))
    pooler.reconnect()

    assert idemconsumer(tmp_path, pooler.dsn, "check")[0] == 0
    assert idemconsumer(tmp_path, pooler.dsn, "run", "--until-empty")[0] == 0
