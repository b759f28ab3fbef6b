"""/metrics, /livez and /readyz of a launcher with real workers and a real database (O11, O12)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import App, Tx
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.embedded.postgres import free_port
from idemconsumer.errors import SessionEnded
from idemconsumer.observe import database as measured
from idemconsumer.observe.counts import Counts
from idemconsumer.observe.exposition import exposition
from idemconsumer.observe.fleet import Fleet
from idemconsumer.observe.ops import Ops
from idemconsumer.observe.reports import Report, encoded
from idemconsumer.ports.broker import Delivery
from idemconsumer.process.child import Exit
from idemconsumer.rules.health import Phase
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from tests.support import forked
from tests.support.logs import LogCapture
from tests.support.pauses import Pauses
from tests.support.servers.made import PrivatePostgres
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned, tuning_source
from tests.support.waiting import PATIENCE, eventually, until
from tests.support.workers import Bench, Item

SHOP = (
    tuning_source(loop_hiccup=1.0)
    + """
import os
import pathlib
import signal
import time
from idemconsumer import App, Reject, Retry, Saga, Tx

app = App("shop")

@app.idempotent_handler("postgres:orders", key="id", timeout="0.5s", max_attempts=2, backoff=("0.01s", "0.01s"))
async def take(order: dict, tx: Tx) -> None:
    match order["kind"]:
        case "rejects":
            raise Reject("no_stock")
        case "fails":
            raise RuntimeError("no")
        case "kills" if not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "blocks":
            pathlib.Path("blocking").touch()
            while not pathlib.Path("go on").exists():
                time.sleep(0.01)

@app.idempotent_handler("postgres:mails", key="id", timeout="0.5s", backoff=("1h", "1h"))
async def mail(order: dict, tx: Tx) -> None:
    raise Retry

@app.idempotent_handler("postgres:rides", key="id", timeout="0.5s", max_attempts=1)
async def ride(order: dict, saga: Saga) -> None:
    raise RuntimeError("no")
