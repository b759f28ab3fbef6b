"""The table of mutants fits the code. `make mutants` runs it."""

from __future__ import annotations

from tests.mutants.table import mutants, reasons, stale
from tests.support.protocol import rules


def test_each_row_still_applies() -> None:
    """All that do not, at once."""
    assert [f"{mutant}: {why}" for mutant in mutants() for why in stale(mutant)] == []


def test_no_row_is_there_twice() -> None:
    places = [(mutant.file, mutant.text, mutant.becomes) for mutant in mutants()]
    assert len(places) == len(set(places))


def test_each_rule_has_a_row_or_a_reason_why_there_is_none() -> None:
    taken_out, without = {mutant.rule for mutant in mutants()}, reasons()
    assert [rule for rule in rules() if rule[0] in "JB" and rule not in taken_out | without.keys()] == []
    assert [rule for rule in without if rule in taken_out or rule not in rules()] == []
