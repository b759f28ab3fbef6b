"""`status`, `top --once` and `doctor`: what they say of things as they stand."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from click.testing import CliRunner, Result

from idemconsumer.admin.control import Doing, WorkerLine
from idemconsumer.cli.main import main
from idemconsumer.cli.top import Rates
from idemconsumer.message.keys import scope_name
from idemconsumer.process.child import Exit
from idemconsumer.stores.migrations import files, script
from tests.support import forked
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE

HANDLERS = {
    "send": {
        "sources": ["kafka:mails", "postgres:mails"],
        "queues": ["postgres:~shop/send", "postgres:~~shop/send"],
        "lag": {"kafka:mails": {"messages": 40, "part": True}},
        "lanes": 8,
        "running": 3,
        "outcomes": {"applied": 60, "retrying": 20},
    },
    "book": {"sources": ["sqs:rides"], "queues": ["postgres:~shop/book", "postgres:~~shop/book"], "lanes": 8},
}
APP = """
from idemconsumer import App, Saga
app = App("shop")

@app.idempotent_handler("postgres:mails", key="id")
async def send(item: dict, saga: Saga) -> None: ...

@app.idempotent_handler("postgres:rides", key="id", timeout="2h", lease="30s")
async def book(item: dict, saga: Saga) -> None: ...
"""


LATE: LiteralString = "values ('~~shop/send', '', now() - interval '5 min')"
LATE_DELAYED: LiteralString = f"insert into idemconsumer.delayed (name, body, due_at) {LATE}"
LATE_RETRY: LiteralString = f"insert into idemconsumer.queue (name, body, visible_at) {LATE}"


class Site:
    """A database in which things are as a test says, and a worker of `shop` lives."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        migrated(dsn, "idemconsumer")
        self.worker()

    def do(self, statement: LiteralString, *given: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement, given or None)
            return cursor.fetchall() if cursor.description else []

    def worker(self, version: str = "0.1.0", *, seen: int = 0, place: int = 0) -> None:
        self.do(
            "insert into idemconsumer.process (app, host, pid, place, version, state, handlers, started_at, seen_at)"
            " values ('shop', 'box', 17, %s, %s, 'running', %s, now() - interval '40 s',"
            " now() - make_interval(secs => %s))",
            place, version, json.dumps(HANDLERS), seen,
        )  # fmt: skip

    def saga(self, key: str, handler: str = "book", **columns: object) -> None:
        self.do(
            "insert into idemconsumer.scope (name) values (%s) on conflict do nothing",
            scope_name("shop", None, handler),
        )
        self.do(
            "insert into idemconsumer.saga (key, scope_id, handler, state, token, worker, due, attempt, parked, app,"
            " source, position, body, headers, started_at) select"
            " sha256(%s), min(id), %s, 1, 1, %s, now() + make_interval(secs => %s), 1, %s, %s, '', '', '', '', now()"
            " from idemconsumer.scope",
            key.encode(), handler, columns.get("worker"), columns.get("due", 3600), columns.get("parked"),
            columns.get("app"),
        )  # fmt: skip

    def letter(self, reason: str, scope: str = "shop/-/send", **columns: str) -> None:
        self.do(
            "insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, body,"
            " headers, attempts, first_at, last_at, redriven_at)"
            " values (%s, 'send', %s, '', '', %s, '', '', '', 1, now(), now(), %s)",
            columns.get("identity", reason).encode(), scope, reason, columns.get("redriven_at"),
        )  # fmt: skip

    def lease(self, seconds: int) -> int:
        """Of a worker that is not on record."""
        ((number,),) = self.do(
            "insert into idemconsumer.worker (name, lease, until, runs) values ('old:1', '30 s',"
            " now() + make_interval(secs => %s), %s) returning id",
            seconds, json.dumps([{"app": "shop", "handler": "book", "version": None}]),
        )  # fmt: skip
        return int(number)

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(main, [*words, "--dsn", self.dsn])


@pytest.fixture
def site(database: str) -> Site:
    return Site(database)


