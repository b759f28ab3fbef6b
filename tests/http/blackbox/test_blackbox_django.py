"""The core of it on Django, in both modes."""

from __future__ import annotations

import asyncio

import pytest

from tests.http.blackbox.client import PATIENCE, new, problem, replayed
from tests.http.blackbox.places import Place


@pytest.fixture
def place(django_place: Place) -> Place:
    return django_place


async def test_a_replay_is_the_answer_once_more(place: Place) -> None:
    service, key = place.service(), new()
    first, again = [await service.send(key=key) for _ in range(2)]
    assert (again.status_code, again.content) == (first.status_code, first.content) == (201, first.content)
    assert (again.headers["Location"], replayed(again)) == (first.headers["Location"], True)
    assert "Set-Cookie" in first.headers
    assert "Set-Cookie" not in again.headers
    assert problem(await service.send(key=key, content=b"another")) == "key-reused"
    assert await service.effects() == 1


async def test_of_many_equal_requests_one_runs(place: Place) -> None:
    service, key = place.service(), new()
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*(service.send("waiting", key=key) for _ in range(20)))
    assert len({answer.content for answer in answers}) == 1
    assert await service.effects() == 1


async def test_an_endpoint_that_fails_is_asked_again(place: Place) -> None:
    service, key = place.service(), new()
    for _ in range(2):
        assert (await service.send(key=key, fail=1)).status_code == 500
    # Django makes a response of it, so it is one that is not kept.
    assert await service.effects() == (0 if place.joined else 2)


async def test_a_stream_is_sent_as_it_comes_and_once(place: Place) -> None:
    service, key, gate = place.service(), new(), place.gate()
    async with service.sending(key=key, events=2, gate=gate.name) as response:
        parts = response.aiter_raw()
        assert await anext(parts) == b"data: 0\n\n"
        gate.open()
        assert b"".join([part async for part in parts]) == b"data: 1\n\n"
    assert problem(await service.send(key=key, events=2, gate=gate.name)) == "not-replayable"
    assert await service.effects() == 1
