"""The examples of docs/testing.md are one project, and its tests pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_examples_run_as_they_stand(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "testing.md").read_text("utf-8")
    examples = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(examples) == text.count("```python"), "each example begins with the name of its file"
    examples += re.findall(r"^```json (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for name, code in examples:
        (tmp_path / name).write_text(code, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\npythonpath = .\n", "utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
