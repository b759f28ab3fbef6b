"""The house of the tests: what is shared is in `tests.support`, and no two files of tests have one name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from manual.sources import parsed
from tests.support import ROOT

FILES = sorted((ROOT / "tests").rglob("*.py"))


def statements(of: ast.AST) -> Iterator[ast.AST]:
    """With those inside them; expressions are the many, and none of them imports."""
    for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(of, blocks, ()):
            yield node
            yield from statements(node)


def imported(file: Path) -> Iterator[str]:
    """Modules, and what may be one: `from tests.sagas import test_undo`."""
    for node in statements(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_no_test_imports_another_one_or_a_conftest() -> None:
    for file in FILES:
        for module in imported(file):
            if module.startswith("tests."):
                parts = module.split(".")[1:]
                assert not any(part == "conftest" or part.startswith("test_") for part in parts), f"{file}: {module}"


def test_what_is_shared_knows_no_folder_of_tests() -> None:
    for file in FILES:
        if file.is_relative_to(ROOT / "tests" / "support"):
            for module in imported(file):
                assert not module.startswith("tests.") or module.startswith("tests.support"), f"{file}: {module}"


def test_no_two_test_files_have_one_name() -> None:
    names = [file.name for file in FILES if file.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
