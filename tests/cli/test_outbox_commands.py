"""`outbox`: what waits for its broker, and what a person does about what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from idemconsumer.cli.main import main
from tests.support.servers.postgres import migrated

FILL = """
insert into idemconsumer.outbox (destination, key, order_key, body, headers, due_at, tries, error, parked_at) values
    ('kafka:b', 'k', 'k', 'parked', '{"n": "v"}', null, 8, 'too large', clock_timestamp()),
    ('kafka:b', 'k', 'k', 'later', '{}', clock_timestamp() + interval '1 h', 1, 'too large', null),
    ('kafka:b', null, null, '\\xff', '{}', null, 0, null, null),
    ('sqs:c', null, null, 'other', '{}', null, 8, 'no group', clock_timestamp())
"""
STATES = "select id, parked_at is not null, due_at is not null, tries from idemconsumer.outbox order by id"

Call = Callable[..., Result]


@pytest.fixture
def filled(database: str) -> str:
    migrated(database, "idemconsumer")
    do(database, FILL)
    return database


@pytest.fixture
def call(filled: str) -> Call:
    def run(*words: str, code: int = 0) -> Result:
        found = CliRunner().invoke(main, ["outbox", *words], env={"IDEMCONSUMER_DSN": filled})
        assert found.exit_code == code, found.output
        return found

    return run


def do(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def test_they_are_listed_oldest_first_and_chosen_by_what_is_known_of_them(call: Call) -> None:
    listed = json.loads(call("list", "--json").stdout)
    assert [each["id"] for each in listed] == [1, 2, 3, 4]
    assert (listed[0]["tries"], listed[0]["error"], listed[0]["size"]) == (8, "too large", 6)
    for words, ids in (
        (["--parked"], [1, 4]),
        (["--destination", "kafka:b", "--parked"], [1]),
        (["--error", "large"], [1, 2]),
        (["--key", "k", "--since", "1h"], [1, 2]),
        (["--after", "1", "--limit", "2"], [2, 3]),
    ):
        assert [each["id"] for each in json.loads(call("list", "--json", *words).stdout)] == ids
    shown = call("list").stdout.splitlines()
    assert [line.split()[5] for line in shown[1:]] == ["parked", "later", "waiting", "parked"]
    assert "no outgoing messages" in call("list", "--destination", "kafka:none").stdout


def test_a_long_key_makes_no_wide_table(call: Call, filled: str) -> None:
    do(filled, "insert into idemconsumer.outbox (destination, key, body) values ('kafka:b', repeat('k', 100000), '')")
    assert max(map(len, call("list").stdout.splitlines())) < 300
    assert json.loads(call("list", "--json").stdout)[-1]["key"] == "k" * 100_000
    assert f"key         {'k' * 100_000}\n" in call("show", "5").stdout


def test_one_is_shown_in_full(call: Call) -> None:
    shown = json.loads(call("show", "1", "--json").stdout)
    assert (shown["body"], shown["headers"]) == ({"text": "parked"}, [{"name": "n", "text": "v"}])
    assert json.loads(call("show", "3", "--json").stdout)["body"] == {"base64": "/w=="}
    assert "parked" in call("show", "1").stdout
    assert "there is no outgoing message 9" in call("show", "9", code=2).output


def test_what_was_refused_is_sent_again_and_nothing_else(call: Call, filled: str) -> None:
    retried = call("retry", "1", "999", "--json")
    assert json.loads(retried.stdout) == {"retried": 1}
    assert "skipped 1 of these ids: no matching outgoing message" in retried.stderr
    assert do(filled, STATES)[-1][1:] == (False, False, 0), "and it comes last"
    assert "to be sent again: 2" in call("retry", "--all").stdout
    assert [row[1:] for row in do(filled, STATES)] == [(False, False, 0)] * 4
    assert "give ids" in call("retry", code=2).output


def test_what_is_parked_is_discarded_and_the_rest_only_if_asked_for(call: Call, filled: str) -> None:
    assert json.loads(call("discard", "--all", "--dry-run", "--json").stdout) == {"discarded": 2, "dry_run": True}
    assert "discarded: 1" in call("discard", "--destination", "kafka:b", "--yes").stdout
    assert [row[0] for row in do(filled, STATES)] == [2, 3, 4]
    assert "discarded: 2" in call("discard", "--destination", "kafka:b", "--waiting", "--yes").stdout
    assert [row[0] for row in do(filled, STATES)] == [4]


def test_doctor_and_status_say_what_waits_and_what_is_parked(filled: str) -> None:
    def run(*words: str) -> Result:
        return CliRunner().invoke(main, list(words), env={"IDEMCONSUMER_DSN": filled})

    said = run("doctor").output
    assert "outbox to kafka:b: 1 messages were refused and wait for a person" in said
    assert "outbox to kafka:b: 2 messages wait, and no live worker on record relays to kafka" in said
    found = json.loads(run("status", "--json").stdout)["outbox"]
    (line,) = (each for each in found if each["destination"] == "kafka:b")
    assert (line["waiting"], line["later"], line["parked"], line["error"]) == (1, 1, 1, "too large")
    assert "outgoing messages" in run("status").output