def test_what_waits_is_counted_and_whose_it_is(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.lease(20)
    for _ in range(2):
        site.do("select idemconsumer.publish('mails', '{}')")
    site.do("select idemconsumer.publish('nobodys', '{}')")
    site.do(LATE_DELAYED)
    site.saga("a", worker=1)
    site.saga("b")
    site.saga("c", due=-9)
    site.saga("d", parked="saga_changed")
    site.letter("attempts_exhausted")
    assert site("pause", "book", "--by", "ann", "--reason", "wrong prices").exit_code == 0

    found = json.loads(site("status", "--json").stdout)

    send, book = found["handlers"][1], found["handlers"][0]
    assert (send["handler"], send["workers"], send["lanes"], send["running"]) == ("send", 1, 8, 3)
    assert (book["paused"]["by"], book["obeyed"]) == ("ann", 0)
    queues = {each["name"]: each for each in found["queues"]}
    assert (queues["mails"]["handler"], queues["mails"]["waiting"], queues["nobodys"]["handler"]) == (
        "shop/send",
        2,
        None,
    )
    assert (queues["~~shop/send"]["kind"], queues["~~shop/send"]["delayed"]) == ("retries", 1)
    assert queues["~~shop/send"]["overdue"] > 290
    (sagas,) = found["sagas"]
    states = {name: sagas[name] for name in ("app", "running", "waiting", "due", "undoing", "review")}
    assert states == {"app": "shop", "running": 1, "waiting": 1, "due": 1, "undoing": 0, "review": 1}
    assert [(each["reason"], each["letters"]) for each in found["letters"]] == [("attempts_exhausted", 1)]
    assert [each["state"] for each in found["workers"]] == ["running", "unrecorded"]
    shown = site("status").output
    for word in ("paused by ann", "in 0 of 1 workers", "wrong prices", "no worker", "attempts_exhausted"):
        assert word in shown
    assert json.loads(site("status", "elsewhere", "--json").stdout)["sagas"] == []
    tuned(monkeypatch, status_rows=1)
    (queue,) = [line for line in site("status").output.splitlines() if line.startswith("mails")]
    assert "more than 1 " in queue
    site.saga("e", parked="saga_changed")
    (sagas,) = [line for line in site("status").output.splitlines() if "1 or more" in line]
    assert sagas.startswith("shop/book")
    assert "more than 1 " in sagas


@pytest.mark.parametrize("app", [None, "shop"])
def test_what_is_not_counted_hides_nothing_that_waits(
    site: Site, monkeypatch: pytest.MonkeyPatch, app: str | None
) -> None:
    """The first rows are those of another app, redriven, or put aside."""
    tuned(monkeypatch, status_rows=2)
    site.letter("attempts_exhausted")
    for n in range(4):
        site.letter("attempts_exhausted", identity=f"redriven {n}", redriven_at="now")
        site.letter("attempts_exhausted", identity=f"another {n}", scope="another/-/send")
        site.saga(f"parked {n}", due=-3600, parked="saga_changed", app="another")
        site.saga(f"another {n}", due=-1800, app="another")
    site.saga("waits", due=3600)
    site.saga("due", due=-9)
    site.saga("for review", due=3600, parked="saga_changed")

    found = json.loads(site("status", *([app] if app else []), "--json").stdout)

    ((reason, letters, more),) = [(each["reason"], each["letters"], each["more"]) for each in found["letters"]]
    assert (reason, letters, more) == ("attempts_exhausted", 1 if app else 3, not app)
    of = {each["app"]: each for each in found["sagas"]}
    if app:
        assert [of["shop"][name] for name in ("waiting", "due", "review", "more")] == [1, 1, 1, False]
    else:
        assert [each["more"] for each in of.values()] == [True, True], "they share what is read of a handler"


def test_top_shows_rates_since_the_workers_began(site: Site) -> None:
    site.do("select idemconsumer.publish('mails', '{}')")
    (line,) = [line for line in site("top", "--once").output.splitlines() if line.startswith("shop/send")]
    _, done, failed, lag, busy, workers, state = line.split()
    assert 1.8 < float(done) <= 2.0  # 80 in 40 seconds
    assert 0.4 < float(failed) <= 0.5
    assert (lag, busy, workers, state) == ("41", "3/8", "1", "works")
    assert "  0 + ?  " in site("top", "--once").output  # of another handler
    assert "top needs a terminal" in site("top").output


def test_a_rate_is_made_of_two_words_and_stays_until_the_next(site: Site) -> None:
    def word(seconds: int, applied: int) -> list[WorkerLine]:
        ((began, seen),) = site.do(
            "select timestamptz '2026-01-01', timestamptz '2026-01-01' + make_interval(secs => %s)", seconds
        )
        doing = Doing(outcomes={"applied": applied})
        return [
            WorkerLine(
                id=1, app="shop", host="box", pid=1, place=0, version="0", state="running", handlers={"send": doing},
                started_at=began, seen_at=seen,
            )
        ]  # fmt: skip

    rates = Rates()
    seen = [rates.of(word(*each))["shop", "send"][0] for each in ((10, 100), (10, 100), (22, 124), (22, 124))]
    assert seen == [10.0, 10.0, 2.0, 2.0]


def open_transaction(site: Site) -> None:
    connection = psycopg.connect(site.dsn)
    connection.execute("select 1")
    OPEN.append(connection)


OPEN: list[psycopg.Connection[Any]] = []


def dead_rows(site: Site) -> None:
    site.do("alter table idemconsumer.delayed set (autovacuum_enabled = off)")
    site.do(
        "insert into idemconsumer.delayed (name, body, due_at) select 'x', '', now() from generate_series(1, 12000)"
    )
    with psycopg.connect(site.dsn, autocommit=True) as connection:
        connection.execute("delete from idemconsumer.delayed")
        connection.execute("select pg_stat_force_next_flush()")


def large_table(site: Site) -> None:
    site.do("insert into idemconsumer.audit (at, by, role, what, target, reason)"
            " select now(), repeat('x', 800), '', '', '', '' from generate_series(1, 25000)")  # fmt: skip
    site.do("delete from idemconsumer.audit where id < 24900")
    site.do("analyze idemconsumer.audit")


@pytest.mark.parametrize(
    ("plant", "subject", "text"),
    [
        (lambda site: site.saga("a", worker=site.lease(-90)), "lease of old:1", "no worker has taken its 1 sagas"),
        (lambda site: site.saga("a"), "sagas of shop/book", "no worker runs it"),
        (lambda site: site.saga("a", parked="saga_changed"), "sagas of shop/book", "1 wait for a person"),
        (lambda site: site.saga("a", due=-90), "sagas of shop/book", "1 are due, the first for 9"),
        (lambda site: site.do("select idemconsumer.publish('nobodys', '{}')"), "postgres:nobodys", "no live worker"),
        (
            lambda site: site.do(LATE_DELAYED),
            "postgres:~~shop/send", "shop/send does not take messages",
        ),
        (
            lambda site: site.do(LATE_RETRY),
            "postgres:~~shop/send", "1 retries of shop/send are overdue",
        ),
        (lambda site: site("pause", "send", "--by", "ann"), "handler shop/send", "paused by ann since "),
        (lambda site: site.worker("0.2.0", place=1), "workers of shop", "run idemconsumer 0.1.0 and 0.2.0"),
        (lambda site: site.lease(20), "worker old:1 of shop", "`pause` and `drain` do not affect it"),
        (lambda site: site.worker(seen=300, place=1), "worker box:17 of shop", "no sign of life for 300 s"),
        (open_transaction, "transaction of ", "pg_terminate_backend("),
        (dead_rows, "table delayed", "12,000 dead rows"),
        (large_table, "table audit", "its rows should take about"),
    ],
)  # fmt: skip
def test_the_doctor_finds_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Site], object], subject: str, text: str
) -> None:
    healthy = site("doctor")
    assert (healthy.exit_code, healthy.output) == (Exit.DONE, "nothing found\n")
    if plant is open_transaction:
        tuned(monkeypatch, transaction_is_long_after=0.0)
    plant(site)
    found = site("doctor", "--json")
    while OPEN:
        OPEN.pop().close()
    assert found.exit_code == Exit.ERROR
    said = [each for each in json.loads(found.stdout) if each["level"] == "warning"]
    assert any(each["subject"].startswith(subject) and text in each["text"] for each in said), said


