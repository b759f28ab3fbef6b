"""Whatever arrives: a dead letter with its reason, the next message runs, and no payload reaches the log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from idemconsumer import App, Key, Message, Tx
from idemconsumer.rules.values import State
from tests.support.ledger import SOURCE, Ledger, message, write
from tests.support.logs import capture_logs

SECRET = "4111-1111-secret"

BAD: dict[str, tuple[bytes, str]] = {
    "empty body": (b"", "undecodable"),
    "a byte that is no UTF-8": (b"\xff", "undecodable"),
    "text that is no UTF-8": (b'{"id":"' + SECRET.encode() + b'\xff"}', "undecodable"),
    "no JSON": (SECRET.encode(), "undecodable"),
    "cut off": (b'{"id": 1, "card": "' + SECRET.encode(), "undecodable"),
    "two documents": (b'{"id": 1}{"id": 2}', "undecodable"),
    "NaN": (b'{"id": NaN}', "undecodable"),
    "Infinity": (b'{"id": -Infinity}', "undecodable"),
    "a float beyond all": (b'{"id": 1e999}', "undecodable"),
    "an integer of 5,000 digits": (b'{"id": ' + b"9" * 5_000 + b"}", "undecodable"),
    "nested 100,000 deep": (b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "undecodable"),
    "an array": (b'["' + SECRET.encode() + b'"]', "undecodable"),
    "null": (b"null", "undecodable"),
    "NUL in the key": (b'{"id": "a\\u0000b"}', "key_invalid"),
    "a lone surrogate in the key": (b'{"id": "\\ud800"}', "undecodable"),
    "a key of a mebibyte": (b'{"id": "' + b"k" * 1_048_576 + b'"}', "key_invalid"),
    "no key": (b'{"card": "' + SECRET.encode() + b'"}', "key_missing"),
    "null for a key": (b'{"id": null, "card": "' + SECRET.encode() + b'"}', "key_missing"),
    "an empty key": (b'{"id": ""}', "key_missing"),
    "an object for a key": (b'{"id": {"card": "' + SECRET.encode() + b'"}}', "key_invalid"),
    "a boolean for a key": (b'{"id": true}', "key_invalid"),
    "too large": (b'{"id": 1, "x": "' + b"x" * 5_000_000 + b'"}', "oversized"),
}


class Order(msgspec.Struct):
    id: str
    amount: int


@pytest.fixture
async def app(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    monkeypatch.setenv("IDEMCONSUMER_DSN", ledger.dsn)
    app = App("shop")

    @app.idempotent_handler(SOURCE, key="id")
    async def loose(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    @app.idempotent_handler("memory:strict", key="id")
    async def strict(order: Order, tx: Tx) -> None:
        await write(tx, order.id)

    @app.idempotent_handler("memory:header", key=Key.header("Idempotency-Key"))
    async def by_header(body: bytes, tx: Tx) -> None:
        await write(tx, "bytes")

    yield app
    await app.close()


def of(source: str, body: bytes, **more: Any) -> Message:
    return Message(source, body, position="orders-7", **more)


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_becomes_a_dead_letter_with_its_reason(ledger: Ledger, app: App, case: str) -> None:
    body, reason = BAD[case]
    with capture_logs() as logs:
        outcomes = [await app.process(of(SOURCE, body)) for _ in range(2)]
        after = await app.process(message("the next one"))

    assert [(str(outcome.kind), outcome.reason) for outcome in outcomes] == [("dead", reason)] * 2
    assert after.kind == "applied"
    assert (ledger.letters, ledger.effects) == ([(reason, 2)], ["the next one"])
    kept = "select body = %s, body_size, body_sha256 = sha256(%s), position from idemconsumer.dead_letter"
    assert ledger.run(kept, [body[: 4 << 20], body]) == [(True, len(body), True, "orders-7")]
    assert ledger.states == [State.COMPLETED]
    assert_silent_about(body, logs)
    assert SECRET not in str(outcomes)


@pytest.mark.parametrize(
    "body",
    [b'{"id": 1, "amount": 1}', b'{"id": "a", "amount": "%s"}' % SECRET.encode(), b'{"id": "a"}', b'{"amount": 1}'],
    ids=["a number for a text", "a text for a number", "no amount", "no id"],
)
async def test_a_payload_of_the_wrong_shape_is_undecodable(ledger: Ledger, app: App, body: bytes) -> None:
    with capture_logs() as logs:
        outcome = await app.process(of("memory:strict", body))
    assert (outcome.kind, outcome.reason) == ("dead", "undecodable")
    assert ledger.letters == [("undecodable", 1)]
    assert_silent_about(body, logs)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "key_missing"),
        ({"Idempotency-Key": ""}, "key_missing"),
        ({"Idempotency-Key": b"\xff\xfe"}, "key_invalid"),
        ({"Idempotency-Key": "a\0b"}, "key_invalid"),
        ({"Idempotency-Key": "k" * 1_048_576}, "key_invalid"),
    ],
    ids=["none", "empty", "no UTF-8", "NUL", "a mebibyte"],
)
async def test_a_bad_header_is_a_dead_letter_with_its_bytes(
    ledger: Ledger, app: App, headers: dict[str, str | bytes], reason: str
) -> None:
    with capture_logs() as logs:
        outcome = await app.process(of("memory:header", b"\x00\xff", headers=headers))
    assert (outcome.kind, outcome.reason) == ("dead", reason)
    assert ledger.run("select body, position from idemconsumer.dead_letter") == [(b"\x00\xff", "orders-7")]
    assert "kkkk" not in str(logs)


async def test_bad_messages_that_differ_are_letters_of_their_own(ledger: Ledger, app: App) -> None:
    for body in (b"{", b"[", b"{"):
        await app.process(of(SOURCE, body))
    assert ledger.letters == [("undecodable", 2), ("undecodable", 1)]


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * 100_000, "日本 🎉"], ids=["NUL", "surrogate", "long", "wide"])
async def test_odd_text_in_errors_and_positions_is_stored(ledger: Ledger, app: App, text: str) -> None:
    @app.idempotent_handler("memory:odd", key="id", name="odd", max_attempts=1)
    async def odd(order: dict[str, Any]) -> None:
        raise ValueError(text)

    given = msgspec.structs.replace(message(1), source="memory:odd", position=text, headers={"h": text, text: "h"})
    assert (await app.process(given)).kind == "dead"
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "ValueError" in error


async def test_a_handler_may_take_any_bytes(ledger: Ledger, app: App) -> None:
    for number, body in enumerate((b"", b"\x00", b"\xff" * 1_000, b"{")):
        outcome = await app.process(of("memory:header", body, headers={"idempotency-key": f"{number}"}))
        assert outcome.kind == "applied"
    assert len(ledger.effects) == 4


def assert_silent_about(body: bytes, logs: Any) -> None:
    said = str(logs)
    assert SECRET not in said
    assert "99999999" not in said
    assert "kkkkkkkk" not in said
    assert "xxxxxxxx" not in said
    assert len(body) < 40 or body.decode("latin-1") not in said
