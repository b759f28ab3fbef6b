"""docs/protocol.md as its rules, and test files as the tests in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support import ROOT
from tests.support.sources import parsed

PROTOCOL: Final = ROOT / "docs" / "protocol.md"
HEADING: Final = re.compile(r"^### ([A-Z]\d+) — .+$", re.MULTILINE)


def rules() -> dict[str, str]:
    """Each rule and its text."""
    parts = HEADING.split(PROTOCOL.read_text("utf-8"))[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def defined(path: Path) -> Iterator[str]:
    """The tests of a file as pytest names them, those of the shipped contract suites among them."""
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef):
            yield from (f"::{node.name}::{name}" for name in _methods(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"::{node.name}"


def _methods(node: ast.ClassDef) -> Iterator[str]:
    yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in _CONTRACTS:
            yield from _methods(_CONTRACTS[base.id])


_CONTRACTS: Final = {
    node.name: node
    for path in (ROOT / "idemconsumer" / "testing").glob("*_contract.py")
    for node in parsed(path).body
    if isinstance(node, ast.ClassDef)
}
