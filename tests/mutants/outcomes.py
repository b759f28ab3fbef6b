"""A plugin of pytest: each test's outcome and seconds, as lines of JSON in the file that MUTANTS_OUTCOMES names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        line = {
            "test": report.nodeid, "outcome": report.outcome, "seconds": report.duration,
            "says": str(getattr(crash, "message", "")).strip().partition("\n")[0][:200],
        }  # fmt: skip
        with Path(os.environ["MUTANTS_OUTCOMES"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
