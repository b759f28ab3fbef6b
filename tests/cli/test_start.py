"""P10: who starts waits for nothing that only others need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = "import idemconsumer.cli.main, idemconsumer.cli.run"
WORKER = f"{LAUNCHER}, idemconsumer.cli.banner, idemconsumer.cli.target, idemconsumer.worker.worker"


@pytest.mark.parametrize(
    ("imports", "needless"),
    [
        pytest.param(LAUNCHER, ["structlog", "psycopg_pool", "idemconsumer.app", "idemconsumer.engine"], id="launcher"),
        pytest.param(WORKER, ["idemconsumer.sagas.engine", "idemconsumer.http", "aiokafka", "aio_pika"], id="worker"),
    ],
)
def test_what_only_others_need_is_not_imported(imports: str, needless: list[str], tmp_path: Path) -> None:
    code = f"import sys; {imports}; print([name for name in {needless} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout == "[]\n"
