"""What whoever works on this meets: runs without a server, the hooks, the workflows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT

MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NEEDS_REDIS = "tests/http/test_leased_in_redis.py"  # each of its three tests


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
    missing, skipped = (run.stdout.index(words) for words in ("\nmissing: ", "\n3 tests are skipped"))
    assert missing < skipped < run.stdout.index("SKIPPED [3]")
    assert re.search(r"^missing: .*\bRedis\b.*; to have them: apt-get install .*\bredis-server\b", run.stdout, re.M)


def test_under_ci_what_is_missing_fails(tmp_path: Path) -> None:
    run = run_without_programs(tmp_path, "-n", "0", "-x", CI="true")
    assert run.returncode == 1
    assert "Redis needs redis-server; apt-get install redis-server" in run.stdout
    assert "are skipped" not in run.stdout


def test_the_hooks_before_a_commit_are_those_of_make_check() -> None:
    ((local,),) = (yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"],)
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert recipe is not None
    commands = [line.strip().removeprefix("@").replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    assert [hook["entry"] for hook in local["hooks"]] == commands


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text("utf-8"))["jobs"].values()
    return [step for job in jobs for step in job.get("steps", ())]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_what_is_there(workflow: Path) -> None:
    for command in (step["run"] for step in steps(workflow) if "run" in step):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert re.search(rf"^{target}:", MAKEFILE, re.M), target
        for path in re.findall(r"(?<![\w/])(?:tests|\.ci)/[\w/.-]+", command):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_of_others_is_one_commit(workflow: Path) -> None:
    for action in (step["uses"] for step in steps(workflow) if "uses" in step):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
