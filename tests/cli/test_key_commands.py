"""Keys on the command line."""

from __future__ import annotations

import json

import psycopg
import pytest
from click.testing import CliRunner, Result

from idemconsumer.cli.main import main
from idemconsumer.hashing import HASHING
from idemconsumer.message import keys
from idemconsumer.wrapping import new_key, unwrap, wrap
from tests.support.hashing import OTHER, SECRET, begin, restored
from tests.support.servers.postgres import migrated

KEY = keys.digest("shop", None, "take", "a")
SHORT = KEY.hex()[:12]


@pytest.fixture
def dsn(database: str) -> str:
    """With one key, which is dead."""
    migrated(database, "idemconsumer")
    with psycopg.connect(database) as connection:
        connection.execute("insert into idemconsumer.scope (name) values ('shop/-/take')")
        connection.execute("select set_config('idemconsumer.open', 't', true)")
        connection.execute(
            "insert into idemconsumer.record (key, scope_id, state, changed_at) select %s, id, 5, now()"
            " from idemconsumer.scope",
            [KEY],
        )
        connection.execute("select idemconsumer.seal('t')")
        connection.execute(
            "insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, key,"
            " body, headers, attempts, first_at, last_at) values ('i', 'take', 'shop/-/take', 'postgres:q', 'q#1',"
            " 'attempts_exhausted', %s, %s, '', '{}', 5, now(), now())",
            ["ValueError: \x1b (shop.py:12 take)", KEY],
        )
    return database


def run(dsn: str, *words: str, code: int = 0, stdin: str = "") -> Result:
    result = CliRunner().invoke(main, words, input=stdin, env={"IDEMCONSUMER_DSN": dsn})
    assert result.exit_code == code, result.output
    return result


def test_a_key_is_shown_and_explained(dsn: str) -> None:
    told = run(dsn, "explain", "--handler", "take", "--key", "a").stdout
    assert "attempts_exhausted: ValueError: \\x1b (shop.py:12 take), from postgres:q q#1" in told
    assert told.endswith(
        "if it came again now: it would not run: its key is dead, and the arrival would be counted; `dead redrive 1` "
        "runs it once more\n"
    )
    assert json.loads(run(dsn, "explain", SHORT, "--json").stdout)["letters"][0]["id"] == 1
    assert "letter      1 attempts_exhausted, 1 arrivals" in run(dsn, "keys", "show", SHORT).stdout
    assert SHORT in run(dsn, "keys", "list", "--state", "dead").stdout
    assert [line["key"] for line in json.loads(run(dsn, "keys", "list", "--json").stdout)] == [KEY.hex()]
    assert "there may be more: --after" in run(dsn, "keys", "list", "--limit", "1").stderr
    assert run(dsn, "keys", "list", "--state", "failed").stdout == "no keys\n"
    for words in (["explain"], ["keys", "show", SHORT, "--key", "a"], ["keys", "forget", "--handler", "take"]):
        assert "give KEY" in run(dsn, *words, code=2).stderr


def test_a_key_is_released(dsn: str) -> None:
    assert run(dsn, "keys", "release", SHORT, "--by", "ann").stdout.startswith(f"released: {SHORT}")
    assert "by ann: released" in run(dsn, "dead", "show", "1").stdout
    assert "has no record" in run(dsn, "keys", "release", SHORT, code=2).stderr


def test_a_key_is_forgotten_once_that_is_confirmed(dsn: str) -> None:
    run(dsn, "keys", "forget", SHORT, stdin="n\n", code=1)
    assert run(dsn, "dead", "list").stdout != "no dead letters\n"
    said = run(dsn, "keys", "forget", SHORT, stdin="y\n").stdout
    assert said.endswith(f"forgotten: {SHORT}, with 1 dead letters; its record stays, so it does not run again\n")
    assert run(dsn, "dead", "list").stdout == "no dead letters\n"
    done = json.loads(run(dsn, "keys", "forget", SHORT, "--record", "--yes", "--json").stdout)
    assert done == {"key": KEY.hex(), "letters": 0, "record": True}


