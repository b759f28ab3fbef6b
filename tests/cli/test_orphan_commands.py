"""What `check` says of sagas that nobody continues, and how `sagas move` gives them to another handler (L31)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from idemconsumer.cli.main import main
from idemconsumer.process.child import Exit
from tests.support.servers.postgres import migrated

APP = """
from idemconsumer import App, Saga

app = App("travel")

@app.idempotent_handler("postgres:trips", key="id", version="2")
async def book(trip: dict[str, str], saga: Saga) -> None: ...
"""
SAGA = """
with scope as (
    insert into idemconsumer.scope (name) values (%(scope)s) on conflict (name) do update set name = excluded.name
    returning id
)
insert into idemconsumer.saga (key, scope_id, handler, state, token, worker, due, attempt, version, source, position,
    body, headers, started_at)
select sha256(%(key)s::bytea), id, %(handler)s, 1, nextval('idemconsumer.saga_token'), %(worker)s,
    now(), 1, %(version)s, '', '', '', '', now()
from scope
"""


class Travel:
    """A database with sagas, and a shell to type in."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def sql(self, query: str, params: Any = ()) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._dsn) as connection:
            cursor = connection.execute(query.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def begun(self, key: str, app: str, handler: str, version: str | None, worker: int | None = None) -> None:
        its = {"key": key, "scope": f"{app}/-/{handler}", "handler": handler, "version": version, "worker": worker}
        self.sql(SAGA, its)

    def __call__(self, *words: str, code: int = Exit.DONE) -> Result:
        result = CliRunner().invoke(main, list(words), env={"IDEMCONSUMER_DSN": self._dsn})
        assert result.exit_code == code, result.output
        return result


@pytest.fixture
def travel(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Travel:
    migrated(database, "idemconsumer")
    (tmp_path / "orphan_travel.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    return Travel(database)


def test_check_says_which_sagas_nobody_continues_and_what_to_do(travel: Travel) -> None:
    travel.begun("a", "travel", "book", "2")
    travel.begun("b", "travel", "book", "1")
    travel.begun("c", "travel", "book_trip", None)
    travel.begun("d", "shop", "reserve", None)
    said = travel("check", "orphan_travel:app").stdout.splitlines()
    warnings = [line.split(": ", 1) for line in said if line.startswith("warning") and "sagas of" in line]
    assert [subject.split(maxsplit=1)[1] for subject, _ in warnings] == [
        "sagas of shop/reserve", "sagas of travel/book", "sagas of travel/book_trip",
    ]  # fmt: skip
    other, version, gone = (text for _, text in warnings)
    assert other == (
        "1 sagas of app 'shop' wait for it, but no worker runs it; start one, or if it was renamed, restore its name "
        'with name="reserve" in App("shop"), or `idemconsumer sagas move shop/reserve APP/HANDLER` '
        "gives them to another handler"
    )
    assert version.startswith("1 sagas began with version '1', which no worker runs; start one")
    assert gone.startswith(
        "1 sagas wait for it, but app 'travel' has no such handler of sagas; if it was renamed, restore its name "
        'with name="book_trip", or bring it back, or `idem'
    )

    findings = json.loads(travel("check", "orphan_travel:app", "--json").stdout)
    assert {"level": "warning", "subject": "sagas of travel/book_trip", "text": gone} in findings


def test_check_says_nothing_of_sagas_that_have_a_worker(travel: Travel) -> None:
    travel.begun("a", "travel", "book", "2")
    travel.begun("b", "travel", "book", "1")
    travel.sql(
        "insert into idemconsumer.worker (name, lease, until, runs) values ('old', '1m', now() + interval '1m', %s)",
        ['[{"app": "travel", "handler": "book", "version": "1"}]'],
    )
    assert "sagas of" not in travel("check", "orphan_travel:app").stdout


def test_move_gives_sagas_to_another_handler_and_leaves_what_is_held(travel: Travel) -> None:
    ((worker,),) = travel.sql(
        "insert into idemconsumer.worker (name, lease, until, runs)"
        " values ('w', '1m', now() + interval '1m', '[]') returning id"
    )
    travel.begun("a", "travel", "book_trip", None)
    travel.begun("b", "travel", "book_trip", None, worker)
    travel.begun("c", "shop", "book_trip", None)
    moved = travel("sagas", "move", "travel/book_trip", "travel/book")
    assert moved.stdout == "moved: 1 sagas of travel/book_trip to travel/book\n"
    assert moved.stderr == "left: 1, which live workers own; stop those workers, and repeat this\n"
    assert travel.sql("select handler, app from idemconsumer.saga order by token desc, handler, app") == [
        ("book", "travel"), ("book_trip", None), ("book_trip", None),
    ]  # fmt: skip
    travel.sql("update idemconsumer.worker set until = now() - interval '1s'")
    again = travel("sagas", "move", "travel/book_trip", "travel/book", "--json")
    assert json.loads(again.stdout) == {"moved": 1, "held": 0}
    assert again.stderr == ""


def test_move_says_of_which_handlers_there_are_sagas_if_it_found_none(travel: Travel) -> None:
    """A name that was mistyped looked like a job that was done."""
    there_are = "travel/trip has no unfinished sagas; unfinished sagas belong to: "
    none = travel("sagas", "move", "travel/trip", "travel/book")
    assert (none.stdout, none.stderr) == ("moved: 0 sagas of travel/trip to travel/book\n", f"{there_are}none at all\n")
    travel.begun("a", "travel", "book_trip", None)
    travel.begun("b", "a%2Fb", "book_trip", None)
    named = travel("sagas", "move", "travel/trip", "travel/book", "--json")
    assert named.stderr == f"{there_are}a/b/book_trip, travel/book_trip\n"
    assert json.loads(named.stdout) == {"moved": 0, "held": 0}


@pytest.mark.parametrize("wrong", ["book_trip", "/book_trip", "travel/"])
def test_move_says_how_a_handler_is_written(travel: Travel, wrong: str) -> None:
    for words in ((wrong, "travel/book"), ("travel/book", wrong)):
        said = travel("sagas", "move", *words, code=Exit.USAGE).stderr
        assert f"{wrong!r} is not APP/HANDLER; write e.g. shop/book_ride" in said
