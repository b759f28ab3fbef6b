"""`audit`: who decided what about messages, in the commit that does it (O16)."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from idemconsumer.admin.dead_letters import Admin, Which
from idemconsumer.cli.main import main
from idemconsumer.message import keys
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned

SCOPE = keys.scope_name("shop", None, "take")
KEYS = [keys.digest("shop", None, "take", name) for name in "abcde"]
_OPEN = """
insert into idemconsumer.scope (name) values (%(scope)s);
select set_config('idemconsumer.open', 't', true);
insert into idemconsumer.record (key, scope_id, state, changed_at)
    select w.key, s.id, 5, now() from idemconsumer.scope as s, unnest(%(keys)s::bytea[]) as w (key);
select idemconsumer.seal('t');
insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, key, body, headers,
    attempts, first_at, last_at)
    select w.key, 'take', %(scope)s, 'postgres:q', 'q#1', 'attempts_exhausted', 'ValueError: of ann@example.org', w.key,
        '{}', '{}', 5, now(), now() from unnest(%(keys)s::bytea[]) as w (key);
insert into idemconsumer.outbox (destination, body, tries, parked_at) select 'kafka:bills', '', 8, now()
    from generate_series(1, 3);
insert into idemconsumer.kafka_stop values ('c', 'shop', 'orders', 3, 7, 8, 'wrong checksum', false, now(), now());
"""


@pytest.fixture
def dsn(database: str) -> str:
    migrated(database, "idemconsumer")
    with psycopg.connect(database, cursor_factory=psycopg.ClientCursor) as connection:
        connection.execute(_OPEN, {"scope": SCOPE, "keys": KEYS})
    return database


def run(dsn: str, *words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, words, env={"IDEMCONSUMER_DSN": dsn})
    assert result.exit_code == code, result.output
    return result


def audit(dsn: str) -> list[dict[str, Any]]:
    """The oldest first."""
    entries: list[dict[str, Any]] = json.loads(run(dsn, "audit", "--json").stdout)
    return entries[::-1]


def test_what_is_decided_about_messages_is_in_it(dsn: str) -> None:
    digits = [key.hex()[:12] for key in KEYS]
    expected = []
    for words, what, target in (
        (f"dead redrive --hash {digits[0]} --run fix", "redrive", "1 dead letters, run fix"),
        (f"dead discard --hash {digits[1]} --reason attempts_exhausted --yes", "discard",
         "1 dead letters, reason attempts_exhausted"),
        (f"keys release {digits[2]}", "release", f"key {digits[2]}"),
        (f"keys forget {digits[3]} --yes", "forget", f"key {digits[3]}"),
        (f"keys forget {digits[4]} --record --yes", "forget", f"key {digits[4]} and its record"),
        ("outbox retry 1", "retry", "1 outgoing messages"),
        ("outbox discard --destination kafka:bills --yes", "discard", "2 outgoing messages, destination kafka:bills"),
        ("skip kafka:orders/3@7", "skip", "kafka:orders/3@7 in group shop"),
    ):  # fmt: skip
        run(dsn, *words.split(), "--by", "ann")
        expected.append(("ann", what, target))
    assert [(entry["by"], entry["what"], entry["target"]) for entry in audit(dsn)] == expected


def test_what_changes_nothing_is_not(dsn: str) -> None:
    for words, code in (
        ("dead redrive --all --dry-run", 0), ("dead redrive --reason conflict", 1), ("dead discard --all --dry-run", 0),
        ("dead discard --reason conflict --yes", 1), ("outbox retry --destination sqs:x", 1),
        ("outbox discard --all --dry-run", 0),
    ):  # fmt: skip
        run(dsn, *words.split(), code=code)
    assert audit(dsn) == []


async def test_what_was_interrupted_says_how_far_it_came(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, letters_of_a_page=2)
    done = 0

    def progress(letters: int) -> None:
        nonlocal done
        if (done := done + letters) == 4:
            raise EOFError

    with pytest.raises(EOFError):
        await Admin(dsn, "idemconsumer").discard(Which(handler="take"), progress, by="ann")
    with psycopg.connect(dsn) as connection:
        ((target,),) = connection.execute("select target from idemconsumer.audit").fetchall()
        assert connection.execute("select count(*) from idemconsumer.dead_letter").fetchall() == [(1,)]
    assert target == "4 dead letters, handler take"