"""
)

Sample = tuple[str, frozenset[tuple[str, str]]]


@dataclass
class Shop:
    """A launcher with its workers, and the address of its port."""

    process: subprocess.Popen[str]
    port: int
    folder: Path

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self, path: str) -> int:
        try:
            return self.get(path)[0]
        except OSError:  # not yet
            return 0

    def samples(self) -> dict[Sample, float]:
        status, text = self.get("/metrics")
        assert status == 200
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((f"idemconsumer_{name}", frozenset(labels.items())))


@contextmanager
def launched(folder: Path, dsn: str, workers: int = 1) -> Iterator[Shop]:
    (folder / "shop.py").write_text(SHOP)
    port = free_port()
    kept: Mapping[str, str] = {
        name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")
    }
    process = forked.Popen(
        [sys.executable, "-m", "idemconsumer", "run", "shop:app", "--workers", str(workers),
         "--ops-port", f"127.0.0.1:{port}", "--log-format", "json"],
        cwd=folder, env={**kept, "IDEMCONSUMER_DSN": dsn}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    shop = Shop(process, port, folder)
    try:
        eventually(lambda: shop.status("/readyz") == 200, "it is ready")
        yield shop
    finally:
        process.terminate()
        try:
            _, said = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == Exit.DONE, said


def publish(dsn: str, queue: str, *ids: str, kind: str = "applied", note: str = "") -> None:
    with psycopg.connect(dsn) as connection:
        for each in ids:
            body = json.dumps({"id": each, "kind": kind, "note": note})
            connection.execute("select idemconsumer.publish(%s, %s::jsonb)", (queue, body))


async def test_letters_that_are_to_be_forwarded_are_measured(database: str) -> None:
    migrate(database, "idemconsumer")
    with psycopg.connect(database) as connection:
        connection.execute(
            "insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, body,"
            " headers, attempts, first_at, last_at) select sha256(n::text::bytea), 'take', 'shop/-/take', '', '', 'r',"
            " '', '', '', 1, now(), now() - make_interval(secs => 100 - n) from generate_series(1, 3) as n"
        )
        connection.execute(
            "insert into idemconsumer.outbox (destination, letter, body, created_at) select 'kafka:t', id, '', last_at"
            " from idemconsumer.dead_letter where id > 1"
        )
    looking = measured.DatabaseLook(database, "idemconsumer")
    found = await looking.look([])
    await looking.close()
    assert found is not None
    ((name, waiting),) = found["unforwarded_dead_letters"].items()
    oldest = found["oldest_unforwarded_dead_letter_seconds"][name]
    assert (name, waiting, 98 <= oldest < 600) == (("shop", "take"), 2, True)


@pytest.mark.slow
@pytest.mark.kill
def test_the_numbers_are_right_and_never_go_back_though_a_worker_is_killed(database: str, tmp_path: Path) -> None:
    migrate(database, "idemconsumer")
    take = {"app": "shop", "handler": "take"}
    with launched(tmp_path, database, workers=2) as shop:
        assert shop.value("messages_total", **take, outcome="applied") == 0, "there before the first message"
        publish(database, "orders", "a", "b", "c", "a", "b")
        eventually(lambda: shop.value("messages_total", **take, outcome="applied") == 3)
        publish(database, "orders", "a", note="another payload")
        publish(database, "orders", "r", kind="rejects")
        publish(database, "orders", "f", kind="fails")
        publish(database, "mails", "m")
        publish(database, "rides", "s")
        expected = {"applied": 3, "duplicate": 2, "conflict": 1, "failed": 1, "dead": 1, "retrying": 1}

        def outcomes(samples: Mapping[Sample, float]) -> dict[str, float]:
            ours = frozenset(take.items())
            return {
                dict(labels)["outcome"]: value
                for (name, labels), value in samples.items()
                if name == "idemconsumer_messages_total" and ours <= labels and value
            }

        eventually(lambda: outcomes(shop.samples()) == expected)
        others = "select (select count(*) from idemconsumer.delayed), (select count(*) from idemconsumer.dead_letter)"
        eventually(lambda: do(database, others) == [(1, 3)], "the mail waits for its next attempt, the ride is dead")

        before = shop.samples()
        publish(database, "orders", "k", kind="kills")
        hurry(database, lambda: shop.value("worker_deaths_total") == 1)
        publish(database, "orders", "d")
        seen = [before]

        def applied() -> bool:
            seen.append(shop.samples())
            return outcomes(seen[-1]).get("applied", 0) >= 5

        hurry(database, applied)
        grow = re.compile(r"_(total|bucket|count|sum)$")
        for earlier, later in pairwise(seen):
            back = {each for each, value in earlier.items() if grow.search(each[0]) and later.get(each, -1.0) < value}
            assert not back
        last = seen[-1]
        assert outcomes(last)["applied"] == 5

        def of(name: str, **labels: str) -> float:
            return last[f"idemconsumer_{name}", frozenset(labels.items())]

        assert of("deliveries_total", **take, source="postgres:orders") >= 10
        assert of("dead_letters_total", **take, reason="conflict") == 1
        assert of("dead_letters_total", **take, reason="attempts_exhausted") == 1
        assert of("handler_duration_seconds_count", **take) == 5, "of those that were committed"
        assert of("group_size_sum", **take) == 5
        assert of("group_duration_seconds_count", **take) > 5
        eventually(lambda: shop.status("/readyz") == 200)
        eventually(lambda: shop.value("lanes", **take) == 16)
    # What the database knows may be a quarter of a minute old, but not at a launcher that has just begun.
    with launched(tmp_path, database) as shop:
        eventually(lambda: shop.value("leases", state="live") is not None, "the database is measured")
        samples = shop.samples()

        def stored(name: str, **labels: str) -> float:
            return samples[f"idemconsumer_{name}", frozenset(labels.items())]

        assert stored("database_up") == 1
        assert stored("open_dead_letters", **take, reason="conflict") == 1
        assert 0 < stored("oldest_dead_letter_seconds", **take, reason="attempts_exhausted") < 600
        assert stored("retries", app="shop", handler="mail", state="waiting") == 1
        assert stored("retries", app="shop", handler="mail", state="due") == 0
        assert stored("sagas", app="shop", handler="ride", state="dead") == 1
        assert 0 < stored("oldest_saga_seconds", app="shop", handler="ride", state="dead") < 600
        assert stored("lag_messages", source="postgres:orders") == 0
        assert stored("leases", state="live") >= 1
        labels = {value for _, pairs in samples for _, value in pairs}
        assert not labels & {"a", "k", "no_stock"}, "no key and no text of a person's is a label"
        assert shop.get("/metrics", "POST")[0] == 405
        assert shop.get("/favicon.ico")[0] == 404


def do(dsn: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(query.encode()).fetchall()


def hurry(dsn: str, condition: object) -> None:
    """What a dead worker held comes again at once, and not in ten seconds."""

    def true() -> object:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("update idemconsumer.queue set visible_at = now() where visible_at > now()")
        return condition()  # type: ignore[operator]

    eventually(true)


@pytest.mark.slow
def test_a_loop_that_stands_still_and_a_database_that_is_away(
    private_postgres: PrivatePostgres, tmp_path: Path
) -> None:
    server = private_postgres()
    migrate(server.dsn, "idemconsumer")
    with launched(tmp_path, server.dsn) as shop:
        assert shop.get("/livez") == (200, '{"alive":true,"problems":[]}\n')

        publish(server.dsn, "orders", "b", kind="blocks")
        eventually(lambda: shop.status("/livez") == 503)
        said = json.loads(shop.get("/livez")[1])
        assert said["alive"] is False
        assert re.fullmatch(r"worker 0: its event loop has been blocked for \d+ s", said["problems"][0])
        (tmp_path / "go on").touch()
        eventually(lambda: shop.status("/livez") == 200)

        shop.samples()
        server.kill()
        eventually(lambda: "worker 0 waits for postgres" in json.loads(shop.get("/readyz")[1]).get("problems", ()))
        assert shop.status("/readyz") == 503
        assert (shop.value("ready"), shop.value("source_up", source="postgres:orders")) == (0, 0)
        assert (shop.value("workers", state="consuming"), shop.value("workers", state="waiting")) == (0, 1)
        assert shop.value("handler_state", app="shop", handler="take", state="database_away") == 1
        assert shop.value("handler_state", app="shop", handler="take", state="works") == 0
        with Pauses() as pauses:
            began = time.monotonic()
            assert shop.get("/livez")[0] == 200
            took = time.monotonic() - began
        assert took - pauses.seconds < 1.0
        server.start()
        eventually(lambda: shop.status("/readyz") == 200)
        assert (shop.value("ready"), shop.value("source_up", source="postgres:orders")) == (1, 1)
        assert shop.value("workers", state="consuming") == 1
        eventually(lambda: shop.value("handler_state", app="shop", handler="take", state="works") == 1)


async def test_a_poll_that_does_not_come_back_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, longest_poll=0.0)
    app, returns = App("shop"), asyncio.Event()

    @app.idempotent_handler("memory:orders", key="id")
    async def take(item: Item, tx: Tx) -> None: ...

    async def fetch(session: MemorySession) -> list[Delivery]:
        await returns.wait()
        raise SessionEnded("closed")

    monkeypatch.setattr(MemorySession, "fetch", fetch)
    async with bench.running(app) as running:
        reporting = running.worker._reporting
        await running.until(lambda: "memory:orders" in reporting.report().stalled)
        report = reporting.report()
        assert report.phase is Phase.CONSUMING
        tuned(monkeypatch, longest_poll=60.0)
        assert reporting.report().stalled == {}
        running.worker.drain()
        assert reporting.report().phase is Phase.DRAINING
        returns.set()


async def test_a_database_that_is_away_or_silent_holds_up_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, scrape_patience=0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        database = measured.DatabaseLook(f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d", "idemconsumer")
        found = await database.look(["postgres:orders"])
        assert database._looking is not None, "it goes on, and is not waited for"
        await database.close()
    text = exposition(Fleet(1), found).decode()
    assert "idemconsumer_database_up 0.0" in text
    assert "idemconsumer_sagas" not in text


async def test_a_database_that_is_back_is_measured_soon(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, look_patience=1.0, pause_between_looks=0.0)
    migrate(database, "idemconsumer")
    async with Proxy(int(str(conninfo_to_dict(database)["port"]))) as proxy:
        looking = measured.DatabaseLook(make_conninfo(database, host="127.0.0.1", port=proxy.port), "idemconsumer")

        async def answered() -> bool:
            return await looking.look([]) is not None

        async def silent() -> bool:
            return not await answered() and looking._looking is None

        await until(answered)
        proxy.freeze()
        await until(silent)
        proxy.thaw()
        await until(answered, within=10.0)
        await looking.close()


async def test_a_database_that_answers_is_up_whatever_measuring_takes(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after a hang from the first look on that is not the one which hung."""
    tuned(monkeypatch, look_patience=2.5)
    migrate(database, "idemconsumer")
    async with Proxy(int(str(conninfo_to_dict(database)["port"]))) as proxy:
        looking = measured.DatabaseLook(make_conninfo(database, host="127.0.0.1", port=proxy.port), "idemconsumer")

        async def look() -> tuple[bool, bool]:
            found = await looking.look([])
            return looking.answer is not None, found is not None

        async def up() -> bool:
            return await look() == (True, False)

        with psycopg.connect(database) as other:
            other.execute("lock table idemconsumer.saga in access exclusive mode")
            await until(up)
        await until(up, "what it could not tell is asked again later")
        tuned(monkeypatch, scrape_patience=0.2)
        proxy.freeze()

        async def silent() -> bool:
            return await look() == (False, False) and looking._looking is None

        await until(silent)
        proxy.thaw()
        tuned(monkeypatch, scrape_patience=10.0)
        assert await look() == (True, True)
        await looking.close()