def test_a_worker_that_has_a_successor_in_its_place_is_not_missed(site: Site) -> None:
    site.worker(seen=300)
    assert site("doctor").exit_code == Exit.DONE


def test_records_of_a_handler_that_is_gone_are_a_note(site: Site) -> None:
    site.do("insert into idemconsumer.scope (name) values ('shop/-/gone')")
    result = site("doctor")
    assert (result.exit_code, "handler shop/gone: has records" in result.output) == (Exit.DONE, True)


def test_a_route_is_no_handler_that_is_gone(site: Site) -> None:
    for route in ("POST %2Forders%2F{id}", "PATCH *"):
        site.do("insert into idemconsumer.scope (name) values (%s)", f"shop/acme/{route}")
    assert site("doctor").output == "nothing found\n"


def test_what_nobody_prunes_is_said_with_what_to_do(site: Site) -> None:
    """Web processes do not."""
    site.do("insert into idemconsumer.scope (name) values ('shop/acme/POST *')")
    site.do("update idemconsumer.migration set applied_at = now() - interval '3 days'")
    assert site("doctor").output == "nothing found\n", "there is nothing to prune"
    site.do("insert into idemconsumer.record (key, scope_id, state, changed_at) values ('', 1, 1, now())")
    found = site("doctor")
    assert (found.exit_code, "run `idemconsumer prune` once" in found.output) == (Exit.ERROR, True)
    assert site("prune").exit_code == Exit.DONE
    assert site("doctor").output == "nothing found\n"


