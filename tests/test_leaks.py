"""What a running worker writes, on real servers: one JSON object a line, without payloads, passwords and rows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from aiobotocore.session import get_session
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import App, Tx
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.cli.inspect import findings
from idemconsumer.ports.broker import Outgoing
from idemconsumer.process.child import Exit
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from tests.support import forked
from tests.support.servers.made import PrivatePostgres, Server
from tests.support.servers.proxy import Proxy
from tests.support.waiting import eventually

_SECONDS = 60.0  # of any worker here

TOKEN = "s3cret-session-token"
BODY = "s3cret-payload"

APP = """
import asyncio
from idemconsumer import App, Message, Saga, Tx

app = App("shop")

@app.idempotent_handler("SOURCE", key="id", max_attempts=1)
async def keep(person: dict, tx: Tx) -> None:
    await asyncio.sleep(person.get("pause", 0))
    await tx.execute("insert into person values (%s)", (person["email"],))

async def save(tx: Tx, email: str) -> None:
    await tx.execute("insert into person values (%s)", (email,))

@app.idempotent_handler("postgres:sagas", key="id", max_attempts=1)
async def saga(person: dict, saga: Saga) -> None:
    await saga.tx("save", save, person["email"])
"""


class Shop:
    """A project folder with an app in it."""

    def __init__(self, folder: Path, source: str, **variables: str) -> None:
        (folder / "shop.py").write_text(APP.replace("SOURCE", source))
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
        self.environment = clean | variables

    @contextmanager
    def start(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        with forked.Popen(
            [sys.executable, "-m", "idemconsumer", *words], cwd=self.folder, env=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            deadline = threading.Timer(_SECONDS, process.kill)
            deadline.start()
            try:
                yield process
            finally:
                deadline.cancel()
                process.kill()

    def __call__(self, *words: str, code: int = Exit.DONE) -> str:
        """Run to the end; all that was written."""
        with self.start(*words) as process:
            output, _ = process.communicate()
        assert process.returncode == code, output
        return output


def parsed(output: str) -> list[dict[str, Any]]:
    """Every line as one object."""
    return [json.loads(line) for line in output.splitlines()]


def prepared(dsn: str) -> str:
    migrate(dsn, "idemconsumer")
    with psycopg.connect(dsn) as connection:
        connection.execute("create table person (email text constraint one_each unique)")
    return dsn


def publish(dsn: str, queue: str, *bodies: dict[str, Any]) -> None:
    outgoing = [Outgoing(json.dumps(body).encode()) for body in bodies]
    asyncio.run(PostgresBroker(Settings(dsn=dsn)).publish(queue, outgoing))


def test_the_debug_log_has_neither_bodies_nor_the_session_token(
    sqs: Server, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"test-{uuid4().hex}"

    async def send() -> None:
        async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
            url = (await client.create_queue(QueueName=name))["QueueUrl"]
            await client.send_message(QueueUrl=url, MessageBody=json.dumps({"id": "1", "email": BODY}))

    asyncio.run(send())
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    variables = {"IDEMCONSUMER_DSN": prepared(database), "IDEMCONSUMER_SQS": sqs.address}
    shop = Shop(tmp_path, f"sqs:{name}", **variables)

    output = shop("run", "shop:app", "--until-empty", "--log-level", "debug", "--log-format", "json")

    assert [line["applied"] for line in parsed(output) if "applied" in line] == [1]
    assert BODY not in output
    assert TOKEN not in output


@pytest.mark.parametrize(("level", "clients"), [("debug", "WARNING"), ("info", "CRITICAL")])
def test_clients_of_brokers_log_no_more_than_warnings(level: str, clients: str) -> None:
    code = (
        "import logging; from idemconsumer.observe.logging import _LOUD, configure; "
        f"configure('json', {level!r}); "
        "print(*{logging.getLevelName(logging.getLogger(each).level) for each in _LOUD})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == clients


def test_a_lost_database_leaves_one_json_object_a_line(private_postgres: PrivatePostgres, tmp_path: Path) -> None:
    server = private_postgres()
    dsn = prepared(server.dsn)
    publish(dsn, "people", *({"id": str(n), "email": str(n), "pause": 0.05} for n in range(1_000)))
    shop = Shop(tmp_path, "postgres:people", IDEMCONSUMER_DSN=dsn, PYTHONWARNINGS="always")
    with shop.start("run", "shop:app", "--log-format", "json", "--drain-timeout", "1") as worker:
        lines = read(worker, "consuming")
        for _ in range(2):
            time.sleep(0.3)  # every lane is in the middle of something
            server.kill()
            lines += read(worker, "store unreachable, waiting")
            server.start()
            lines += read(worker, "store reachable again")
        worker.terminate()
        rest, _ = worker.communicate(timeout=30)

    assert all("event" in each for each in parsed("".join(lines) + rest))


def read(worker: subprocess.Popen[str], event: str) -> list[str]:
    assert worker.stdout is not None
    lines = []
    for line in worker.stdout:
        lines.append(line)
        if event in line:
            break
    return lines


def test_what_cannot_run_is_one_json_object(database: str, tmp_path: Path) -> None:
    output = Shop(tmp_path, "postgres:people", IDEMCONSUMER_DSN=database)("run", "shop:app", code=Exit.USAGE)
    (line,) = [line for line in parsed(output) if line["event"] == "cannot run"]  # before or behind "worker started"
    assert "migrate up" in line["error"]


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["run", "shop:app", "--wrokers", "2"], {}, "--wrokers"),
        (["run"], {}, "Missing argument 'MODULE:APP'"),
        (["run", "shop:app", "--log-format", "xml"], {}, "'xml' is not one of"),
        (["run", "shop:app", "--workers", "0"], {}, "--workers: 0 is not allowed"),
        (["dev", "shop:app"], {"IDEMCONSUMER_WROKERS": "2"}, "did you mean IDEMCONSUMER_WORKERS?"),
        (["run", "nowhere:app", "--workers", "2"], {}, "there is no module 'nowhere'"),
        (["run", "shop:app"], {"IDEMCONSUMER_DSN": "postgresql://u:s3cret/x@h/db"}, "IDEMCONSUMER_DSN"),
    ],
    ids=["option", "argument", "format", "value", "variable", "module", "address"],
)
def test_whatever_keeps_it_from_running_is_one_json_object(
    tmp_path: Path, words: list[str], variables: dict[str, str], said: str
) -> None:
    shop = Shop(tmp_path, "postgres:people", **{"IDEMCONSUMER_DSN": "postgresql://u@127.0.0.1:1/db"} | variables)
    output = shop(*words, code=Exit.USAGE)
    (line,) = [line for line in parsed(output) if line["event"] == "cannot run"]
    assert said in line["error"]
    assert line["level"] == "critical"
    assert "s3cret" not in output


def test_a_wrong_password_is_said_in_json(rabbitmq: Server, database: str, tmp_path: Path) -> None:
    variables = {"IDEMCONSUMER_DSN": prepared(database), "PYTHONWARNINGS": "always"}
    variables["IDEMCONSUMER_RABBITMQ"] = re.sub(r"://[^@]*@", "://guest:s3cret@", rabbitmq.address)
    shop = Shop(tmp_path, "rabbitmq:people", **variables)
    with shop.start("run", "shop:app", "--log-format", "json", "--drain-timeout", "1") as worker:
        lines = read(worker, "broker unavailable, waiting")
        worker.terminate()
        rest, _ = worker.communicate(timeout=30)
    said = [line["error"] for line in parsed("".join(lines) + rest) if line["event"] == "broker unavailable, waiting"]
    assert "wrong user or password" in said[0]
    assert "s3cret" not in "".join(lines) + rest


HOOKS = """
import asyncio, gc, sys, threading, warnings
from idemconsumer.observe.logging import configure
from idemconsumer.process.child import launch

