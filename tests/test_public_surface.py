"""What users may import: stated once, documented, and checked for its types."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import idemconsumer
from idemconsumer import http, sqlalchemy, testing
from manual.sources import parsed

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TYPING = ROOT / "tests" / "typing" / "signatures.py"

PUBLIC = [(module, name) for module in (idemconsumer, http, testing, sqlalchemy) for name in module.__all__]


def fresh(code: str) -> str:
    """What it prints in a process that has imported nothing else."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that are ours, as functions."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("idemconsumer")]
    for name, member in (each for base in bases for each in vars(base).items()):
        if not name.startswith("_"):
            function: Any = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(function):
                yield name, inspect.unwrap(function)


def fields(kind: type) -> set[str]:
    """What an instance carries: of a struct, a dataclass, an enum or an exception."""
    if issubclass(kind, StrEnum):
        return {member.value for member in kind}
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    if issubclass(kind, Exception) and "__init__" in vars(kind):
        return set(inspect.signature(kind).parameters)
    return set(getattr(kind, "__struct_fields__", ()))


def classes() -> Iterator[tuple[str, type]]:
    """The public classes."""
    for module, name in PUBLIC:
        if inspect.isclass(kind := getattr(module, name)):
            yield name, kind


def test_a_public_name_says_what_it_does() -> None:
    """And not by the docstring that dataclass makes, which is its signature."""
    said = {name: inspect.getdoc(getattr(module, name)) or "" for module, name in PUBLIC}
    assert [name for name, text in said.items() if not text or text.startswith(f"{name}(")] == []


def test_so_does_each_of_its_methods_and_properties() -> None:
    """Except those of a contract, whose tests are sentences."""
    assert [
        f"{name}.{method}"
        for name, kind in classes()
        if not name.endswith("Contract")
        for method, function in methods(kind)
        if not all(each.__doc__ for each in typing.get_overloads(function) or [function])
    ] == []


def test_so_does_each_of_its_fields() -> None:
    assert [
        f"{name}.{field}"
        for name, kind in classes()
        for field in sorted(fields(kind))
        if not re.search(rf"`{field}\b", kind.__doc__ or "")
    ] == []


def test_the_docs_have_a_place_for_it() -> None:
    words = {word for page in DOCS for word in re.findall(r"\w+", page.read_text("utf-8"))}
    assert [name for _, name in PUBLIC if name not in words] == []


def test_its_types_are_checked_as_a_user_writes_them() -> None:
    """By `test_signatures`; an import that is not used there is an error of ruff."""
    imported = {
        (node.module, alias.name)
        for node in ast.walk(parsed(TYPING))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert [name for module, name in PUBLIC if (module.__name__, name) not in imported] == []


def test_nothing_else_can_be_imported_from_the_top_but_its_rooms() -> None:
    names = set(fresh("import idemconsumer; print(*dir(idemconsumer))").split())
    rooms = {module.name for module in pkgutil.iter_modules(idemconsumer.__path__)}
    others = {name for name in names - rooms - set(idemconsumer.__all__) if not name.startswith("__")}
    assert others == set()


def test_the_names_are_sorted_and_there() -> None:
    for module in (idemconsumer, http, testing, sqlalchemy):
        assert module.__all__ == sorted(module.__all__, key=lambda name: (name[0].islower(), name))
        assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(ImportError):
        exec("from idemconsumer.testing import Nothing")


def test_a_worker_that_is_to_crash_needs_no_pytest() -> None:
    assert fresh("import sys; from idemconsumer.testing import CrashAt; print('pytest' in sys.modules)") == "False\n"


def test_production_imports_nothing_of_testing() -> None:
    run = (
        "import sys, idemconsumer, idemconsumer.cli.main; print([m for m in sys.modules if 'testing' in m.split('.')])"
    )
    assert "idemconsumer" not in fresh(run)
