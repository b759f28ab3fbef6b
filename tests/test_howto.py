"""The program of each page in docs/howto does what its page says."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import App, Message
from idemconsumer.embedded.postgres import free_port
from idemconsumer.settings import Settings
from tests.support import ROOT
from tests.support.pages import Commands, File, Statements, steps
from tests.support.servers.made import PrivatePgBouncer
from tests.support.servers.postgres import migrated
from tests.support.waiting import until

FOLDER = ROOT / "docs" / "howto"
LINES = 60
Open = Callable[[str], None]


@pytest.fixture
def db(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    """With the tables that the pages write to."""
    migrated(database, "idemconsumer")
    parts = conninfo_to_dict(database)
    address = "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(
        **{name: quote(str(value), safe="") for name, value in parts.items()}
    )
    monkeypatch.setenv("IDEMCONSUMER_DSN", address)
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes the files of a page, and takes them off again."""
    made: list[str] = []

    def open_page(name: str) -> None:
        for file in files(name):
            file.write(tmp_path)
            made.append(file.name.removesuffix(".py"))

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield open_page
    for each in (*made, "order_pb2"):
        sys.modules.pop(each, None)


def files(name: str) -> list[File]:
    return [step for step in steps(f"howto/{name}") if isinstance(step, File)]


def ran(program: str, **environment: str) -> str:
    """What it prints, in a process of its own: it changes the process that it runs in."""
    Path("program.py").write_text(program, "utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def outcomes(app: App, *messages: Message) -> list[str]:
    async with app:
        decided = [await app.process(each) for each in messages]
    return [" ".join(filter(None, (each.kind, (each.result or b"").decode(), each.reason))) for each in decided]


async def worked(app: App, dsn: str) -> None:
    async with app:
        await app.worker(Settings(dsn=dsn, until_empty=True, concurrency=1)).run()


def body(**payload: object) -> bytes:
    return json.dumps(payload).encode()


def test_each_page_is_listed_and_is_one_screen() -> None:
    pages = sorted(each.name for each in FOLDER.glob("*.md") if each.name != "README.md")
    listed = (FOLDER / "README.md").read_text("utf-8")
    assert [name for name in pages if f"]({name})" not in listed] == []
    assert [name for name in pages if len((FOLDER / name).read_text("utf-8").splitlines()) > LINES] == []
    assert [name for name in pages if f'"{name}"' not in Path(__file__).read_text("utf-8")] == [], "a test opens each"
    assert [name for name in pages for each in steps(f"howto/{name}") if isinstance(each, Commands)] == [], "not run"


async def test_fastapi_and_sqlalchemy(page: Open, db: psycopg.Connection[Any], database: str) -> None:
    page("fastapi-sqlalchemy.md")
    web: Any = importlib.import_module("web")
    db.execute("create table invoice (id text primary key, total int not null, mailed bool not null)")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(web.api), base_url="http://shop") as client:
        for replayed in (None, "true"):
            answer = await client.post("/invoices", json={"id": "i-1", "total": 3}, headers={"Idempotency-Key": "k-1"})
            assert (answer.status_code, answer.headers.get("Idempotent-Replayed")) == (201, replayed)
    await web.idempotency.close()
    await worked(web.app, database)
    assert db.execute("select * from invoice").fetchall() == [("i-1", 3, True)]


async def test_publishing_in_a_transaction_of_ones_own(page: Open, db: psycopg.Connection[Any]) -> None:
    page("outbox.md")
    publishing: Any = importlib.import_module("publishing")
    publishing.by_psycopg()
    await publishing.by_psycopg_async()
    publishing.by_sqlalchemy()
    await publishing.by_sqlalchemy_async()
    await publishing.by_asyncpg()
    await publishing.app.close()
    stored = db.execute(
        "select destination, key, convert_from(body, 'UTF8')::jsonb from idemconsumer.outbox order by id"
    )
    assert stored.fetchall() == [
        ("kafka:invoices", key, {"id": "i-1"})
        for key in ("psycopg", "app.publish", "sqlalchemy", "sqlalchemy", "asyncpg")
    ]


async def test_avro(page: Open, db: psycopg.Connection[Any]) -> None:
    import fastavro

    page("avro.md")
    orders: Any = importlib.import_module("orders")
    fields = [{"name": "id", "type": "string"}, {"name": "qty", "type": "int"}]
    schema = {"type": "record", "name": "Order", "fields": fields}
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(503) if len(asked) == 1 else httpx.Response(200, json={"schema": json.dumps(schema)})

    orders.registry = httpx.AsyncClient(base_url="http://registry", transport=httpx.MockTransport(answer))
    encoded = BytesIO()
    fastavro.schemaless_writer(encoded, fastavro.parse_schema(schema), {"id": "o-1", "qty": 3})
    order = Message("kafka:orders", b"\0\0\0\0\7" + encoded.getvalue())
    assert await outcomes(orders.app, order, order, order, Message("kafka:orders", b"{}")) == [
        "retrying retry", 'applied {"reserved":3}', 'duplicate {"reserved":3}', "dead undecodable"
    ]  # fmt: skip
    assert asked == ["/schemas/ids/7"] * 2


