"""Workers of the version before run on the newest schema, beside new ones and after a rollback (R32).

`version_before.tar.xz` is the baseline, from which on a released file never changes. After each release `make
version-before` puts the package that was released in its place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import pq
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

from idemconsumer.stores import migrations
from idemconsumer.stores.migrations import Migration, files, migrate
from tests.support import ROOT
from tests.support.waiting import PATIENCE, eventually

APP = """
from pathlib import Path

import idemconsumer
from idemconsumer import App, Retry, Saga, Step, Tx

app, package, failed = App("shop"), str(Path(idemconsumer.__file__).parents[1]), set()
NOTE = "insert into effect (what, package) values (%s, %s)"


@app.idempotent_handler("postgres:orders", key="id", backoff="50ms, 50ms")
async def order(order: dict, tx: Tx) -> str:
    await tx.execute(NOTE, (order["id"], package))
    if order["id"].endswith("77") and order["id"] not in failed:
        failed.add(order["id"])
        raise Retry
    return order["id"]


async def one(tx: Tx, ride: str) -> None:
    await tx.execute(NOTE, (ride + "-one", package))


async def two(step: Step, ride: str) -> str:
    return ride


@app.idempotent_handler("postgres:rides", key="id")
async def ride(ride: dict, saga: Saga) -> None:
    await saga.tx("one", one, ride["id"])
    await saga.call("two", two, ride["id"])
    await saga.sleep("rest", "20ms")
    await saga.tx("three", one, ride["id"] + "-three")
