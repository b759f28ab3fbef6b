"""docs/protocol.md as its rules, and test files as the tests in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from manual.sources import parsed
from tests.support import ROOT

PROTOCOL: Final = ROOT / "docs" / "protocol.md"
HEADING: Final = re.compile(r"^### ([A-Z]\d+) — .+$", re.MULTILINE)


@cache
def rules() -> dict[str, str]:
    """Each rule and its text."""
    parts = HEADING.split(PROTOCOL.read_text("utf-8"))[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@cache
def defined(path: Path) -> frozenset[str]:
    """The tests of a file as pytest names them, those of its contract suites among them."""
    return frozenset(_defined(path))


def _defined(path: Path) -> Iterator[str]:
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
    for folder in ("idemconsumer/testing", "tests/stores")
    for path in (ROOT / folder).glob("*_contract.py")
    for node in parsed(path).body
    if isinstance(node, ast.ClassDef)
}