def compiled(proto: str) -> ModuleType:
    """As protoc makes it of these few kinds of lines."""
    (name,) = re.findall(r"^message (\w+)", proto, re.MULTILINE)
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", syntax="proto3")
    message = file.message_type.add(name=name)
    for optional, kind, field, number in re.findall(r"^ +(optional )?(\w+) (\w+) = (\d+);", proto, re.MULTILINE):
        of_kind = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
        made = message.field.add(name=field, number=int(number), type=of_kind, label=1)
        if optional:
            made.proto3_optional, made.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    module = ModuleType("order_pb2")
    module.__dict__[name] = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    return module


@pytest.mark.usefixtures("db")
async def test_protobuf(page: Open) -> None:
    page("protobuf.md")
    sys.modules["order_pb2"] = compiled(Path("order.proto").read_text("utf-8"))
    orders: Any = importlib.import_module("orders")
    sent = [orders.Order(id="o-1", qty=3), orders.Order(id="o-1", qty=3), orders.Order(qty=3)]
    assert await outcomes(orders.app, *(Message("kafka:orders", each.SerializeToString()) for each in sent)) == [
        'applied {"reserved":3}', 'duplicate {"reserved":3}', "dead key_missing"
    ]  # fmt: skip


async def test_debezium(page: Open, db: psycopg.Connection[Any]) -> None:
    page("debezium.md")
    customers: Any = importlib.import_module("customers")
    db.execute("create table found (id int primary key, name text)")
    row = {"id": 1, "name": "Ann"}

    def event(op: str, lsn: int, sent_at: int, **rows: object) -> Message:
        given = {"op": op, "before": None, "after": None, "source": {"lsn": lsn}, "ts_ms": sent_at} | rows
        return Message("kafka:shop.public.customer", body(**given), record_key=b'{"id":1}')

    tombstone = Message(
        "kafka:shop.public.customer", b"", record_key=b'{"id":1}', tombstone=True, position="shop.public.customer-0-9"
    )
    created, deleted = event("c", 100, 1, after=row), event("d", 200, 2, before=row)
    assert await outcomes(customers.app, created, deleted, event("c", 100, 3, after=row), tombstone) == [
        "applied", "applied", "duplicate", "applied"
    ]  # fmt: skip
    assert db.execute("select * from found").fetchall() == []


async def test_cloudevents(page: Open, db: psycopg.Connection[Any]) -> None:
    page("cloudevents.md")
    orders: Any = importlib.import_module("orders")
    data, attributes = {"sku": "pen", "qty": 2}, {"id": "17", "source": "/shop", "type": "placed", "specversion": "1.0"}
    structured = Message("kafka:orders", body(**attributes, data=data))
    binary = Message("kafka:orders", body(**data), {f"ce_{name}": value for name, value in attributes.items()})
    assert await outcomes(orders.app, structured, binary, Message("kafka:orders", body(**data))) == [
        'applied "placed: 2 x pen"', 'duplicate "placed: 2 x pen"', "dead undecodable"
    ]  # fmt: skip


def test_a_saga(page: Open, db: psycopg.Connection[Any]) -> None:
    page("testing-a-saga.md")
    command = [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "test_rides.py"], capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


async def test_a_worker_in_a_web_process(page: Open, db: psycopg.Connection[Any]) -> None:
    page("worker-in-a-web-process.md")
    web: Any = importlib.import_module("web")
    db.execute("create table stock as select 'pen' as sku, 10 as qty")
    db.execute('select idemconsumer.publish(\'orders\', \'{"id": "o-1", "sku": "pen"}\')')
    async with (
        web.api.router.lifespan_context(web.api),
        httpx.AsyncClient(transport=httpx.ASGITransport(web.api), base_url="http://shop") as client,
    ):
        await until(lambda: db.execute("select qty from stock").fetchone() == (9,), "the handler has run")
        assert (await client.get("/readyz")).status_code == 200
    assert (await client_of(web).get("/readyz")).status_code == 503
    await web.app.close()


def client_of(web: ModuleType) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(web.api), base_url="http://shop")


DJANGO = """
import asyncio, json
from django.db import connection
from django.test import RequestFactory
import shop
from idemconsumer.settings import load

with connection.schema_editor() as editor:
    editor.create_model(shop.Order)
print(shop.place(RequestFactory().post("/orders", {"sku": "pen"}, "application/json")).content.decode())
asyncio.run(shop.app.worker(load(until_empty=True)).run())
print([order.state for order in shop.Order.objects.all()])
"""


def test_django(page: Open, db: psycopg.Connection[Any]) -> None:
    page("django.md")
    assert ran(DJANGO) == "{\"id\": 1}\n['reserved']\n"


CELERY = """
import asyncio
import shop
from idemconsumer.settings import load

shop.celery.conf.task_always_eager = True
asyncio.run(shop.app.worker(load(until_empty=True, handlers="place,begin")).run())
print([shop.charge_once.delay({"id": "c-1"}).get() for _ in range(2)])
"""


