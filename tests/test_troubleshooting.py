"""docs/troubleshooting.md has each warning and error of the log, each reason of dead letters, and errors that exist."""

from __future__ import annotations

import ast
import re

from idemconsumer.admin.hints import _HINTS
from manual.events import events
from manual.sources import parsed
from manual.tables import REASONS_SAY
from tests.support import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
LEVELS = {"warning", "error", "critical"}


def named(row: list[str]) -> list[str]:
    return [one or two for one, two in re.findall(r"`` (.*?) ``|`([^`]+)`", row[0])]


def test_each_line_of_the_log_that_is_a_warning_is_there() -> None:
    warnings = {text for text, event in events().items() if event.levels & LEVELS}
    assert len(warnings) > 90, "this test sees what is logged"
    assert warnings - {text for row in ROWS for text in named(row)} == set()


def test_no_line_is_there_that_is_not_logged() -> None:
    about = PAGE[: PAGE.index("## Dead letters")].splitlines()
    listed = {text for line in about if line.startswith("| `") for text in named(line.split(" | "))}
    assert listed - events().keys() == set()


def test_each_reason_is_there_with_its_meaning_and_its_hint() -> None:
    about = PAGE[PAGE.index("## Dead letters") : PAGE.index("## Errors in your code")].splitlines()
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in about if line.startswith("| `")]
    listed = {reason.strip("`"): (meaning, hint.replace("\\|", "|")) for reason, meaning, hint in rows}
    assert listed == {reason: (REASONS_SAY[reason], hint) for reason, hint in _HINTS.items()}


def test_each_error_exists() -> None:
    errors = PAGE[PAGE.index("## Errors in your code") :]
    names = {
        name
        for line in errors.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    }
    classes = {
        each.name
        for path in (ROOT / "idemconsumer").rglob("*.py")
        for each in ast.walk(parsed(path))
        if isinstance(each, ast.ClassDef)
    }
    assert names <= classes