def test_a_worker_that_waits_for_a_server_does_not_consume() -> None:
    crew = Fleet(2)

    def value(name: str, **labels: str) -> float | None:
        text = exposition(crew, None).decode()
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        return next(
            (each.value for each in samples if (each.name, each.labels) == (f"idemconsumer_{name}", labels)), None
        )

    def told(worker: int, **more: Any) -> None:
        counts = Counts()
        counts.of("take").deliveries["kafka:a"] += 0
        crew.told(worker, encoded(Report(app="shop", phase=Phase.CONSUMING, patience=5.0, counts=counts, **more)))

    assert value("ready") == 0
    for worker in (0, 1):
        crew.begun(worker)
        told(worker, up={"kafka:a": True})
    assert (value("ready"), value("source_up", source="kafka:a")) == (1, 1)
    told(1, up={"kafka:a": False}, lacking=["kafka"])
    assert (value("ready"), value("source_up", source="kafka:a")) == (0, 0)
    assert (value("workers", state="consuming"), value("workers", state="waiting")) == (1, 1)
    told(1)  # it has begun again, and has no sessions yet
    assert value("source_up", source="kafka:a") == 1
    crew.ended(0)
    crew.ended(1)
    assert value("source_up", source="kafka:a") == 0


async def test_probes_need_no_library(monkeypatch: pytest.MonkeyPatch, logged: LogCapture) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as Python marks what is not there
    monkeypatch.delitem(sys.modules, "idemconsumer.observe.exposition")
    port = free_port()
    async with Ops(Fleet(0), Settings()).serving("127.0.0.1", port):

        async def get(path: str) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            text = (await reader.read()).decode()
            writer.close()
            return text

        assert '{"alive":true' in await get("/livez")
        assert '{"ready":true' in await get("/readyz")
        said = await get("/metrics")
    assert said.startswith("HTTP/1.1 501 Not Implemented\r\n")
    assert "pip install 'idemconsumer[metrics]'" in said
    warned = [each["event"] for each in logged.entries if each["log_level"] == "warning"]
    assert warned == ["metrics unavailable, prometheus-client is not installed"]


def test_a_port_that_is_taken_is_one_line_and_exit_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "idemconsumer", "run", "shop:app", "--ops-port", f"127.0.0.1:{port}"],
            cwd=tmp_path, env={**os.environ, "IDEMCONSUMER_LOG_FORMAT": "console"}, capture_output=True, text=True,
            check=False, timeout=PATIENCE,
        )  # fmt: skip
    assert ended.returncode == Exit.USAGE
    assert ended.stderr == (
        f"error: --ops-port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "write another one, as [HOST:]PORT\n"
    )
