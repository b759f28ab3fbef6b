"""The public signatures, as users' type checkers see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

EXAMPLES = Path(__file__).with_name("signatures.py")


@pytest.mark.long  # `make check` does the same for 3.11
def test_handlers_keep_their_types_and_mistakes_are_found() -> None:
    # Unused ignores are errors in strict mode: each mistake in the examples must really be found.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.13", str(EXAMPLES)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
