"""Which answers are kept, and what a replay looks like."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest

from tests.http.blackbox.client import PATIENCE, Service, new, problem, replayed
from tests.http.blackbox.places import Place

CAP = 65_536


async def test_a_replay_is_the_answer_once_more(service: Service) -> None:
    key = new()
    first, again = [await service.send(key=key) for _ in range(2)]
    assert not replayed(first)
    assert replayed(again)
    assert (again.status_code, again.content) == (first.status_code, first.content) == (201, first.content)
    for kept in ("Location", "ETag", "X-Kept", "X-Other", "Content-Type", "Content-Length"):
        assert again.headers[kept] == first.headers[kept], kept
    assert len(first.headers.get_list("Set-Cookie")) == 2
    for never in ("Set-Cookie", "WWW-Authenticate", "Access-Control-Allow-Origin", "Transfer-Encoding"):
        assert never not in again.headers, never
    assert await service.effects() == 1


async def test_an_answer_that_is_one_is_kept(service: Service) -> None:
    done, refused = (200, 202, 204, 303, 304), (400, 404, 409, 410, 422)
    for status in done + refused:
        key = new()
        first, again = [await service.send(key=key, status=status) for _ in range(2)]
        assert (first.status_code, again.status_code) == (status, status)
        assert (replayed(first), replayed(again)) == (False, True), status
        assert (again.content, again.headers["Location"]) == (first.content, first.headers["Location"]), status
    assert await service.effects() == len(done) + (0 if service.mode == "joined" else len(refused))


async def test_an_answer_that_may_be_another_one_later_is_not_kept(service: Service) -> None:
    passing = (401, 407, 408, 425, 429, 500, 503)
    for status in passing:
        key = new()
        first, again = [await service.send(key=key, status=status) for _ in range(2)]
        assert first.status_code == again.status_code == status
        assert not replayed(again), status
        assert first.content != again.content, status
    assert await service.effects() == (0 if service.mode == "joined" else 2 * len(passing))


async def test_date_and_cors_are_those_of_each_answer(service: Service) -> None:
    """A page of another origin may repeat the request, and a cache must not take a replay for old."""
    key, begun = new(), datetime.now(UTC) - timedelta(seconds=2)  # a server may have the last second's
    for replays, origin in enumerate(("https://a.example", "https://b.example")):
        answer = await service.send(key=key, dated=1, headers=[("Origin", origin)])
        assert replayed(answer) is bool(replays)
        assert answer.headers["Access-Control-Allow-Origin"] == origin
    (date,) = answer.headers.get_list("Date")
    assert parsedate_to_datetime(date) >= begun
    refused = await service.send(key=key, content=b"another", headers=[("Origin", origin)])
    assert (problem(refused), refused.headers["Access-Control-Allow-Origin"]) == ("key-reused", origin)


async def test_a_route_may_choose_what_is_kept(service: Service) -> None:
    for status, kept in {200: True, 503: True, 201: False, 404: False}.items():
        key = new()
        first, again = [await service.send("chosen", key=key, status=status) for _ in range(2)]
        assert (replayed(again), again.content == first.content) == (kept, kept), status


async def test_an_endpoint_that_fails_is_asked_again(service: Service) -> None:
    key = new()
    for _ in range(2):
        assert (await service.send(key=key, fail=1)).status_code == 500
    assert await service.effects() == (0 if service.mode == "joined" else 2)


async def test_what_a_joined_endpoint_has_broken_is_not_committed(service: Service) -> None:
    if service.mode == "leased":
        pytest.skip("its effects are its own")
    for statement in ("COMMIT", "ROLLBACK", "select nothing from nowhere"):
        key, service.effect = new(), new()
        first, again = [await service.send(key=key, sql=statement) for _ in range(2)]
        refused = first.status_code == 201  # Tx has not sent it, and nothing is broken
        assert refused or first.status_code == again.status_code == 500, statement
        assert statement != "select nothing from nowhere" or not refused
        assert (replayed(again), await service.effects()) == (refused, 1 if refused else 0), statement


# ------------------------------------------------------------------------------------------------------------- bodies
BODIES = {
    "empty": b"", "binary": bytes(range(256)) * 16, "zeroes": b"\0" * 4096, "gzip": gzip.compress(b"text " * 1000),
    "most": b"b" * CAP,
}  # fmt: skip


async def test_bodies_arrive_and_come_back_byte_for_byte(service: Service) -> None:
    for name, body in BODIES.items():
        key, encoding = new(), "gzip" if name == "gzip" else "identity"
        for again in (False, True):
            async with service.sending(key=key, content=body, echo=encoding) as response:
                raw = b"".join([part async for part in response.aiter_raw()])
            assert (response.status_code, replayed(response)) == (201, again), name
            assert raw == body, name
            assert response.headers.get("Content-Encoding", "identity") == encoding, name


async def test_a_body_in_chunks_is_the_same_body(service: Service) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (b"one ", b"two ", b"three"):
            yield part

    key = new()
    first = await service.send(key=key, content=chunks(), echo=1)
    again = await service.send(key=key, content=b"one two three", echo=1)
    assert (first.content, again.content, replayed(again)) == (b"one two three", b"one two three", True)


async def test_a_body_that_is_too_large_is_refused(service: Service) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"b" * (CAP // 4)

    for content in (b"b" * (CAP + 1), chunks()):
        response = await service.send(key=new(), content=content)
        assert (response.status_code, problem(response)) == (413, "body-too-large")
    assert await service.effects() == 0


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(service: Service) -> None:
    key = f"Idempotency-Key: {new()}".encode()
    for _ in range(2):
        answer = await service.raw(b"body", key, b"Expect: 100-continue", echo=1)
        assert b" 201 " in answer
        assert answer.endswith(b"body")
    assert await service.effects() == 1


# ----------------------------------------------------------------------------------- streams, and what is too large
async def test_an_answer_that_is_too_large_is_sent_once(service: Service) -> None:
    key = new()
    first = await service.send(key=key, size=CAP * 3)
    assert (first.status_code, len(first.content)) == (201, CAP * 3)
    for _ in range(2):
        again = await service.send(key=key, size=CAP * 3)
        assert (again.status_code, problem(again)) == (410, "not-replayable")
    assert await service.effects() == 1


async def test_a_stream_is_sent_as_it_comes_and_once(place: Place) -> None:
    service, key, gate = place.service(), new(), place.gate()
    async with service.sending(key=key, events=3, gate=gate.name) as response:
        parts = response.aiter_raw()
        assert await anext(parts) == b"data: 0\n\n"
        assert not gate.is_open
        gate.open()
        rest = b"".join([part async for part in parts])
    assert (response.status_code, rest) == (200, b"data: 1\n\ndata: 2\n\n")
    again = await service.send(key=key, events=3, gate=gate.name)
    assert (again.status_code, problem(again)) == (410, "not-replayable")
    assert await service.effects() == 1


async def test_a_key_is_new_once_its_answer_has_expired(service: Service) -> None:
    key = new()
    first = await service.send("brief", key=key)
    async with asyncio.timeout(PATIENCE):
        while replayed(again := await service.send("brief", key=key)):
            assert again.content == first.content
    assert again.status_code == 201
    assert await service.effects() == 2
