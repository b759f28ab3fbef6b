"""A drill: what goes wrong in production, one thing after the other, watched by a real Prometheus that has the rules of
deploy/, and is asked what the panels ask. A launcher with a worker, a Postgres, a Kafka and a RabbitMQ are real, and so
are the faults.

`make test-long ARGS="-s tests/test_drill.py"` prints the table of docs/operations.md. `for:` of a rule is a tenth here,
and the launcher is scraped each five seconds. The table has how long it took until the rule's condition held, as
measured, and adds the whole `for:`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
import pytest
import yaml
from aiokafka.admin import AIOKafkaAdminClient
from psycopg.conninfo import make_conninfo

from idemconsumer.embedded.binaries import unprivileged_account
from idemconsumer.embedded.postgres import EmbeddedPostgres, free_port
from idemconsumer.stores.migrations import migrate
from tests.support import ROOT, forked
from tests.support.kafka import create_topic
from tests.support.servers.kafka import Kafka
from tests.support.servers.made import PrivateKafka, PrivatePostgres, PrivateRabbitMQ
from tests.support.servers.rabbitmq import RabbitMQ
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.kill, pytest.mark.timeout(1_800)]

SCALE: Final = 10
PATIENCE: Final = 180.0  # seconds
RULES: Final = ROOT / "deploy" / "prometheus" / "alerts.yml"
BOARD: Final = ROOT / "deploy" / "grafana" / "dashboard.json"
# There are no certificates, and what is to be forwarded is, at once.
NOT_HERE: Final = (
    "idemconsumer_certificate_expiry_timestamp_seconds",
    "idemconsumer_oldest_unforwarded_dead_letter_seconds",
)
FOR_LONG: Final = ("NotReady", "NothingConsumes")  # alerts that wait for so long that it is enough to see them wait
SHOP: Final = """
import os, pathlib, signal
from idemconsumer import App, Retry, Saga, Tx

app = App("shop")

@app.idempotent_handler(
    "rabbitmq:orders", key="id", timeout="5s", max_attempts=3, backoff=("0.2s", "0.2s"), dead_letter_to="rabbitmq:dead"
)
async def take(order: dict, tx: Tx) -> None:
    if pathlib.Path("bug").exists():
        raise KeyError("price")
    if order["kind"] == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if order["kind"] == "broken":
        raise ValueError("no such article")
    await tx.execute("insert into effect (id) values (%s)", (order["id"] * 200,))
    await app.publish("rabbitmq:invoices", {"of": order["id"]}, tx=tx)

@app.idempotent_handler("kafka:parcels", key="id")
async def send(parcel: dict, tx: Tx) -> None: ...

@app.idempotent_handler("postgres:mails", key="id", backoff=("1h", "1h"))
async def mail(order: dict, tx: Tx) -> None:
    raise Retry

@app.idempotent_handler("postgres:rides", key="id", max_attempts=1)
async def ride(order: dict, saga: Saga) -> None:
    raise RuntimeError("no")
"""


class Way:
    """A way to the database that is as slow as `seconds` say, for each answer."""

    def __init__(self, target: int) -> None:
        self.port, self.seconds = free_port(), 0.0
        self._target = target
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", self.port))
        self._loop.run_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            back, there = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.wait(
                [
                    asyncio.ensure_future(self._pump(reader, there, 0)),
                    asyncio.ensure_future(self._pump(back, writer, 1)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
            there.close()
        writer.close()

    async def _pump(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, slow: int) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                await asyncio.sleep(slow * self.seconds)
                to.write(data)
                await to.drain()


class Prometheus:
    """With the rules that are shipped, which wait for a tenth of their time."""

    def __init__(self, folder: Path, launcher: int) -> None:
        program = shutil.which("prometheus")
        assert program, "prometheus is not installed: apt-get install prometheus"
        self._port, self.began = free_port(), time.time()
        rules = yaml.safe_load(RULES.read_text("utf-8"))
        self.waits: dict[str, float] = {}
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            self.waits[rule["alert"]] = _seconds(rule.get("for", "0s"))
            rule["for"] = f"{max(1, round(self.waits[rule['alert']] / SCALE)) if 'for' in rule else 0}s"
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        (folder / "prometheus.yml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(folder / "rules.yml")],
                    "scrape_configs": [
                        {"job_name": "shop", "scrape_timeout": "5s", "scrape_interval": "5s",
                         "static_configs": [{"targets": [f"127.0.0.1:{launcher}"]}]}
                    ],
                }
            )
        )  # fmt: skip
        self._process = subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{self._port}", "--log.level=warn"],
            stderr=(folder / "prometheus.log").open("w"),
        )  # fmt: skip
        eventually(lambda: self.answers("vector(1)"), "prometheus answers")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, kind: str, **given: object) -> list[dict[str, Any]]:
        address = f"http://127.0.0.1:{self._port}/api/v1/{kind}?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def answers(self, expression: str) -> bool:
        try:
            return bool(self.ask("query", query=expression))
        except OSError:
            return False

    def has_had(self, expression: str) -> bool:
        """Whether there was anything to see, at any time of the drill."""
        now = time.time()
        return bool(self.ask("query_range", query=expression, start=self.began, end=now, step=5))

    def alerts(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        """Name, state and labels."""
        for each in self.ask("query", query="ALERTS"):
            labels = each["metric"]
            yield labels["alertname"], labels["alertstate"], labels


def _seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


@dataclass
class Site:
    """What runs. `log` is the launcher's."""

    folder: Path
    postgres: EmbeddedPostgres
    rabbitmq: RabbitMQ
    kafka: Kafka
    way: Way
    prometheus: Prometheus
    log: Path
    numbers: Iterator[int] = field(default_factory=count)

    def do(self, statement: LiteralString, *given: object) -> None:
        with psycopg.connect(self.postgres.dsn, autocommit=True) as connection:
            connection.execute(statement, given or None)

    def send(self, kind: str = "good") -> None:
        order = {"id": f"{kind}-{next(self.numbers)}", "kind": kind}
        managed(self.rabbitmq, "POST", "exchanges/%2F/amq.default/publish", {
            "properties": {}, "routing_key": "orders", "payload": json.dumps(order), "payload_encoding": "string",
        })  # fmt: skip

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Ten orders a second, as far as the broker takes them."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(0.1):
                with suppress(OSError):
                    self.send()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def managed(rabbitmq: RabbitMQ, method: str, path: str, body: Mapping[str, object]) -> None:
    request = urllib.request.Request(f"{rabbitmq.management}/api/{path}", json.dumps(body).encode(), method=method)
    request.add_header("Authorization", f"Basic {b64encode(b'guest:guest').decode()}")
    urllib.request.urlopen(request, timeout=2).close()


