"""`import`: the keys of a hand-written table become records (R31)."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from click.testing import CliRunner

from idemconsumer import App, Key, Message, OutcomeKind, Saga, Tx
from idemconsumer.admin import imports
from idemconsumer.admin.imports import Imported, Imports
from idemconsumer.admin.old_tables import Chosen
from idemconsumer.cli.main import main
from idemconsumer.errors import ConfigurationError
from idemconsumer.message import keys
from idemconsumer.message.keys import KeySpec
from idemconsumer.settings import Settings
from idemconsumer.sql.queries import load
from tests.support.servers.postgres import migrated
from tests.support.waiting import until

A_UUID = "8c6b1ab0-4a0d-4c7e-9c9c-0d3b7a1f2e44"


class Numbered(msgspec.Struct):
    id: int


class Identified(msgspec.Struct):
    id: uuid.UUID


class Desk:
    """A database with a hand-written table, and an app with one handler."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.app = App("shop")
        self.effects: list[object] = []

    def sql(self, query: str, *given: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(query.encode(), given or None)
            return cursor.fetchall() if cursor.description else []

    def handler(self, key: KeySpec, payload: type = dict, **options: Any) -> None:
        async def reserve(order: Any, tx: Tx) -> str:
            self.effects.append(order)
            return "ours"

        reserve.__annotations__["order"] = payload
        self.app = App("shop")
        self.app.idempotent_handler("memory:orders", key=key, **options)(reserve)

    async def take(self, *key: str, **chosen: Any) -> Imported:
        (handler,) = self.app.bound_handlers(Settings())
        given = {name: chosen.pop(name) for name in ("progress", "dry_run") if name in chosen}
        return await Imports(self.dsn, "idemconsumer").run(handler, Chosen(table="seen", key=key, **chosen), **given)

    async def arrives(self, body: object, **more: Any) -> tuple[OutcomeKind, bytes | None]:
        outcome = await self.app.process(Message("memory:orders", json.dumps(body).encode(), **more))
        return outcome.kind, outcome.result

    def records(self) -> int:
        return int(self.sql("select count(*) from idemconsumer.record")[0][0])


@pytest.fixture
async def desk(database: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    migrated(database, "idemconsumer")
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    desk = Desk(database)
    yield desk
    await desk.app.close()


CASES: Sequence[tuple[Any, ...]] = (
    ("a text", "id", dict, "id text", ("o-1",), {"id": "o-1"}, {}),
    ("a number, where the payload is anything", "id", dict, "id bigint", ("17",), {"id": 17}, {}),
    ("a number that the payload has as a text", "id", dict, "id int", ("17",), {"id": "17"}, {}),
    ("a text that the payload has as a number", "id", Numbered, "id varchar(9)", ("17",), {"id": 17}, {}),
    ("a numeric", "id", Numbered, "id numeric(20, 0)", ("-17",), {"id": -17}, {}),
    ("a UUID", "id", Identified, "id uuid", (A_UUID,), {"id": A_UUID.upper()}, {}),
    ("a UUID that the payload has as a text", "order.id", dict, "id uuid", (A_UUID,), {"order": {"id": A_UUID}}, {}),
    ("a padded text", "id", dict, "id char(9)", ("o-1",), {"id": "o-1"}, {}),
    ("a header", Key.header("Id"), dict, "id text", ("h-1",), {}, {"headers": {"id": "h-1"}}),
    ("bytes of a header", Key.header("Id"), dict, "id bytea", ("h-1",), {}, {"headers": {"Id": b"h-1"}}),
    ("a message id", Key.message_id(), dict, "id uuid", (A_UUID,), {}, {"message_id": A_UUID}),
    ("a record key", Key.record_key(), dict, "id bytea", ("k-ä",), {}, {"record_key": "k-ä".encode()}),
    ("an event", Key.cloudevent(), dict, "source text; id text", ("/shop", "1"),
     {"specversion": "1.0", "source": "/shop", "id": "1"}, {}),
    ("an offset", Key.offset(), dict, "topic text; part int; at bigint", ("t-1", "0", "7"), {},
     {"position": "t-1-0-7"}),
    ("several", Key.all("id", Key.all(Key.header("Line"), "v")), dict, "id text; line text; v int", ("a", "bc", "3"),
     {"id": "a", "v": 3}, {"headers": {"Line": "bc"}}),
    ("one of several", Key.first(Key.header("Id"), "id"), dict, "id text", ("x",), {"id": "x"}, {}),
    ("a function", lambda message: str(message.headers["Id"])[1:], dict, "id text", ("-1",), {},
     {"headers": {"Id": "h-1"}}),
    ("a hash of the payload", Key.payload(), dict, "id bytea", (), {"any": "thing"}, {}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "payload", "columns", "row", "body", "more"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
async def test_a_message_whose_key_was_taken_over_is_a_duplicate(
    desk: Desk, spec: KeySpec, payload: type, columns: str, row: Sequence[str], body: Any, more: Any
) -> None:
    """Whatever it has as its payload: the table knew none."""
    desk.handler(spec, payload)
    names = [each.split()[0] for each in columns.split("; ")]
    desk.sql(f"create table seen ({columns.replace(';', ',')}, result jsonb, primary key ({', '.join(names)}))")
    values = [each.encode() if "bytea" in columns else each for each in row] or [
        keys.fingerprint(json.dumps(body).encode())
    ]
    desk.sql(f"insert into seen values ({', '.join(['%s'] * len(values))}, '{{\"n\":  1}}')", *values)

    imported = await desk.take(*names, result="result")

    assert (imported.rows, imported.taken, imported.left) == (1, 1, [])
    assert await desk.arrives(body, **more) == (OutcomeKind.DUPLICATE, b'{"n": 1}')
    assert desk.effects == []
    if isinstance(body, dict) and spec != Key.payload():
        assert await desk.arrives(body | {"also": "this"}, **more) == (OutcomeKind.DUPLICATE, b'{"n": 1}')


async def test_a_saga_whose_key_was_taken_over_does_not_begin(desk: Desk) -> None:
    @desk.app.idempotent_handler("memory:orders", key="id")
    async def ride(order: dict[str, str], saga: Saga) -> None:
        desk.effects.append(order)

    desk.sql("create table seen (id text primary key)")
    desk.sql("insert into seen values ('a')")
    await desk.take("id")
    assert await desk.arrives({"id": "a"}) == (OutcomeKind.DUPLICATE, None)
    assert desk.effects == []


async def test_a_handler_with_a_name_of_its_own_has_the_keys_of_that(desk: Desk) -> None:
    desk.handler("id", name="hold")
    desk.sql("create table seen (id text primary key)")
    desk.sql("insert into seen values ('a')")
    await desk.take("id")
    assert await desk.arrives({"id": "a"}) == (OutcomeKind.DUPLICATE, None)


async def test_what_is_done_is_taken_with_its_time_its_tenant_and_its_result_and_nothing_else(
    desk: Desk, tmp_path: Path
) -> None:
    (tmp_path / "taking.py").write_text(
        "from idemconsumer import App, Tx\n"
        "app = App('shop')\n"
        "@app.idempotent_handler('memory:orders', key='id', tenant='who', retain='30d')\n"
        "async def reserve(order: dict, tx: Tx) -> None: ...\n"
        "@app.idempotent_handler('memory:others', key='id')\n"
        "async def other(order: dict, tx: Tx) -> None: ...\n"
    )
    desk.sql(
        'create table "Old Seen" (n int generated always as identity primary key, consumer text, id text, who text,'
        " state text, result text, at timestamp)"
    )
    rows: Sequence[tuple[str, str | None, str, str | None, str | None, str]] = (
        ("reserve", "a", "acme", "done", '{"n":1}', "3 days"),
        ("reserve", "a", "ajax", "ok", None, "-1 day"),
        ("reserve", "b", "acme", "processing", None, "1 day"),
        ("reserve", "c", "acme", None, None, "1 day"),
        ("reserve", "d", "acme", "done", None, "31 days"),
        ("reserve", None, "acme", "done", None, "1 day"),
        ("mail", "e", "acme", "done", None, "1 day"),
    )
    for row in rows:
        desk.sql(
            'insert into "Old Seen" (consumer, id, who, state, result, at)'
            " values (%s, %s, %s, %s, %s, now() - %s::interval)", *row,
        )  # fmt: skip
    words = [
        "import", "taking:app", "--handler", "reserve", "--table", '"Old Seen"', "--key-column", "id",
        "--tenant-column", "who", "--state-column", "state", "--done-values", "done, ok", "--result-column", "result",
        "--created-column", "at", "--where", "consumer like 'res%'", "--rate", "1000",
    ]  # fmt: skip

    def cli(*more: str, code: int = 0) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            result = CliRunner().invoke(main, [*words, *more])
        assert result.exit_code == code, result.output
        return result

    dry = await asyncio.to_thread(cli, "--dry-run")
    assert dry.stdout == "would take: 2 keys of shop/reserve, from 6 rows\n"
    assert desk.records() == 0

    said = json.loads((await asyncio.to_thread(cli, "--json")).stdout)
    assert (said["rows"], said["taken"], said["there"], said["too_old"], said["unusable"]) == (6, 2, {}, 1, 1)
    assert said["not_done"] == {"processing": 1, "None": 1}
    assert said["left"] == [
        {"row": {"n": "3"}, "why": "not done: processing"},
        {"row": {"n": "4"}, "why": "not done: None"},
        {"row": {"n": "5"}, "why": "older than the handler's retain"},
        {"row": {"n": "6"}, "why": "key_missing: payload path 'id' is missing"},
    ]
    found = desk.sql(
        "select s.name, r.state, r.fingerprint is null, e.body, e.content_type,"
        " extract(day from clock_timestamp() - r.changed_at)::int, s.retain = interval '30 days'"
        " from idemconsumer.record r join idemconsumer.scope s on s.id = r.scope_id"
        " left join idemconsumer.result e on e.key = r.key order by 1"
    )
    assert found == [
        ("shop/acme/reserve", 3, True, b'{"n":1}', "application/json", 3, True),
        ("shop/ajax/reserve", 3, True, None, None, 0, True),
    ]
    again = await asyncio.to_thread(cli)
    assert again.stdout == "taken: 0 keys of shop/reserve, from 6 rows\nthere already: 2 completed\n"
    assert "left: 2 that are not done: 1 processing, 1 None" in again.stderr
    words[2:4] = []
    assert "has 2 handlers; say with --handler" in (await asyncio.to_thread(cli, code=2)).stderr


async def test_an_interrupted_import_goes_on_where_it_was_and_a_finished_one_begins_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "_TOGETHER", 10)
    desk.handler("id")
    desk.sql("create table seen (id text, at int, primary key (at, id))")
    desk.sql("insert into seen select 'o-' || n, n %% 2 from generate_series(1, 35) n where %s", True)

    def killed(done: Imported) -> None:
        if done.rows == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await desk.take("id", progress=killed)
    assert desk.records() == 20

    other = await desk.take("id", where="seen.at = 5")
    assert (other.rows, other.resumed) == (0, False), "what is asked for is something else"
    with pytest.raises(KeyboardInterrupt):
        await desk.take("id", progress=killed)
    went_on = await desk.take("id")
    assert (went_on.rows, went_on.taken, went_on.resumed) == (15, 15, True)
    desk.sql("insert into seen values ('late', 0)")
    again = await desk.take("id")
    assert (again.rows, again.taken, again.there, again.resumed) == (36, 1, {"completed": 35}, False)
    assert desk.records() == 36


async def test_a_key_that_a_worker_holds_is_waited_for(desk: Desk) -> None:
    desk.handler("id")
    desk.sql("create table seen (id text primary key)")
    desk.sql("insert into seen values ('a'), ('b')")
    (handler,) = desk.app.bound_handlers(Settings())
    held = handler.call_for(Message("memory:orders", b'{"id": "a"}')).claim.key
    async with await psycopg.AsyncConnection.connect(desk.dsn) as rival:
        await rival.execute("select pg_advisory_xact_lock(%s)", (int.from_bytes(held[:8], "big", signed=True),))
        taking = asyncio.create_task(desk.take("id"))
        await until(
            lambda: desk.sql("select 1 from pg_locks where not granted and locktype = 'advisory'") != [], "it waits"
        )
        assert desk.records() == 1, "the others do not wait with it"
    imported = await asyncio.wait_for(taking, 10)
    assert (imported.taken, imported.there) == (2, {})


async def test_a_worker_does_not_wait_for_an_import(desk: Desk) -> None:
    """Its claim finds the key held, as by a rival, and its connection goes back (J1)."""
    desk.sql("insert into idemconsumer.scope (name) values ('shop/-/reserve')")
    key, queries = keys.digest("shop", None, "reserve", "a"), load("idemconsumer")
    with psycopg.connect(desk.dsn) as importing, psycopg.connect(desk.dsn) as worker:
        given = {"keys": [key], "scopes": [1], "times": [None]}
        assert importing.execute(queries["import_keys"], given).fetchall() == [(key,)]
        worker.execute("set lock_timeout = '1s'")
        claim = {"keys": [key], "scopes": [1], "fingerprints": [None], "canonicals": [None], "expires": None}
        claim["state"] = 3
        assert worker.execute(queries["claim"], claim).fetchall() == [(key, *[None] * 7)]
        importing.rollback()
        worker.rollback()


@pytest.mark.parametrize(
    ("columns", "chosen", "says"),
    [
        ("id text primary key", {"key": ["nr"]}, "has no column 'nr' that this role may read; it has id"),
        ("id text primary key", {"key": ["id", "id"]}, "it needs 1, in this order: payload path 'id'; given are 2"),
        ("id text primary key", {"tenant": ["id"]}, "needs none: it has no tenant; given are 1"),
        ("id float8 primary key", {}, "column 'id' is of type double precision, of which it cannot be told"),
        ("id numeric(9, 2) primary key", {}, "add a generated column that has the text of the key"),
        ("id text", {}, "has neither a primary key nor a unique index over columns that are NOT NULL"),
        ("id text unique", {}, "has neither a primary key nor a unique index over columns that are NOT NULL"),
        ("id text primary key, s text", {"state": "s"}, "give both --state-column and --done-values"),
        ("id text primary key, at int", {"created": "at"}, "column 'at' is of type integer, and not a time"),
        ("id text primary key", {"where": "nowhere = 1"}, 'cannot be read so: column "nowhere" does not exist'),
        ("id text primary key, r text default 'ok'", {"result": "r"}, "result of the row id=a is not JSON; write --"),
        ("id text primary key", {"table": "nothing"}, "there is no table 'nothing'"),
        ("id text primary key", {"table": "seen_view"}, "this is no table, but a view or something else: 'seen_view'"),
    ],
)  # fmt: skip
async def test_what_cannot_be_meant_is_refused(desk: Desk, columns: str, chosen: dict[str, Any], says: str) -> None:
    desk.handler("id")
    desk.sql(f"create table seen ({columns})")
    desk.sql("create view seen_view as select * from seen")
    if "text" in columns:
        desk.sql("insert into seen values ('a')")
    (handler,) = desk.app.bound_handlers(Settings())
    given = {"table": "seen", "key": ["id"]} | chosen
    with pytest.raises(ConfigurationError) as refused:
        await Imports(desk.dsn, "idemconsumer").run(handler, Chosen(**given))
    assert says in str(refused.value)
    assert desk.records() == 0


async def test_results_that_are_no_json_are_kept_as_they_are(desk: Desk) -> None:
    desk.handler("id")
    desk.sql("create table seen (id text primary key, r text, b bytea)")
    desk.sql("insert into seen values ('a', 'ok', '\\x00ff')")
    await desk.take("id", result="r", content_type="text/plain")
    assert await desk.arrives({"id": "a"}) == (OutcomeKind.DUPLICATE, b"ok")
    desk.sql("truncate idemconsumer.record, idemconsumer.result")
    await desk.take("id", result="b")
    assert await desk.arrives({"id": "a"}) == (OutcomeKind.DUPLICATE, b"\x00\xff")


async def test_keys_of_which_a_row_does_not_say_which_they_are_are_refused(desk: Desk) -> None:
    desk.handler(Key.first(Key.cloudevent(), "id"))
    desk.sql("create table seen (id text primary key)")
    with pytest.raises(ConfigurationError, match="a row does not say which of them it has"):
        await desk.take("id")
