"""Equal requests at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from tests.http.blackbox.client import PATIENCE, new, problem, replayed
from tests.http.blackbox.places import INTERFACES, Place, Running
from tests.http.blackbox.served.config import Interface, Store
from tests.support.waiting import until


async def test_of_fifty_equal_requests_one_runs_and_all_are_answered_alike(place: Place) -> None:
    service, key = place.service(), new()
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*(service.send("waiting", key=key) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum(not replayed(answer) for answer in answers) == 1
    assert await service.effects() == 1


async def test_servers_share_their_keys(place: Place, servers: Callable[[Store, Interface], Running]) -> None:
    other: Interface = INTERFACES[1 - INTERFACES.index(place.interface)]
    services = [place.service(), place.service(servers(place.store, other))]
    services[1].effect, key = services[0].effect, new()
    sent = [service.send("waiting", key=key) for service in services for _ in range(10)]
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*sent)
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert await services[0].effects() == 1


async def test_a_request_in_progress_is_not_run_again(place: Place) -> None:
    service, gate, key = place.service(), place.gate(), new()
    first = asyncio.create_task(service.send(key=key, gate=gate.name))
    await until(lambda: gate.arrivals)
    for _ in range(3):
        rival = await service.send(key=key, gate=gate.name)
        assert (rival.status_code, problem(rival)) == (409, "in-progress")
        assert int(rival.headers["Retry-After"]) >= 1
    gate.open()
    again = await service.answered(key=key, gate=gate.name)
    assert ((await first).content, replayed(again)) == (again.content, True)
    assert (gate.arrivals, await service.effects()) == (1, 1)


async def test_another_payload_under_a_key_in_progress(place: Place) -> None:
    service, gate, key = place.service(), place.gate(), new()
    first = asyncio.create_task(service.send(key=key, gate=gate.name))
    await until(lambda: gate.arrivals)
    other = await service.send(key=key, gate=gate.name, content=b"another")
    assert (other.status_code, problem(other)) == (422, "key-reused")
    gate.open()
    assert (await first).status_code == 201
    assert problem(await service.answered(key=key, gate=gate.name, content=b"another")) == "key-reused"
    assert (await service.effects(), place.dead_letters()) == (1, 0)


async def test_who_waits_gets_the_answer(place: Place) -> None:
    service, gate, key = place.service(), place.gate(), new()
    sent = [asyncio.create_task(service.send("waiting", key=key, gate=gate.name)) for _ in range(5)]
    await until(lambda: gate.arrivals)
    gate.open()
    answers = await asyncio.gather(*sent)
    assert len({answer.content for answer in answers}) == 1
    assert (gate.arrivals, await service.effects()) == (1, 1)


async def test_a_client_that_goes_away_does_not_end_what_it_has_begun(place: Place) -> None:
    service, gate, key = place.service(), place.gate(), new()
    first = asyncio.create_task(service.send(key=key, gate=gate.name))
    await until(lambda: gate.arrivals)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.open()
    again = await service.answered(key=key, gate=gate.name)
    assert (again.status_code, replayed(again)) == (201, True)
    assert (gate.arrivals, await service.effects()) == (1, 1)


async def test_a_client_that_goes_away_before_it_has_sent_its_body_has_sent_nothing(place: Place) -> None:
    service, key = place.service(), new()
    await service.raw(b"half", f"Idempotency-Key: {key}".encode(), length=13)
    whole = await service.answered(key=key)
    assert (whole.status_code, replayed(whole), await service.effects()) == (201, False, 1)


async def test_a_request_that_takes_too_long(place: Place) -> None:
    """In joined mode it is undone. In leased mode it goes on, and its response is there for who comes again. A thread
    runs to its end, and its client is answered then."""
    service, gate, key = place.service(), place.gate(), new()
    first = asyncio.create_task(service.send("limited", key=key, gate=gate.name))
    if place.interface != "asgi":
        await until(lambda: gate.arrivals)
        await asyncio.sleep(0.6)  # the limit, after which its client is answered once the thread has returned
        gate.open()
    answer: httpx.Response = await first
    if place.interface != "asgi" and not place.joined:
        assert answer.status_code == 201
        assert replayed(await service.send("limited", key=key, gate=gate.name))
        assert await service.effects() == 1
        return
    assert (answer.status_code, problem(answer)) == (503, "timed-out")
    if not place.joined:
        assert problem(await service.send("limited", key=key, gate=gate.name)) == "in-progress"
    assert await service.effects() == (0 if place.joined else 1)
    gate.open()
    again = await service.answered("limited", key=key, gate=gate.name)
    assert (again.status_code, replayed(again)) == (201, not place.joined)
    assert await service.effects() == 1