@contextmanager
def small_disk(server: EmbeddedPostgres) -> Iterator[Path | None]:
    """Of six megabytes, for a tablespace; None where this user may not mount one."""
    assert server.directory is not None
    folder = server.directory / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "drill", folder], capture_output=True).returncode:
        yield None
        return
    try:
        (folder / "data").mkdir()
        if (account := unprivileged_account()) is not None:
            os.chown(folder / "data", account.pw_uid, account.pw_gid)
        yield folder / "data"
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


async def with_parcels(kafka: Kafka) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, "parcels")
    await admin.close()


@pytest.fixture
def site(
    tmp_path: Path, private_postgres: PrivatePostgres, private_rabbitmq: PrivateRabbitMQ, private_kafka: PrivateKafka
) -> Iterator[Site]:
    postgres, rabbitmq, kafka, port = private_postgres(), private_rabbitmq(), private_kafka(), free_port()
    asyncio.run(with_parcels(kafka))
    for each in ("orders", "invoices", "dead"):
        managed(rabbitmq, "PUT", f"queues/%2F/{each}", {"durable": True})
    migrate(postgres.dsn, "idemconsumer")
    (tmp_path / "shop.py").write_text(SHOP)
    way, log = Way(postgres.port), tmp_path / "launcher.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
    dsn = make_conninfo(postgres.dsn, port=way.port)
    given = {"DSN": dsn, "RABBITMQ": rabbitmq.address, "KAFKA": kafka.address, "OPS_PORT": f"127.0.0.1:{port}"}
    launcher = forked.Popen(
        [sys.executable, "-m", "idemconsumer", "run", "shop:app", "--log-format", "json"],
        cwd=tmp_path,
        text=True,
        stderr=log.open("w"),
        env=kept | {f"IDEMCONSUMER_{name}": value for name, value in given.items()},
    )
    try:
        with closing(Prometheus(tmp_path, port)) as prometheus:
            eventually(lambda: prometheus.answers("idemconsumer_ready == 1"), "the launcher is ready")
            yield Site(tmp_path, postgres, rabbitmq, kafka, way, prometheus, log)
    finally:
        launcher.terminate()
        launcher.wait()


