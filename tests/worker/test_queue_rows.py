"""Rows of the Postgres queue that were written by SQL, not as the library writes them."""

from __future__ import annotations

import psycopg
import pytest

from idemconsumer import App, Key, Message, Tx
from idemconsumer.message.headers import UNREADABLE, decode_headers, encode_headers
from idemconsumer.message.origin import ORIGIN
from tests.support.workers import Bench, Item, body, note


@pytest.mark.parametrize("headers", ['["a"]', "null", '"x"', "5", "true"])
@pytest.mark.parametrize("function", ["publish", "publish_bytes"])
def test_headers_that_are_no_object_are_refused_when_they_are_published(
    bench: Bench, function: str, headers: str
) -> None:
    payload = "'{}'::jsonb" if function == "publish" else "'\\x7b7d'::bytea"
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="headers must be a JSON object"):
        bench.do(f"select idemconsumer.{function}('q', {payload}, headers => %s)", headers)
    assert bench.do("select 1 from idemconsumer.queue") == []


def test_no_headers_and_null_for_headers_are_none(bench: Bench) -> None:
    bench.do("select idemconsumer.publish('q', '{}'), idemconsumer.publish('q', '{}', headers => null)")
    assert bench.do("select convert_from(headers, 'UTF8') from idemconsumer.queue") == [("{}",)] * 2


async def test_values_that_are_no_text_reach_the_handler_as_json(bench: Bench) -> None:
    app, seen = App("rows"), dict[str, str | bytes]()

    @app.idempotent_handler("postgres:q", key="id")
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        seen.update(message.headers)

    headers = b'{"n": 1e400, "a": {"base64": 5}, "b": {"base64": "?"}, "c": null, "d": [1], "e": "v"}'
    insert = "insert into idemconsumer.queue (name, body, headers) values ('q', %s, %s)"
    bench.do(insert, body(Item("odd")), headers)
    worker = await bench.until_empty(app)
    assert worker.counts == {"applied": 1}
    assert seen == {"n": "1e400", "a": '{"base64": 5}', "b": '{"base64": "?"}', "d": "[1]", "e": "v"}


@pytest.mark.parametrize(
    "value",
    [
        "1",
        "true",
        "[]",
        "{}",
        '{"base64": 5}',
        '{"base64": "!!"}',
        '{"base64": "YQ"}',
        '{"base64": "AA==", "b": 1}',
        '["base64"]',
    ],
)
@pytest.mark.parametrize("destination", ["q", "kafka:q"])
def test_a_header_that_is_no_text_is_refused_when_it_is_published(bench: Bench, destination: str, value: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="the header 'n' is not a text"):
        bench.do(
            "select idemconsumer.publish(%s, '{}', headers => %s)",
            destination,
            f'{{"ok": "v", "none": null, "n": {value}}}',
        )


@pytest.mark.parametrize("bytes_", [b"", b"a", b"ab", b"abc", bytes(range(256))])
def test_bytes_that_are_published_come_back(bench: Bench, bytes_: bytes) -> None:
    bench.do("select idemconsumer.publish('q', '{}', headers => %s)", encode_headers({"raw": bytes_}).decode())
    ((stored,),) = bench.do("select headers from idemconsumer.queue")
    assert decode_headers(stored) == {"raw": bytes_}


@pytest.mark.parametrize("name", ["", "postgres:"])
def test_a_queue_has_a_name(bench: Bench, name: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="the queue has no name"):
        bench.do("select idemconsumer.publish(%s, '{}')", name)


async def test_a_header_without_a_value_is_none(bench: Bench) -> None:
    """R41: as the text "null" it would be everybody's key."""
    app, seen = App("rows"), list[Message]()

    @app.idempotent_handler("postgres:q", key=Key.header("Id"), tenant=Key.first(Key.header("Who"), "id"))
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        seen.append(message)

    for name in ("one", "other"):
        bench.do("select idemconsumer.publish('q', %s, headers => '{\"Id\": null}')", body(Item(name)).decode())
    given = '{"Id": "1", "Who": null, "raw": {"base64": "AP8="}}'
    bench.do("select idemconsumer.publish('q', %s, headers => %s)", body(Item("acme")).decode(), given)
    worker = await bench.until_empty(app)
    assert worker.counts == {"dead": 2, "applied": 1, "retrying": 2}
    assert bench.do("select reason from idemconsumer.dead_letter") == [("key_missing",)] * 2
    assert seen[0].headers == {"Id": "1", "raw": b"\0\xff"}
    assert bench.do("select name from idemconsumer.scope where name like '%acme%'") == [("rows/acme/handle",)]


@pytest.mark.parametrize(
    "found",
    [b'["a"]', b"null", b'"x"', b"", b"\xff\x00", b'{"a": "\xff"}', b"[" * 100_000,
     b'{"' + ORIGIN.encode() + b'": "nonsense"}', b'{"' + ORIGIN.encode() + b'": {"base64": "/w=="}}'],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
async def test_a_row_whose_headers_nobody_can_read_is_run_and_so_is_what_is_behind_it(
    bench: Bench, found: bytes
) -> None:
    app, ran = App("rows"), list[Message]()

    @app.idempotent_handler("postgres:q", key="id")
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        ran.append(message)

    insert = "insert into idemconsumer.queue (name, body, headers) values ('q', %s, %s)"
    bench.do(insert, body(Item("odd")), found)
    bench.enqueue("q", Item("good"))
    worker = await bench.until_empty(app, concurrency=1)
    assert (worker.counts, bench.effects()) == ({"applied": 2}, ["odd", "good"])
    assert ran[0].headers.keys() <= {UNREADABLE, ORIGIN, "a"}
    assert ran[0].source == "postgres:q"
    assert bench.do("select 1 from idemconsumer.queue") == []
