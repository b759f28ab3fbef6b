"""The plugin works in each mode of pytest-asyncio, and does nothing where nobody asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.testing_kit.projects import run

TEST = """
import pytest
from idemconsumer import App, Tx

app = App("a")

@app.idempotent_handler("kafka:orders", key="id")
async def handle(order: dict[str, str], tx: Tx) -> None: ...

{mark}
@pytest.mark.parametrize("n", [1, 2])
async def test_it(idem, n):
    kit = await idem(app)
    await kit.send("kafka:orders", {{"id": "1"}})
    assert not await kit.drain()
    assert [each.kind for each in kit.outcomes] == ["applied"]
"""


@pytest.mark.parametrize(("mode", "mark"), [("strict", "@pytest.mark.asyncio"), ("auto", "")])
def test_it_works_in_each_mode(folder: Path, mode: str, mark: str) -> None:
    (folder / "test_it.py").write_text(TEST.format(mark=mark))
    done = run(folder, "-o", f"asyncio_mode={mode}", "-W", "error")
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_it_imports_nothing_heavy() -> None:
    code = "import sys, idemconsumer.testing.plugin; print({'psycopg', 'msgspec', 'structlog'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "set()\n"
