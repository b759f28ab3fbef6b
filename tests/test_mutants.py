"""The table of mutants fits the code. `make mutants` runs it."""

from __future__ import annotations

from tests.mutants.table import mutants, stale


def test_each_row_still_applies() -> None:
    """All that do not, at once."""
    assert [f"{mutant}: {why}" for mutant in mutants() for why in stale(mutant)] == []


def test_no_row_is_there_twice() -> None:
    places = [(mutant.file, mutant.text, mutant.becomes) for mutant in mutants()]
    assert len(places) == len(set(places))
