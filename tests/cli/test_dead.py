"""Dead letters on the command line: listed, grouped, redriven, discarded, exported."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from idemconsumer.cli.main import main
from idemconsumer.message import keys
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned


class Desk:
    """A database with letters of three causes, and a shell."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.stderr = ""

    def __call__(self, *words: str, code: int = 0, stdin: str = "") -> str:
        result = CliRunner().invoke(main, words, input=stdin, env={"IDEMCONSUMER_DSN": self.dsn})
        assert result.exit_code == code, result.output
        self.stderr = result.stderr
        return str(result.stdout)

    def json(self, *words: str) -> Any:
        return json.loads(self("dead", *words, "--json"))

    def sql(self, query: str, *given: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            cursor = connection.execute(query.encode(), given)
            return cursor.fetchall() if cursor.description else []

    def letter(
        self, handler: str, reason: str, error: str, *, key: str | None = None, tenant: str | None = None
    ) -> None:
        stored = None if key is None else keys.digest("shop", tenant, handler, key)
        scope = keys.scope_name("shop", tenant, handler)
        self.sql("insert into idemconsumer.scope (name) values (%s) on conflict do nothing", scope)
        self.sql(
            "insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, key,"
            " body, headers, attempts, first_at, last_at) values (sha256(random()::text::bytea), %s, %s, 'postgres:q',"
            " 'q#1', %s, %s, %s, '{\"id\": 1}', '{}', 5, now(), now())",
            handler, scope, reason, error, stored,
        )  # fmt: skip


@pytest.fixture
def desk(database: str) -> Desk:
    migrated(database, "idemconsumer")
    desk = Desk(database)
    for n in range(3):
        desk.letter("order", "attempts_exhausted", f"ValueError: no {n} (shop.py:12 order)", key=f"k{n}")
    desk.letter("order", "attempts_exhausted", "shop.errors.Gone (shop.py:30 order)", key="k3", tenant="acme")
    desk.letter("mail", "undecodable", "Expected `str`, got `int` - at `$.id`")
    return desk


def test_they_are_chosen_by_what_is_known_of_them(desk: Desk) -> None:
    assert [letter["id"] for letter in desk.json("list")] == [5, 4, 3, 2, 1]
    assert [letter["id"] for letter in desk.json("list", "--limit", "2", "--before", "4")] == [3, 2]
    assert "--before 4" in (desk("dead", "list", "--limit", "2"), desk.stderr)[1]
    assert [letter["id"] for letter in desk.json("list", "--reason", "undecodable")] == [5]
    assert [letter["id"] for letter in desk.json("list", "--error", "shop.py:30")] == [4]
    assert [letter["id"] for letter in desk.json("list", "--handler", "order", "--key", "k1")] == [2]
    assert [letter["id"] for letter in desk.json("list", "--handler", "order", "--key", "k3", "--tenant", "acme")] == [
        4
    ]
    assert desk.json("list", "--handler", "order", "--key", "k3", "--tenant", "other") == []
    digits = keys.digest("shop", None, "order", "k0").hex()[:10]
    assert [letter["id"] for letter in desk.json("list", "--hash", digits)] == [1]
    desk.sql("update idemconsumer.dead_letter set last_at = now() - interval '3 hours' where id < 5")
    assert [letter["id"] for letter in desk.json("list", "--since", "2h")] == [5]
    assert "needs --handler" in (desk("dead", "list", "--key", "k1", code=2), desk.stderr)[1]
    assert "is not the beginning" in (desk("dead", "list", "--hash", "zz", code=2), desk.stderr)[1]


def test_they_are_chosen_by_app_tenant_and_time(desk: Desk) -> None:
    assert [letter["id"] for letter in desk.json("list", "--tenant", "acme")] == [4]
    assert [letter["id"] for letter in desk.json("list", "--app", "shop", "--handler", "mail")] == [5]
    assert desk.json("list", "--app", "sho") == []
    desk.sql("update idemconsumer.dead_letter set last_at = now() - interval '3 hours' where id < 5")
    assert [letter["id"] for letter in desk.json("list", "--until", "2h", "--since", "4h")] == [4, 3, 2, 1]
    groups = desk.json("groups", "--by-tenant", "--handler", "order")
    assert [(each["app"], each["tenant"], each["letters"]) for each in groups] == [
        ("shop", None, 3),
        ("shop", "acme", 1),
    ]
    assert "acme" in desk("dead", "groups", "--by-tenant")
    assert desk("dead", "redrive", "--tenant", "acme", "--dry-run") == "would redrive: 1 dead letters\n"


def test_runs_are_listed_and_cancelled(desk: Desk) -> None:
    assert desk("dead", "runs") == "no runs\n"
    desk("dead", "redrive", "--handler", "order", "--run", "r1", "--by", "ann")
    (line,) = [line for line in desk("dead", "runs").splitlines() if line.startswith("r1")]
    assert line.split()[-4:] == ["ann", "4", "4", "waiting"]
    assert desk("dead", "runs", "--cancel", "r1", "--by", "bob") == "cancelled: 4 dead letters\n"
    (run,) = desk.json("runs")
    assert (run["run"], run["cancelled"], run["outcomes"]) == ("r1", True, {"cancelled": 4})
    assert len(desk.json("list")) == 5
    assert "no run 'nope'" in (desk("dead", "runs", "--cancel", "nope", code=2), desk.stderr)[1]
    assert "cancel redrive" in desk("audit")


@pytest.mark.parametrize("verb", ["redrive", "discard"])
def test_who_chooses_nothing_is_told(desk: Desk, verb: str) -> None:
    for words in (["--handler", "nope"], ["--reason", "undecodabel"], ["--app", "shop2", "--dry-run"], ["4711"]):
        assert desk("dead", verb, *words, code=1) == ""
        assert "no dead letter matches" in desk.stderr
    letter = json.loads(desk("dead", "list", "--json"))[0]["id"]
    assert desk("dead", verb, str(letter), "4711", "--dry-run").endswith(" 1 dead letters\n")
    assert "skipped 1 of these ids: no matching dead letter" in desk.stderr
    assert "only under mail, order" in (desk("dead", verb, "--handler", "nope", code=1), desk.stderr)[1]
    desk("dead", "redrive", "--all")
    assert "0 dead letters" in desk("dead", verb, "--all")


def test_an_export_of_nothing_is_told(desk: Desk) -> None:
    assert desk("dead", "export", "--handler", "nope", code=1) == ""
    assert "no dead letter matches" in desk.stderr


def test_they_are_grouped_by_cause(desk: Desk) -> None:
    groups = desk.json("groups")
    assert [
        (each["letters"], each["handler"], each["exception"], each["place"], each["newest"]) for each in groups
    ] == [
        (3, "order", "ValueError", "shop.py:12 order", 3),
        (1, "mail", None, None, 5),
        (1, "order", "shop.errors.Gone", "shop.py:30 order", 4),
    ]
    assert "shop.py:12 order" in desk("dead", "groups")
    assert len(desk.json("groups", "--handler", "mail")) == 1


def test_they_are_redriven_by_filter_and_shown_with_that(desk: Desk) -> None:
    assert desk("dead", "redrive", "--error", "shop.py:12", "--dry-run") == "would redrive: 3 dead letters\n"
    assert desk.sql("select count(*) from idemconsumer.queue") == [(0,)]
    assert desk("dead", "redrive", "--error", "shop.py:12", "--by", "ann", "--run", "r1") == (
        "redriven: 3 dead letters; run r1, see `idemconsumer dead runs`\n"
    )
    assert "--run r1" in desk.stderr
    assert desk.sql("select name, count(*) from idemconsumer.queue group by 1") == [("~~shop/order", 3)]
    assert [letter["id"] for letter in desk.json("list")] == [5, 4]
    assert len(desk.json("list", "--redriven")) == 5
    assert "attempts_exhausted (redriven)" in desk("dead", "list", "--redriven")
    assert "by ann: waiting" in desk("dead", "show", "1")
    assert [each["by"] for each in desk.json("show", "1")["redrives"]] == ["ann"]
    done = desk.json("redrive", "5", "4", "4711")
    assert (done["letters"], done["dry_run"]) == ({"redrives": 2}, False)
    assert "give ids" in (desk("dead", "redrive", code=2), desk.stderr)[1]
    desk.sql("update idemconsumer.dead_letter set body_size = 9000, redriven_at = null")
    assert desk("dead", "redrive", "--all").startswith("redriven: 0 dead letters; run ")
    assert "left: 5 whose message is not stored in full" in desk.stderr


def test_they_are_discarded_once_that_is_confirmed(desk: Desk) -> None:
    assert desk("dead", "discard", "--handler", "order", "--dry-run") == "would discard: 4 dead letters\n"
    desk("dead", "discard", "--handler", "order", stdin="n\n", code=1)
    assert len(desk.json("list")) == 5
    assert desk("dead", "discard", "--handler", "order", stdin="y\n").endswith("discarded: 4 dead letters\n")
    assert desk.json("discard", "--all", "--yes") == {"discarded": 1, "of_sagas": 0, "dry_run": False}
    assert desk("dead", "list") == "no dead letters\n"


def test_they_are_exported_as_lines_page_by_page(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, letters_of_a_page=2)
    lines = [json.loads(line) for line in desk("dead", "export").splitlines()]
    assert [(line["id"], line["body"]) for line in lines] == [(n, '{"id": 1}') for n in (5, 4, 3, 2, 1)]
    assert "holds payloads" in desk.stderr
