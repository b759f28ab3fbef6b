"""`audit`: who decided what about sagas, in the commit that does it (O16)."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from idemconsumer import App, Done, Saga
from idemconsumer.cli.main import main
from idemconsumer.message import keys
from idemconsumer.process.child import Exit
from tests.support.servers.postgres import migrated

SCOPE = keys.scope_name("travel", None, "book")
_OPEN = """
insert into idemconsumer.scope (name) values (%(scope)s);
select set_config('idemconsumer.open', 't', true);
insert into idemconsumer.record (key, scope_id, state, changed_at)
    select w.key, s.id, 5, now() from idemconsumer.scope as s, unnest(%(keys)s::bytea[]) as w (key);
insert into idemconsumer.saga (key, scope_id, handler, state, token, due, attempt, version, source, position, body,
    headers, started_at, parked)
    select r.key, r.scope_id, 'book', 1, 1, now(), 1, '1', '', '', '', '', now(), 'unknown_effect'
    from idemconsumer.record as r;
insert into idemconsumer.step (key, name, kind, state, has_undo, token, started_at)
    select key, 'charged', 2, 1, false, 1, now() from idemconsumer.record;
select idemconsumer.seal('t');
"""
_COMMIT = {
    "audit": "select xmin::text from idemconsumer.audit order by id desc limit 1",
    "history": "select xmin::text from idemconsumer.history order by id desc limit 1",
    "signal": "select xmin::text from idemconsumer.signal order by id desc limit 1",
}


def key_of(trip: str) -> bytes:
    return keys.digest("travel", None, "book", trip)


class Travel:
    """Sagas that wait for a person, and a shell to type in."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        migrated(dsn, "idemconsumer")
        with psycopg.connect(dsn, cursor_factory=psycopg.ClientCursor) as connection:
            connection.execute(_OPEN, {"scope": SCOPE, "keys": [key_of(trip) for trip in "abcdefg"]})

    def __call__(self, *words: str, code: int = Exit.DONE) -> str:
        result = CliRunner().invoke(main, words, env={"IDEMCONSUMER_DSN": self.dsn})
        assert result.exit_code == code, result.output
        return result.stdout

    def audit(self) -> list[tuple[str, ...]]:
        """The oldest first."""
        entries: list[dict[str, Any]] = json.loads(self("audit", "--json"))
        return [(entry["by"], entry["what"], entry["target"]) for entry in reversed(entries)]

    def commit_of(self, table: str) -> Any:
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(_COMMIT[table].encode()).fetchall()


@pytest.fixture
def travel(database: str) -> Travel:
    return Travel(database)


def test_what_a_person_decides_about_sagas_is_in_it(travel: Travel) -> None:
    short = {trip: key_of(trip).hex()[:12] for trip in "abcdefg"}
    expected = []
    for words, what, target in (
        (f"resume {short['a']}", "resume", f"saga {short['a']}"),
        (f"resume {short['b']} --accept-version", "resume", f"saga {short['b']}, with the present handler"),
        (f"abandon {short['c']} --no-undo", "abandon", f"saga {short['c']}, as it is"),
        (f"abandon {short['d']} --undo", "abandon", f"saga {short['d']}, to be undone"),
        (f"decide {short['e']} charged --not-done", "decide", f"saga {short['e']}, step charged: not done"),
        (f"cancel {short['f']} --undo", "cancel", f"saga {short['f']}, to be undone"),
        (f"signal {short['g']} --name go --payload 1", "signal", f"saga {short['g']}, go"),
        ("move travel/book travel/journey", "move", "6 sagas, travel/book to travel/journey"),
    ):
        travel("sagas", *words.split(), "--by", "ann")
        expected.append(("ann", what, target))
        assert travel.commit_of("audit") == travel.commit_of("signal" if what == "signal" else "history")
    assert travel.audit() == expected


def test_a_saga_that_was_put_aside_while_it_was_cancelled_can_be_cancelled_again(travel: Travel) -> None:
    short = key_of("a").hex()[:12]
    travel("sagas", "cancel", short, "--undo", "--by", "ann")
    travel("sagas", "cancel", short, "--by", "bob")
    assert travel.audit() == [(by, "cancel", f"saga {short}, to be undone") for by in ("ann", "bob")]


def test_what_changes_nothing_is_not(travel: Travel) -> None:
    short = key_of("a").hex()[:12]
    travel("sagas", "abandon", short, "--no-undo", "--by", "ann")
    for words, code in (
        (f"resume {short}", Exit.USAGE),
        (f"abandon {short} --undo", Exit.USAGE),
        (f"decide {short} charged --not-done", Exit.USAGE),
        (f"decide {key_of('b').hex()} reserved --not-done", Exit.USAGE),
        (f"cancel {short}", Exit.ERROR),
        (f"signal {short} --name go", Exit.ERROR),
        ("move travel/journey travel/book", Exit.DONE),
    ):
        travel("sagas", *words.split(), code=code)
    assert len(travel.audit()) == 1


async def test_what_code_decides_is_not(travel: Travel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saga's history has it, and nobody deletes a row of the audit."""
    monkeypatch.setenv("IDEMCONSUMER_DSN", travel.dsn)
    app = App("travel")

    @app.idempotent_handler("postgres:trips", key="id")
    async def book(trip: dict[str, str], saga: Saga) -> None: ...

    await app.decide(book, "charged", Done(None), key="a")
    await app.cancel(book, key="b")
    assert travel.commit_of("history") != []
    with psycopg.connect(travel.dsn) as connection:
        assert connection.execute("select from idemconsumer.audit").fetchall() == []
