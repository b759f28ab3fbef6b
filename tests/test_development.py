"""What whoever works on this meets: a run without its servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

NEEDS_REDIS = "tests/http/test_leased_in_redis.py"  # each of its two tests


def run_without_programs(empty: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, NEEDS_REDIS],
        cwd=ROOT, env=env | {"PATH": str(empty)} | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_says_first_what_is_missing_and_how_many_tests_that_skips(tmp_path: Path, processes: str) -> None:
    run = run_without_programs(tmp_path, "-n", processes)
    assert run.returncode == 0, run.stdout
    missing, skipped = (run.stdout.index(words) for words in ("\nmissing: ", "\n2 tests are skipped"))
    assert missing < skipped < run.stdout.index("SKIPPED [2]")
    assert re.search(r"^missing: .*\bRedis\b.*; to have them: apt-get install .*\bredis-server\b", run.stdout, re.M)


def test_under_ci_what_is_missing_fails(tmp_path: Path) -> None:
    run = run_without_programs(tmp_path, "-n", "0", "-x", CI="true")
    assert run.returncode == 1
    assert "Redis needs redis-server; apt-get install redis-server" in run.stdout
    assert "are skipped" not in run.stdout
