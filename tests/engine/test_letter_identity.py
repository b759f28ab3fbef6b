"""What a dead letter keeps of its message, and what makes two arrivals one letter (R24)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from idemconsumer import App, Message, Tx
from idemconsumer.admin.dead_letters import Admin, DeadLetterDetail
from idemconsumer.engine.dead_letter import dead_letter
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.message import Whole
from tests.support.ledger import SCHEMA, SOURCE, Ledger, write

LIMIT = 1_000


@pytest.fixture
def handler() -> BoundHandler:
    app = App("shop")

    @app.idempotent_handler(SOURCE, key="id")
    async def take(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    return app.handlers["take"].plan.bind("shop", max_message_bytes=LIMIT)


@pytest.fixture
def put_aside(ledger: Ledger, engine: Engine, handler: BoundHandler) -> Any:
    async def run(message: Message, **delivery: Any) -> DeadLetterDetail:
        await engine.run([Work.of(handler, message, **delivery)])
        admin = Admin(ledger.dsn, SCHEMA)
        letter = await admin.dead_letter((await admin.dead_letters())[0].id)
        assert letter is not None
        return letter

    return run


def bad(**more: Any) -> Message:
    return msgspec.structs.replace(Message(SOURCE, b"{", {"a": "1"}, position="t-0-1"), **more)


OTHERS: dict[str, dict[str, Any]] = {
    "body": {"body": b"["},
    "a header": {"headers": {"a": "2"}},
    "a repeated header": {"repeated_headers": (("a", "2"), ("a", "1"))},
    "record key": {"record_key": b"k"},
    "message id": {"message_id": "m"},
    "a property": {"properties": {"correlation_id": "c"}},
    "tombstone": {"body": b"", "tombstone": True},
}


@pytest.mark.parametrize("other", OTHERS)
async def test_what_makes_two_arrivals_one_letter(ledger: Ledger, put_aside: Any, other: str) -> None:
    await put_aside(bad(), own_id="t-0-1")
    await put_aside(bad(headers={"a": "1", "x-delivery-count": "2"}), own_id="t-0-1")
    assert ledger.letters == [("undecodable", 2)]
    await put_aside(bad(), own_id="t-0-2")
    await put_aside(bad(**OTHERS[other]), own_id="t-0-1")
    assert [arrivals for _, arrivals in ledger.letters] == [2, 1, 1]


async def test_what_has_no_id_is_another_message_until_it_is_redelivered(ledger: Ledger, put_aside: Any) -> None:
    await put_aside(bad(), first=True)
    await put_aside(bad(), first=True)
    await put_aside(bad(record_key=b"k"), first=False)
    assert [arrivals for _, arrivals in ledger.letters] == [1, 1, 1]
    await put_aside(bad(), first=False)
    await put_aside(bad(record_key=b"k"), first=False)
    assert [arrivals for _, arrivals in ledger.letters] == [1, 2, 2]


async def test_a_letter_that_is_written_again_after_an_outage_is_one(
    ledger: Ledger, engine: Engine, handler: BoundHandler
) -> None:
    work = Work.of(handler, bad(), first=True)
    assert dead_letter(work, "undecodable", "", 0).identity == dead_letter(work, "undecodable", "", 0).identity
    await engine.run([work])
    await engine.run([work])
    assert [arrivals for _, arrivals in ledger.letters] == [2]


async def test_a_large_message_keeps_its_beginning_its_size_and_its_hash(put_aside: Any) -> None:
    body = b'{"id": "' + b"x" * 3 * LIMIT
    letter = await put_aside(bad(body=body))
    assert (letter.reason, letter.body, letter.body_size) == ("oversized", body[:LIMIT], len(body))
    assert letter.body_sha256 == hashlib.sha256(body).digest()
    assert letter.headers == (("a", "1"),)


async def test_of_which_only_the_beginning_is_held_is_the_same_letter(ledger: Ledger, put_aside: Any) -> None:
    """So a worker that has all of it, and one that has not, put one letter aside."""
    body = b"x" * 3 * LIMIT
    whole = Whole(len(body), hashlib.sha256(body).digest())
    for held in (bad(body=body), bad(body=body[:LIMIT], whole=whole)):
        letter = await put_aside(held, own_id="t-0-1")
        assert (letter.reason, letter.body, letter.body_size) == ("oversized", body[:LIMIT], len(body))
        assert letter.body_sha256 == whole.sha256
        assert letter.error == "3,002 bytes with its headers, at most 1,000 are allowed"
    assert [arrivals for _, arrivals in ledger.letters] == [2]


async def test_a_beginning_is_never_handled_even_where_more_is_allowed(ledger: Ledger, put_aside: Any) -> None:
    letter = await put_aside(bad(body=b'{"id": 1}', whole=Whole(100, b"")))
    assert (letter.reason, letter.body_size, ledger.effects) == ("oversized", 100, [])


async def test_large_bodies_that_begin_alike_are_two_letters(ledger: Ledger, put_aside: Any) -> None:
    for end in (b"a", b"b"):
        await put_aside(bad(body=b"x" * 2 * LIMIT + end), own_id="t-0-1")
    assert [arrivals for _, arrivals in ledger.letters] == [1, 1]


@pytest.mark.parametrize(
    "large",
    [
        {"headers": {"a": "1", "b": "x" * LIMIT, "c": "3"}},
        {"headers": {"a": "1", "b": b"\xff" * LIMIT, "c": "3"}},
        {"headers": {"a": "1", "b": "é" * (LIMIT // 2), "c": "3"}},
        {"headers": {"a": "1"}, "repeated_headers": (("a", "1"), *(("b", "x" * 100),) * 11)},
        {"record_key": b"k" * LIMIT},
    ],
    ids=["text", "bytes", "two bytes a character", "repeated", "record key"],
)
async def test_headers_and_record_key_count_towards_the_limit(
    ledger: Ledger, put_aside: Any, large: dict[str, Any]
) -> None:
    letter = await put_aside(bad(body=b'{"id": 1}', **large))
    assert (letter.reason, ledger.effects) == ("oversized", [])
    assert "with its headers" in letter.error
    assert letter.body == b'{"id": 1}'
    assert letter.headers[0] == ("a", "1")
    assert sum(len(name) + len(value) for name, value in letter.headers) <= LIMIT
    assert ("headers are left out" in letter.error) == ("record_key" not in large)
    assert letter.record_key is None or len(letter.record_key) == LIMIT


async def test_a_conflict_is_a_letter_for_each_message(ledger: Ledger, engine: Engine, handler: BoundHandler) -> None:
    def order(qty: int) -> Message:
        return bad(body=b'{"id": 1, "qty": %d}' % qty)

    await engine.run([Work.of(handler, order(1), own_id="t-0-0")])
    for offset in (1, 2, 2):
        await engine.run([Work.of(handler, order(2), own_id=f"t-0-{offset}")])
    assert ledger.letters == [("conflict", 1), ("conflict", 2)]


def test_a_key_that_is_put_aside_is_one_letter_wherever_it_is(handler: BoundHandler) -> None:
    work = Work.of(handler, bad(body=b'{"id": 1}'), own_id="t-0-1")
    same = dead_letter(work, "attempts_exhausted", "", 5).identity
    elsewhere = replace(work, own_id="t-0-2")
    assert dead_letter(elsewhere, "attempts_exhausted", "", 5).identity == same
    assert dead_letter(work, "contended", "", 5).identity != same
