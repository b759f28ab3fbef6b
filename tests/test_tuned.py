"""Tests change the package's constants by names of their own, which one table maps to where they live."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from idemconsumer.stores import connection
from manual.sources import parsed
from tests.support import ROOT, tuning
from tests.support.tuning import CONSTANTS, as_it_is, tuned, tuning_source

FILES = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("constant", CONSTANTS)
def test_each_constant_is_where_the_table_says(constant: str) -> None:
    as_it_is(constant)


def test_what_a_test_gives_holds_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = as_it_is("lookout_pause")
    with monkeypatch.context() as patch:
        tuned(patch, lookout_pause=0.02, claim_lock_patience=0.1, kafka_metadata_age=0.5)
        assert vars(connection)["_LOOK_OUT"] == 0.02
        assert (as_it_is("claim_lock_patience"), as_it_is("kafka_metadata_age")) == ("100ms", 500)
    assert as_it_is("lookout_pause") == usual != 0.02


def test_source_text_says_the_same() -> None:
    assert tuning_source(lookout_pause=0.02) == (
        "import idemconsumer.stores.connection\nidemconsumer.stores.connection._LOOK_OUT = 0.02\n"
    )


def test_a_name_that_is_unknown_changes_nothing_and_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = as_it_is("lookout_pause")
    with pytest.raises(LookupError, match="no constant is called look_out_pause: write lookout_pause"):
        tuned(monkeypatch, lookout_pause=0.02, look_out_pause=0.02)
    assert as_it_is("lookout_pause") == usual


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("stores.gone._LOOK_OUT", r"no module idemconsumer\.stores\.gone: write in CONSTANTS .* where pause lives now"),
        ("stores.connection._GONE", r"idemconsumer\.stores\.connection has no _GONE: write in CONSTANTS"),
    ],
)
def test_a_constant_that_has_moved_says_what_to_write(monkeypatch: pytest.MonkeyPatch, place: str, says: str) -> None:
    monkeypatch.setitem(tuning.CONSTANTS, "pause", tuning.at(place))
    with pytest.raises(LookupError, match=says):
        tuned(monkeypatch, pause=0.1)


def private_constants(file: Path) -> Iterator[str]:
    """As tests would set them: by the name in a text, or as an attribute of what is imported."""
    if "setattr" not in file.read_text("utf-8"):
        return
    imported = set[str]()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "idemconsumer":
            imported.update(name.asname or name.name for name in node.names)
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            texts = [str(each.value) for each in node.args[:2] if isinstance(each, ast.Constant)]
            ours = ast.unparse(node.args[0]) in imported or any(text.startswith("idemconsumer.") for text in texts)
            if ours and any(re.search(r"(^|\.)_[A-Z][A-Z_]*$", text) for text in texts):
                yield f"{file.relative_to(ROOT)}:{node.lineno}"


def test_no_test_sets_a_private_constant_but_by_the_table() -> None:
    assert [place for file in FILES for place in private_constants(file)] == [], "call `tuned`"