def test_requests_in_leased_mode_are_told_by_route(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tenants together."""
    for tenant in ("acme", "other"):
        site.do("insert into idemconsumer.scope (name) values (%s)", f"shop/{tenant}/POST %2Fpayments")
    for key, scope, worker in ((b"a", 1, site.lease(20)), (b"b", 2, site.lease(20)), (b"c", 2, 0)):
        site.do("insert into idemconsumer.request values (%s, %s, 1, %s, false, now())", key, scope, worker)
    (line,) = json.loads(site("status", "--json").stdout)["requests"]
    assert {name: line[name] for name in ("app", "route", "running", "lost", "more")} == {
        "app": "shop", "route": "POST /payments", "running": 2, "lost": 1, "more": False,
    }  # fmt: skip
    assert "shop: POST /payments" in site("status", "shop").output
    assert json.loads(site("status", "other", "--json").stdout)["requests"] == []
    tuned(monkeypatch, status_rows=1)
    assert json.loads(site("status", "--json").stdout)["requests"][0]["more"]


@pytest.mark.parametrize("known", [2, len(files()) - 1], ids=["one without sagas", "the one before"])
def test_the_doctor_says_that_the_schema_is_of_an_older_version(database: str, known: int) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(script(files()[:known], "idemconsumer").encode())
    result = CliRunner().invoke(main, ["doctor", "--json", "--dsn", database])
    assert result.exit_code == Exit.ERROR
    (first,) = [each for each in json.loads(result.stdout) if each["level"] == "error"]
    assert (first["subject"], f"{files()[-1]}; run `idemconsumer migrate up`" in first["text"]) == (
        "schema idemconsumer", True,
    )  # fmt: skip
    nowhere = CliRunner().invoke(main, ["doctor", "--dsn", database, "--schema", "nowhere"])
    assert (nowhere.exit_code, "does not exist" in nowhere.stderr) == (Exit.USAGE, True)


def test_with_an_app_the_doctor_says_what_check_warns_of(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clinic.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = site("doctor", "clinic:app")
    assert (result.exit_code, "handler book: its steps may take 7200 s" in result.output) == (Exit.ERROR, True)
    assert site("doctor", "clinic:nothing").exit_code == Exit.USAGE


def test_top_is_a_live_screen_that_q_ends(site: Site) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, 160))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
    process = forked.Popen(
        [sys.executable, "-m", "idemconsumer", "top", "--dsn", site.dsn, "--interval", "0.5"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    try:
        seen = b""
        while not all(word in seen for word in (b"shop/send", b"q: quit")):
            seen += os.read(ours, 65_536)
        os.write(ours, b"q")
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(ours, 65_536):
                pass
        assert process.wait(PATIENCE) == Exit.DONE
    finally:
        process.kill()
        process.wait()
        os.close(ours)