class Drill:
    """Incidents, and what was seen of them."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.table: list[tuple[str, str, float, float]] = []

    def incident(
        self, name: str, cause: Callable[[], object], mend: Callable[[], object], *expected: str, stays: bool = False
    ) -> None:
        """`expected`: alerts, as a name and the values of some labels. `stays`: what has happened goes on
        being seen."""
        cause()
        began, held, fired = time.monotonic(), dict[str, float](), set[str]()
        while fired != set(expected):
            assert time.monotonic() - began < PATIENCE, (
                f"{name}: {set(expected) - fired} did not fire; {self._firing()}"
            )
            for alert, state, labels in self._site.prometheus.alerts():
                for each in expected:
                    wanted, *values = each.split()
                    if alert == f"Idemconsumer{wanted}" and set(values) <= set(labels.values()):
                        held.setdefault(each, time.monotonic() - began)
                        fired |= {each} if state == "firing" or wanted in FOR_LONG else set()
            time.sleep(0.2)
        mend()
        print(f"{name}: {held}")
        self.table += [(name, each, held[each], self._wait(each)) for each in expected]
        if not stays:
            names = {f"Idemconsumer{each.partition(' ')[0]}" for each in expected}
            eventually(lambda: not names.intersection(self._firing()), f"{name}: over", within=PATIENCE)

    def _firing(self) -> list[str]:
        return [alert for alert, _, _ in self._site.prometheus.alerts()]

    def _wait(self, expected: str) -> float:
        return self._site.prometheus.waits[f"Idemconsumer{expected.partition(' ')[0]}"]

    def __str__(self) -> str:
        lines = ["| what happens | alert | its condition holds after | it fires after |", "|---|---|---|---|"]
        for name, alert, held, wait in self.table:
            word, _, value = alert.partition(" ")
            shown = f"`Idemconsumer{word}`{f' ({value})' if value else ''}"
            lines.append(f"| {name} | {shown} | {held:.0f} s | {held + wait:.0f} s |")
        return "\n".join(lines)


def test_each_incident_raises_its_alert_and_each_panel_shows_something(site: Site) -> None:
    drill, bug = Drill(site), site.folder / "bug"

    def locked() -> None:
        holder.execute("lock table effect in access exclusive mode")

    def slow(seconds: float) -> None:
        site.way.seconds = seconds

    def idemconsumer(*words: str) -> None:
        command = [sys.executable, "-m", "idemconsumer", *words, "--dsn", site.postgres.dsn]
        subprocess.run(command, check=True, capture_output=True)

    with small_disk(site.postgres) as disk, psycopg.connect(site.postgres.dsn, application_name="report") as holder:
        site.do("create table effect (id text)")
        for queue in ("mails", "rides"):
            site.do("select idemconsumer.publish(%s, '{\"id\": 1}')", queue)
        with site.traffic():
            eventually(lambda: site.prometheus.answers('idemconsumer_messages_total{outcome="applied"} > 20'))
            drill.incident("a bad deploy", bug.touch, bug.unlink, "HandlerHeldUp fails")
            drill.incident("a table is locked", locked, holder.rollback, "HandlerHeldUp locked")
            drill.incident(
                "a handler is paused",
                lambda: idemconsumer("pause", "take"), lambda: idemconsumer("resume", "take"), "HandlerPaused",
            )  # fmt: skip
            for name, server, source in (
                ("RabbitMQ", site.rabbitmq, "rabbitmq:orders"),
                ("Kafka", site.kafka, "kafka:parcels"),
            ):
                away = (f"SourceAway {source}", "HandlerHeldUp source_away", "NothingConsumes", "NotReady")
                drill.incident(f"{name} is stopped", server.kill, server.start, *away)
                drill.incident(f"{name} hangs", server.freeze, server.thaw, *away)
            drill.incident(
                "the database is slow: a second for each answer", lambda: slow(1.0), lambda: slow(0.0), "DatabaseSlow"
            )
        holder.close()
        drill.incident(
            "the database is away",
            site.postgres.kill,
            site.postgres.start,
            "DatabaseAway",
            "HandlerHeldUp database_away",
        )
        with site.traffic():
            if disk is not None:  # behind that: a full disk would be in the way of its recovery
                full(site, disk, drill)
            # One after the other: what a worker has counted in its last second dies with it.
            drill.incident(
                "a message that fails",
                lambda: site.send("broken"), bool, "DeadLetters take attempts_exhausted", stays=True,
            )  # fmt: skip
            drill.incident(
                "a message that kills its workers",
                lambda: site.send("kills"), bool, "DeadLetters take killed_worker", "WorkersDie", stays=True,
            )  # fmt: skip
        if disk is not None:
            site.do("drop table effect")
            site.do("drop tablespace small")
    print(f"\n{drill}\n")
    late = [each for each in drill.table if each[1].startswith("HandlerHeldUp") and each[2] + each[3] > 120]
    assert not late, "two minutes (O34)"
    of_workers = [name for name in asked() if not name.startswith("idemconsumer_http_")]  # doors: see test_alerts.py
    assert not [name for name in of_workers if not site.prometheus.has_had(name)]


def full(site: Site, disk: Path, drill: Drill) -> None:
    def fill() -> None:
        for rows in (200, 20, 1):
            with suppress(psycopg.errors.DiskFull):
                while True:
                    site.do("insert into filler select repeat(md5(n::text), 30) from generate_series(1, %s) as n", rows)

    site.do(b"create tablespace small location '%s'" % str(disk).encode())  # type: ignore[arg-type]
    site.do("alter table effect set tablespace small")
    site.do("alter table effect alter column id set storage plain")  # a block takes a few
    site.do("create table filler (text text) tablespace small")
    drill.incident("the disk is full", fill, lambda: site.do("drop table filler"), "HandlerHeldUp database_away")


def asked() -> Iterator[str]:
    """What panels and rules ask for: each panel as it is, and of a rule, which should find nothing, each metric."""
    for panel in json.loads(BOARD.read_text("utf-8"))["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$job", ".*").replace("$handler", ".*")
            expression = expression.replace("$__rate_interval", "1m").replace("$__range", "1h")
            yield expression
    for name in sorted(set(re.findall(r"idemconsumer_\w+", RULES.read_text("utf-8")))):
        if name not in NOT_HERE:
            yield name
