"""The table of mutants: one TOML file for each letter of the protocol, as data.

[[mutant]]
rule = "J3"                    # of docs/protocol.md, or a short name in lower case
file = "idemconsumer/..."
text = '''...'''               # stands once in the file
becomes = '''...'''
tests = ["tests/..."]          # files, or tests of them as pytest names them; at least one must fail
survives = "..."               # only where no test can notice: why
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support import ROOT
from tests.support.protocol import defined, rules

FOLDER: Final = Path(__file__).parent
_RULE: Final = re.compile(r"[A-Z]\d+")


@dataclass(frozen=True)
class Mutant:
    rule: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    survives: str = ""

    def __str__(self) -> str:
        first = next(filter(None, map(str.strip, self.text.splitlines())), "")
        return f"{self.rule} {self.file}: {first[:60]}"


def mutants() -> list[Mutant]:
    """All of the table."""
    return [
        Mutant(**{**row, "tests": tuple(row["tests"])})
        for path in sorted(FOLDER.glob("*.toml"))
        for row in tomllib.loads(path.read_text("utf-8")).get("mutant", ())
    ]


def reasons() -> dict[str, str]:
    """Of rules that no row takes out."""
    return tomllib.loads((FOLDER / "none.toml").read_text("utf-8"))


def stale(mutant: Mutant) -> Iterator[str]:
    """Why a row no longer applies."""
    path = ROOT / mutant.file
    times = path.read_text("utf-8").count(mutant.text) if path.is_file() else 0
    if times != 1:
        yield f"the text stands {times} times in the file" if path.is_file() else "there is no such file"
    elif path.suffix == ".py":  # what does not compile is noticed by any test
        try:
            compile(path.read_text("utf-8").replace(mutant.text, mutant.becomes), mutant.file, "exec")
        except SyntaxError as error:
            yield f"what it makes does not compile: {error}"
    if mutant.text == mutant.becomes:
        yield "it changes nothing"
    if _RULE.fullmatch(mutant.rule) and mutant.rule not in rules():
        yield "the protocol has no such rule"
    if not mutant.tests:
        yield "it names no test"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file():
            yield f"there is no {file}"
        elif name and f"::{name.partition('[')[0]}" not in defined(ROOT / file):
            yield f"there is no {test}"