class Worker:
    async def run(self):
        async def fail(): raise ValueError("amqp://u:s3cret@h")
        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task
        gc.collect()
    def drain(self): ...
    def abort(self): ...
    def when_asked(self, leave): ...

class Dropped:
    def __del__(self): raise ValueError("amqp://u:s3cret@h")

def fail(): raise ValueError("amqp://u:s3cret@h")

configure("json", "info")
launch(Worker, 1.0)
dropped = Dropped(); del dropped
thread = threading.Thread(target=fail); thread.start(); thread.join()
warnings.warn("amqp://u:s3cret@h")
fail()
"""


def test_what_python_itself_reports_is_json_and_redacted() -> None:

    done = subprocess.run([sys.executable, "-c", HOOKS], capture_output=True, text=True, check=False)
    assert [line["event"].partition(":")[0] for line in parsed(done.stderr)] == [
        "unhandled exception in the event loop", "exception ignored", "thread ended by an exception", "<string>",
        "uncaught exception",
    ]  # fmt: skip
    assert "s3cret" not in done.stderr
    assert "ValueError: amqp://u:***@h" in done.stderr


# --------------------------------------------------------------------------------------------------------- the database
def test_rows_of_a_violated_constraint_are_in_no_dead_letter_history_or_log(database: str, tmp_path: Path) -> None:
    prepared(database)
    with psycopg.connect(database) as connection:
        connection.execute("insert into person values ('a@b.c')")
    publish(database, "people", {"id": "1", "email": "a@b.c"})
    publish(database, "sagas", {"id": "2", "email": "a@b.c"})
    shop = Shop(tmp_path, "postgres:people", IDEMCONSUMER_DSN=database)

    with shop.start("run", "shop:app", "--log-format", "json", "--log-level", "debug") as worker:
        with psycopg.connect(database, autocommit=True) as connection:
            texts = until_two(connection)
        worker.terminate()
        output, _ = worker.communicate(timeout=30)

    assert all("one_each" in text and "23505" in text for text in texts), texts
    assert "a@b.c" not in "".join(texts)
    assert "a@b.c" not in output


def until_two(connection: psycopg.Connection) -> Sequence[str]:
    """The errors of the dead letter, of the saga that was put aside and of its history."""
    query = (
        "select error from idemconsumer.dead_letter"
        " union all select error from idemconsumer.saga where error is not null"
        " union all select detail from idemconsumer.history where detail like '%person%'"
    )
    eventually(lambda: len(connection.execute(query).fetchall()) >= 2)
    return [str(text) for (text,) in connection.execute(query).fetchall()]


# ---------------------------------------------------------------------------------------------------------- the servers
def address_of_this_machine() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the route to anywhere else tells our own address
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("kind", ["postgres", "rabbitmq", "kafka"])
async def test_check_warns_of_a_server_across_a_network_without_tls(
    kind: str, database: str, request: pytest.FixtureRequest
) -> None:
    prepared(database)
    server: Server | None = None if kind == "postgres" else request.getfixturevalue(kind)
    near = database if server is None else server.address
    port = conninfo_to_dict(near)["port"] if server is None else re.findall(r":(\d+)", near)[0]
    host = address_of_this_machine()
    async with Proxy(int(str(port)), host) as proxy:
        far = make_conninfo(near, host=host, port=proxy.port) if server is None else near.replace(
            f"127.0.0.1:{port}", f"{host}:{proxy.port}"
        )  # fmt: skip
        output = [await texts_of(kind, database, address) for address in (near, far)]

    assert ["without TLS" in text for text in output] == [False, True], output
    assert "write" in output[1] or "set" in output[1] or "add sslmode=verify-full" in output[1]


async def texts_of(kind: str, database: str, address: str) -> str:
    """What `check` finds, for an app with one source of that kind."""
    app = App("shop")

    @app.idempotent_handler(f"{kind}:test-{uuid4().hex}", key="id")
    async def keep(person: dict[str, Any], tx: Tx) -> None: ...

    given: dict[str, Any] = {"dsn": database, kind: address} if kind != "postgres" else {"dsn": address}
    return "\n".join([finding.text async for finding in findings(app, Settings(**given))])


# ------------------------------------------------------------------------------------------------------------ addresses
@pytest.mark.parametrize("words", [["run", "shop:app"], ["publish", "rabbitmq:people", "{}"]], ids=lambda each: each[0])
def test_an_address_that_cannot_be_read_is_one_line_without_its_password(
    database: str, tmp_path: Path, words: list[str]
) -> None:
    variables = {"IDEMCONSUMER_DSN": prepared(database), "IDEMCONSUMER_RABBITMQ": "amqp://u:s3cret/#x@h/v"}
    output = Shop(tmp_path, "rabbitmq:people", **variables)(*words, code=Exit.USAGE)
    (line,) = [line for line in output.splitlines() if "IDEMCONSUMER_RABBITMQ" in line]
    assert "percent-encoded" in line
    assert "Traceback" not in output
    assert "s3cret" not in output


def test_the_credentials_of_an_endpoint_are_not_shown(sqs: Server, database: str, tmp_path: Path) -> None:
    address = sqs.address.replace("://", "://u:s3cret@")
    variables = {"IDEMCONSUMER_DSN": prepared(database), "IDEMCONSUMER_SQS": address}
    output = Shop(tmp_path, "sqs:missing", **variables)("check", "shop:app", code=Exit.ERROR)
    assert "SQS at http://u:***@127.0.0.1:" in output
    assert "s3cret" not in output
