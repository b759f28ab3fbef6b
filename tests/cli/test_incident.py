"""The incident of docs/operations.md, with the commands that stand there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from examples.incident.walk import MESSAGES
from tests.support import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("messages", [1_000, pytest.param(MESSAGES, marks=pytest.mark.long)])
def test_every_payment_is_applied_once_and_no_letter_is_left(messages: int) -> None:
    command = [sys.executable, "-m", "examples.incident.walk", str(messages)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 causes, 0 left" in done.stdout
