"""P10: who starts waits for nothing that only others need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = """
import idemconsumer.cli.main, idemconsumer.cli.run_verb
from idemconsumer.settings import load
load(dsn="postgresql://user:p%40ss@db.example:5432/shop?sslmode=verify-full")
"""
WORKER = f"""
{LAUNCHER}
import idemconsumer.cli.target, idemconsumer.worker.worker
"""
IN_LAUNCHER = ["structlog", "psycopg", "importlib.metadata", "idemconsumer.app", "idemconsumer.engine"]
IN_LAUNCHER += ["idemconsumer.ports", "idemconsumer.observe.fleet"]
IN_WORKER = ["tenacity", "idemconsumer.sagas.saga_engine", "idemconsumer.http", "aiokafka", "aio_pika"]


@pytest.mark.parametrize(
    ("imports", "needless"),
    [
        pytest.param(LAUNCHER, IN_LAUNCHER, id="launcher"),
        pytest.param(WORKER, IN_WORKER, id="worker"),
    ],
)
def test_what_only_others_need_is_not_imported(imports: str, needless: list[str], tmp_path: Path) -> None:
    code = f"{imports}\nimport sys\nprint([name for name in {needless} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout == "[]\n"
