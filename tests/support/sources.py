"""Python files as syntax trees."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """A collection meanwhile may log a lost task, whose traceback is parsed too, and Python before 3.11.8 counts the
    depth of both as one (cpython #106905)."""
    gc.disable()
    try:
        return ast.parse(path.read_text("utf-8"))
    finally:
        gc.enable()