"""

LARGE = "('record', 'result', 'attempt', 'queue', 'delayed', 'saga', 'step', 'history')"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(Path(__file__).with_name("version_before.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Shop:
    """A database, and programs of the two versions on it."""

    def __init__(self, dsn: str, folder: Path, before: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.before = before
        (folder / "shop.py").write_text(APP, "utf-8")

    def environment(self, package: Path) -> Mapping[str, str]:
        return os.environ | {
            "IDEMCONSUMER_DSN": self.dsn,
            "PYTHONPATH": str(package),
            "IDEMCONSUMER_LOG_LEVEL": "error",
        }

    def python(self, package: Path, *words: str) -> str:
        return subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=self.environment(package), check=True, capture_output=True,
            text=True, timeout=PATIENCE,
        ).stdout  # fmt: skip

    @contextmanager
    def worker(self, package: Path) -> Iterator[None]:
        """At work until the block ends; then it drains."""
        words = [sys.executable, "-m", "idemconsumer", "run", "shop:app"]
        process = subprocess.Popen(words, cwd=self.folder, env=self.environment(package))
        try:
            yield
            assert process.poll() is None, "it has left"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(query.encode()).fetchall()

    def publish(self, queue: str, name: str, count: int) -> None:
        """Each of them twice."""
        self.ask(
            f"select count(idemconsumer.publish('{queue}', json_build_object('id', '{name}-' || n)::jsonb))"
            f" from generate_series(1, {count}) as n, generate_series(1, 2)"
        )

    @contextmanager
    def load(self, name: str) -> Iterator[list[int]]:
        """Orders and rides come in until the block ends; the number of each batch of 50 and 5."""
        over, batches = threading.Event(), list[int]()

        def publish() -> None:
            while not over.is_set():
                batches.append(len(batches))
                self.publish("orders", f"{name}-{batches[-1]}", 50)
                self.publish("rides", f"r{name}-{batches[-1]}", 5)
                over.wait(0.05)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            yield batches
        finally:
            over.set()
            thread.join()

    def effects(self, name: str) -> int:
        return int(self.ask(f"select count(*) from effect where what like '{name}-%'")[0][0])

    def packages(self, name: str) -> set[Path]:
        """Of those who applied these."""
        return {Path(each) for (each,) in self.ask(f"select distinct package from effect where what like '{name}-%'")}

    def files(self) -> list[tuple[Any, ...]]:
        """What a rewritten table, or a new index, changes."""
        return self.ask(
            "select c.relname::text, c.relfilenode from pg_class as c left join pg_index as i on i.indexrelid = c.oid"
            " join pg_class as t on t.oid = coalesce(i.indrelid, c.oid)"
            f" where t.relnamespace = 'idemconsumer'::regnamespace and t.relname in {LARGE} order by 1"
        )


@pytest.fixture
def shop(database: str, tmp_path: Path, before: Path) -> Shop:
    shop = Shop(database, tmp_path, before)
    shop.python(before, "-m", "idemconsumer", "migrate", "up")
    with psycopg.connect(database) as connection:
        connection.execute("create table effect (what text, package text)")
    return shop


def refused(dsn: str, statements: Mapping[str, str]) -> dict[str, str]:
    """The statements that cannot be planned on this schema, and why."""
    found = {}
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name, text in statements.items():
            query = PostgresQuery(Transformer(connection))
            query.convert(text.encode(), dict.fromkeys(parameters(text)))
            answer = connection.pgconn.prepare(b"", query.query)
            if answer.status != pq.ExecStatus.COMMAND_OK:
                found[name] = answer.error_message.decode().partition("\n")[0]
    return found


def parameters(text: str) -> list[str]:
    return [part.partition(")")[0] for part in text.split("%(")[1:]]


def test_each_statement_of_the_version_before_means_something_on_the_newest_schema(shop: Shop, before: Path) -> None:
    """Also those of which no test runs a worker. Some are several statements, which nobody plans in one."""
    code = (
        "import json; from idemconsumer.sql.queries import load;"
        "print(json.dumps({n: t.decode() for n, t in load('idemconsumer').items()}))"
    )
    statements: dict[str, str] = json.loads(shop.python(before, "-c", code))
    assert len(statements) > 150
    formerly = refused(shop.dsn, statements)
    assert len(formerly) < 30
    migrate(shop.dsn, "idemconsumer")
    assert refused(shop.dsn, statements) == formerly
    with psycopg.connect(shop.dsn) as connection:
        connection.execute("alter table idemconsumer.attempt rename column reader to read_by")
        connection.commit()
    assert "take_over_reading" in refused(shop.dsn, statements), "this test sees what is missing"


def test_no_migration_since_then_rewrites_or_indexes_a_table_with_a_row_for_each_message(shop: Shop) -> None:
    """Either would keep workers out for as long as it takes to read the table."""
    formerly = shop.files()
    migrate(shop.dsn, "idemconsumer")
    assert shop.files() == formerly


@pytest.mark.parametrize(
    "text",
    [
        "alter table {schema}.record alter column scope_id type bigint",
        "create index late on {schema}.step (started_at)",
    ],
)
def test_a_migration_that_does_is_noticed(shop: Shop, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    formerly = shop.files()
    more = (*files(), Migration(9000, "more", "", text))
    monkeypatch.setattr(migrations, "files", lambda: more)
    migrate(shop.dsn, "idemconsumer")
    assert shop.files() != formerly


def test_no_file_of_the_version_before_has_changed(before: Path) -> None:
    """A schema that was made by them would be refused."""
    released = {path.name: path.read_bytes() for path in (before / "migrations").iterdir()}
    assert len(released) >= 8
    assert {name: (ROOT / "migrations" / name).read_bytes() for name in released} == released


@pytest.mark.slow
def test_workers_of_the_version_before_go_on_while_and_after_the_schema_is_migrated(shop: Shop, before: Path) -> None:
    since_then = len(files()) - len(list((before / "migrations").iterdir()))
    shop.publish("orders", "first", 1)
    with shop.worker(before):
        eventually(lambda: shop.effects("first"), "the version before has started")
        with shop.load("a") as published:
            eventually(lambda: shop.effects("a") and shop.effects("ra"), "the version before is at work")
            assert len(migrate(shop.dsn, "idemconsumer")) == since_then
        eventually(lambda: shop.effects("a") == 50 * len(published), "it goes on")
        with shop.worker(ROOT):
            rounds = 0

            def both_work() -> bool:
                nonlocal rounds
                if shop.effects("b") == rounds * 50 and shop.effects("rb") == rounds * 10:
                    shop.publish("orders", f"b-{rounds}", 50)
                    shop.publish("rides", f"rb-{rounds}", 5)
                    rounds += 1
                return shop.packages("b") == shop.packages("rb") == {before, ROOT}

            eventually(both_work, "both have worked")
            eventually(lambda: shop.effects("b") == rounds * 50 and shop.effects("rb") == rounds * 10, "all is done")
        shop.publish("orders", "c", 50)
        shop.publish("rides", "rc", 10)
        eventually(lambda: shop.effects("c") == 50 and shop.effects("rc") == 20, "the newer one was taken back")
    assert shop.packages("c") == shop.packages("rc") == {before}
    assert shop.effects("ra") == 10 * len(published)
    assert shop.ask("select count(*) - count(distinct what) from effect") == [(0,)], "nothing was applied twice"
    assert shop.ask("select count(*) from idemconsumer.queue") == [(0,)]
    assert shop.ask("select reason, error from idemconsumer.dead_letter") == []
