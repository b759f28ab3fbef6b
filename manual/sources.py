"""Python files as syntax trees."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    return tree(path.read_text("utf-8"))


def tree(text: str) -> ast.Module:
    """Nothing is collected meanwhile: a lost task would be logged, with a traceback that is parsed as well, and Python
    before 3.11.8 counts the depth of both as one (cpython #106905)."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()
