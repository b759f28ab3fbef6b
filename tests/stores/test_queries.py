"""The .sql files: what is filled in, and what may not stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from idemconsumer.rules.values import State, StepState
from idemconsumer.sql import queries
from idemconsumer.sql.queries import STORED_STATES, load
from tests.support.ledger import SCHEMA

FILES = sorted(Path(queries.__file__).parent.glob("*.sql"))
SECTION = re.compile(r"^-- (?:name|fragment): (\w+)$", re.MULTILINE)
# A column or parameter called state beside a number; also one number in a row of states.
BARE_STATE = re.compile(r"state\b\s*(?:=|<>|!=|in)\s*\(?\s*\d|\(\d, \d\)")


def test_the_states_are_stored_by_the_numbers_of_the_enums() -> None:
    assert {**State.__members__, **StepState.__members__} == STORED_STATES
    assert len(State) + len(StepState) == len(STORED_STATES), "no name is that of a record's state and of a step's"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_state_is_written_as_a_number(file: Path) -> None:
    assert BARE_STATE.findall(file.read_text("utf-8")) == []


def test_each_name_stands_in_one_file_and_all_are_loaded() -> None:
    names = [name for file in FILES for name in SECTION.findall(file.read_text("utf-8"))]
    fragments = {
        "held", "progressed", "unserved", "gone", "served", "leased_saga", "of_app", "ours", "versions", "owners",
        "taken", "session", "messages", "chosen", "over", "aged", "when_sagas", "all_ranges", "decided",
        "counts", "chosen_outgoing", "outbox_look", "other_build", "queue_low", "delayed_low",
            "outbox_low", "outbox_due_low", "app_of_saga", "saga_read", "came_of",
    }  # fmt: skip
    assert len(names) == len(set(names))
    assert set(names) == {name for name in load(SCHEMA) if ":" not in name} | fragments


def test_a_statement_is_sent_with_states_and_fragments_filled_in() -> None:
    taking = load(SCHEMA)["take_sagas"].decode()
    assert 'not exists (select from "idemconsumer".worker as w' in taking
    assert "starts_with(coalesce(s.app" in taking
    assert "jsonb_build_object('app'" in taking, "a fragment within a fragment"
    assert "state <> 4 /* undo intent */" in taking
    assert not [place for query in load(SCHEMA).values() for place in re.findall(rb"\{\w+\}", query)]