def test_a_handler_that_has_another_name_here_is_said(dsn: str) -> None:
    """L68: the function's name need not be the handler's."""
    told = "nothing is stored under a handler 'took', only under take; a handler is stored under its name="
    for verb in ("keys", "dead", "sagas"):
        assert told in run(dsn, verb, "list", "--handler", "took").stderr
        assert run(dsn, verb, "list", "--handler", "take").stderr == ""
    assert told in run(dsn, "explain", "--handler", "took", "--key", "a", code=2).stderr
    assert told in run(dsn, "sagas", "show", "--handler", "took", "--key", "a", code=2).stderr


def test_keys_are_found_by_their_text_under_a_secret_that_is_rotated(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R39: who looks changes nothing, and who decides rotates it as a worker does."""
    monkeypatch.setenv("IDEMCONSUMER_KEY_SECRETS", f"{OTHER},{SECRET}")
    by_text = ["--handler", "take", "--key", "a"]
    with restored(), psycopg.connect(dsn, autocommit=True) as connection:
        begin(SECRET)
        HASHING.settle(new_key())
        key, stored = keys.digest("shop", None, "take", "a"), wrap(SECRET.encode(), HASHING.data_key or b"")
        connection.execute("insert into idemconsumer.hashing (wrapped) values (%s)", [stored])
        connection.execute("update idemconsumer.attempt set key = %s", [key])
        connection.execute("update idemconsumer.dead_letter set key = %s", [key])

        def wrapped() -> bytes:
            ((found,),) = connection.execute("select wrapped from idemconsumer.hashing").fetchall()
            return bytes(found)

        begin()
        assert f"key         {key.hex()}" in run(dsn, "keys", "show", *by_text).stdout
        said = run(dsn, "doctor", code=1).stdout
        assert "key_secrets: the data key is wrapped by number 2; the next process that starts with this list" in said
        assert wrapped() == stored
        begin()
        run(dsn, "keys", "forget", "--yes", *by_text)
        assert unwrap(OTHER.encode(), wrapped()) == HASHING.data_key
        assert "the data key is wrapped by the first one; once all processes" in run(dsn, "doctor").stdout
        monkeypatch.delenv("IDEMCONSUMER_KEY_SECRETS")
        begin()
        assert "set IDEMCONSUMER_KEY_SECRETS to it" in run(dsn, "keys", "show", *by_text, code=2).stderr
        assert "key_secrets" not in run(dsn, "doctor").stdout  # who only watches needs none


def test_what_was_interrupted_behind_the_record_is_repeated_with_the_whole_key(dsn: str) -> None:
    """Its delivery log is searched last, and by then nothing else is known of the key."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "insert into idemconsumer.delivery_log (at, until, app, handler, worker, keys, sources, positions,"
            " outcomes, attempts, ended, arrived)"
            " values (now(), now() + '1 day', 'shop', 'take', 'w', %s, 's', 'p', 'o', '{1}', '{1}', '{1}')",
            [[int.from_bytes(KEY[:8], "big", signed=True)]],
        )
        connection.execute("alter table idemconsumer.delivery_log rename to away")
        interrupted = run(dsn, "keys", "forget", SHORT, "--record", "--yes", code=2).stderr
        connection.execute("alter table idemconsumer.away rename to delivery_log")
    assert f"forgetting {KEY.hex()}; after an interruption, repeat this" in interrupted
    assert "nothing is known of" in run(dsn, "keys", "forget", SHORT, "--record", "--yes", code=1).stderr
    assert run(dsn, "keys", "forget", KEY.hex(), "--record", "--yes").stdout.startswith(f"forgotten: {SHORT}")


def test_what_is_not_there_is_not_said_to_be_forgotten(dsn: str) -> None:
    for which in (["00" * 32], ["--handler", "take", "--key", "b"]):
        told = run(dsn, "keys", "forget", "--yes", *which, code=1)
        assert "nothing was forgotten" in told.stderr
        assert told.stdout == ""