def test_celery(page: Open, db: psycopg.Connection[Any]) -> None:
    page("celery.md")
    db.execute("create table placed (id text)")
    db.execute("create table charged (id text)")
    for _ in range(2):
        db.execute('select idemconsumer.publish(\'orders\', \'{"id": "o-1", "mail": "a@example.org"}\')')
    assert ran(CELERY) == "mail to a@example.org\n['charged', 'charged']\n"
    assert db.execute("select (select count(*) from placed), (select count(*) from charged)").fetchone() == (1, 1)


SENTRY = """
import asyncio, json
import sentry_sdk
import shop
from idemconsumer import Message

sent = []
sentry_sdk.get_client().transport.capture_envelope = lambda envelope: sent.append(envelope.get_event())

async def main():
    async with shop.app:
        await shop.app.process(Message("postgres:orders", b'{"id": "o-1"}'))

asyncio.run(main())
for event in filter(None, sent):
    [*_, error] = event["exception"]["values"]
    print(event["level"], event["logentry"]["message"], event["tags"]["handler"], error["type"], error["value"])
    print("vars" in json.dumps(error["stacktrace"]))
"""


def test_sentry(page: Open, db: psycopg.Connection[Any]) -> None:
    page("sentry.md")
    printed = ran(SENTRY, SENTRY_DSN="http://public@127.0.0.1:1/1").splitlines()
    assert printed[0].startswith("warning handler failed")
    assert printed[0].endswith("place LookupError no such customer")
    assert printed[1:] == ["False"]


METRICS = """
import asyncio, urllib.request
import shop
from idemconsumer.settings import load

async def main():
    worker = shop.app.worker(load(until_empty=True))
    beside = shop.app.worker(load(until_empty=True))
    await asyncio.gather(worker.run(), beside.run())

shop.PORT = {port}
asyncio.run(main())
text = urllib.request.urlopen("http://127.0.0.1:{port}/metrics").read().decode()
print(*(line for line in text.splitlines() if line.startswith("shop_sold")))
"""


def test_metrics_of_ones_own(page: Open, db: psycopg.Connection[Any], tmp_path: Path) -> None:
    page("metrics.md")
    db.execute("create table sold (sku text)")
    db.execute('select idemconsumer.publish(\'orders\', \'{"id": "o-1", "sku": "pen"}\')')
    (tmp_path / "shared").mkdir()
    printed = ran(METRICS.format(port=free_port()), PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "shared"))
    assert printed == 'shop_sold_total{sku="pen"} 1.0\n'


async def test_pgbouncer(
    page: Open,
    db: psycopg.Connection[Any],
    database: str,
    private_pgbouncer: PrivatePgBouncer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page("pgbouncer.md")
    shop: Any = importlib.import_module("shop")
    db.execute("create table placed (id text)")
    (statements,) = [step.text for step in steps("howto/pgbouncer.md") if isinstance(step, Statements)]
    ours = sql.SQL("alter role {} in database {}").format(sql.Identifier(db.info.user), sql.Identifier(db.info.dbname))
    for line in statements.replace("ALTER ROLE shop IN DATABASE shop", ours.as_string(db)).splitlines():
        db.execute(line.encode())
    db.execute("set default_transaction_read_only = off")
    monkeypatch.setenv("IDEMCONSUMER_DSN", private_pgbouncer(database, "transaction").dsn)
    order = Message("postgres:orders", body(id="o-1"))
    assert await outcomes(shop.app, order, order) == ['applied "placed"', 'duplicate "placed"']


async def test_failover(
    page: Open, db: psycopg.Connection[Any], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page("failover.md")
    loop: Any = importlib.import_module("loop")
    given = conninfo_to_dict(database)
    hosts = {"host": "127.0.0.1,127.0.0.1", "port": f"{free_port()},{given['port']}"}
    monkeypatch.setenv("IDEMCONSUMER_DSN", make_conninfo(database, **hosts, target_session_attrs="read-write"))
    async with loop.app:
        assert (await loop.decide(Message("kafka:orders", body(id="o-1")))).kind == "applied"


async def test_forgetting_a_person(page: Open, db: psycopg.Connection[Any]) -> None:
    page("forget.md")
    erase: Any = importlib.import_module("erase")
    db.execute("create table placed (id text, customer text, name text)")
    orders = [Message("postgres:orders", body(id=f"o-{n}", customer=f"c-{n}", name="Ann")) for n in (1, 2)]
    assert await outcomes(erase.app, *orders) == ['applied "placed for Ann"'] * 2
    await erase.erase("c-1")
    assert await outcomes(erase.app, *orders) == ["duplicate", 'duplicate "placed for Ann"']
    assert db.execute("select id from placed").fetchall() == [("o-2",)]
    others = [Message("postgres:orders", body(id="o-2", customer=customer, name="Eve")) for customer in ("c-3", "c-30")]
    assert await outcomes(erase.app, *others) == ["conflict conflict"] * 2
    await erase.erase("c-3")
    ((left,),) = db.execute("select body from idemconsumer.dead_letter").fetchall()
    assert b'"c-30"' in left
