"""docs/protocol.md is the contract: what cites it, what it cites, and its tables hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from idemconsumer.rules.values import Outcome, OutcomeKind
from idemconsumer.rules.verdicts import settle
from manual.sources import parsed
from tests.support import ROOT
from tests.support.protocol import HEADING, PROTOCOL, defined, rules

RULE = re.compile(r"\b[RJGBLDKQAPXOH][1-9]\d?\b")
TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)+)`")


def cited(folder: str) -> Iterator[tuple[str, Path]]:
    """Each rule that a file of the folder names, and the file."""
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".sql", ".md") and path != PROTOCOL:
            for rule in RULE.findall(path.read_text("utf-8")):
                yield rule, path.relative_to(ROOT)


def test_each_rule_has_one_heading_and_says_what_it_says() -> None:
    headings = HEADING.findall(PROTOCOL.read_text("utf-8"))
    assert len(headings) == len(set(headings)) > 90
    for rule, text in rules().items():
        assert "**What it says.**" in text, rule
        assert "**What breaks without it.**" in text, rule


def test_each_rule_belongs_to_one_principle() -> None:
    named = RULE.findall(PROTOCOL.read_text("utf-8").partition("## Principles")[2].partition("\n## ")[0])
    assert sorted(named) == sorted(rules())


@pytest.mark.parametrize("folder", ["idemconsumer", "migrations", "tests", "docs"])
def test_each_rule_that_is_cited_is_in_the_protocol(folder: str) -> None:
    known = rules()
    assert not [f"{path}: {rule}" for rule, path in cited(folder) if rule not in known]


def test_each_rule_is_cited_where_it_lives() -> None:
    lived = {rule for folder in ("idemconsumer", "migrations") for rule, _ in cited(folder)}
    assert not [rule for rule in rules() if rule not in lived]


def test_each_rule_names_tests_that_exist_or_says_why_there_is_none() -> None:
    for rule, text in rules().items():
        named = TEST.findall(text)
        assert named or re.search(r"^Not tested: \S", text, re.MULTILINE), rule
        for file, name in named:
            assert (ROOT / file).is_file(), f"{rule}: {file}"
            assert name in defined(ROOT / file), f"{rule}: {file}{name}"


def test_the_guarantees_name_tests_that_exist() -> None:
    named = TEST.findall((ROOT / "docs" / "guarantees.md").read_text("utf-8"))
    assert len(named) > 10
    for file, name in named:
        assert name in defined(ROOT / file), f"{file}{name}"


def only_long(path: Path) -> set[str]:
    """The tests of a file that `make test` leaves to `make test-long`, with whatever parameters."""
    module = parsed(path).body
    assigned = [ast.unparse(each) for each in module if isinstance(each, ast.Assign)]
    all_of_them = any(text.startswith("pytestmark") and "pytest.mark.long" in text for text in assigned)
    return {
        f"::{each.name}"
        for each in module
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and (all_of_them or "pytest.mark.long" in map(ast.unparse, each.decorator_list))
    }


def test_each_rule_is_shown_by_a_test_that_make_test_runs() -> None:
    for rule, text in rules().items():
        named = TEST.findall(text)
        assert not named or any(name not in only_long(ROOT / file) for file, name in named), rule


def test_each_fault_has_a_test_for_each_broker_or_a_reason() -> None:
    table = PROTOCOL.read_text("utf-8").partition("## Faults")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert rows[0] == ["fault", "Kafka", "RabbitMQ", "SQS", "Postgres queue"]
    assert len(rows) > 25
    for fault, *cells in rows[1:]:
        assert len(cells) == 4, fault
        for cell in cells:
            named = TEST.findall(cell)
            assert named or re.match(r"(cannot happen|not mended|not seen): \S", cell), f"{fault}: {cell}"
            for file, name in named:
                assert name in defined(ROOT / file), f"{fault}: {file}{name}"


def test_the_settlement_table_is_what_the_worker_does() -> None:
    rows = re.findall(r"^\| ([a-z]+) \| ([A-Z_]+) \|", PROTOCOL.read_text("utf-8"), re.MULTILINE)
    assert dict(rows) == {str(kind): settle(Outcome(kind)).name for kind in OutcomeKind}
