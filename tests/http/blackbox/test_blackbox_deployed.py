"""The front door behind gunicorn, whose workers are forked from a process that has imported the app, and behind uvicorn
with several workers: FastAPI, Flask, and a project of Django (H50, H51)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import httpx
import psycopg
import pytest

from tests.http.blackbox.client import new, problem, replayed
from tests.http.blackbox.places import OWN, Place
from tests.http.blackbox.served.config import Config, Store
from tests.http.deployed import DJANGO, DJANGO_ASYNC, LOOPS, SYNC, THREADS, Deployed, Way
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(OWN), reason="needs servers that it may start")

WAYS: Final[list[tuple[Way, Store]]] = [
    (SYNC, "postgres"), (THREADS, "redis"), (LOOPS, "hybrid"), (DJANGO, "postgres"), (DJANGO_ASYNC, "postgres"),
]  # fmt: skip
everywhere = pytest.mark.parametrize("served", WAYS, ids=[way.name for way, _ in WAYS], indirect=True)

Serve = Callable[..., Deployed]


@pytest.fixture
def serve(configs: Callable[[Store], Config]) -> Iterator[Serve]:
    made: list[Deployed] = []

    def served(way: Way, store: Store, *more: str) -> Deployed:
        made.append(Deployed(way.interface, configs(store), way=way, more=more))
        made[-1].start()
        return made[-1]

    yield served
    for server in made:
        server.kill()


@pytest.fixture
def served(serve: Serve, request: pytest.FixtureRequest) -> Deployed:
    return serve(*request.param)


def places(server: Deployed) -> list[tuple[Place, str]]:
    """And a route of each."""
    modes = ["leased"] if server.config.store == "redis" else ["leased", "joined"]
    in_loop = "optional" if server.way is DJANGO_ASYNC else "orders"
    return [
        (Place(server.config.store, mode, server.interface, server), in_loop if mode == "joined" else "orders")
        for mode in modes
    ]


@everywhere
async def test_of_many_equal_requests_one_runs_whichever_worker_gets_them(served: Deployed) -> None:
    for place, route in places(served):
        service, key = place.service(), new()
        answers = await asyncio.gather(*(service.answered(route, key=key) for _ in range(12)))
        assert len({answer.content for answer in answers}) == 1
        assert [answer.status_code for answer in answers] == [201] * 12
        assert sum(not replayed(answer) for answer in answers) <= 1
        assert await service.effects() == 1


@everywhere
async def test_a_worker_that_is_killed(served: Deployed) -> None:
    """Between the effect and the response; then, with another key, when its response is stored and not sent. The others
    go on, and another one is started in its place."""
    for place, route in places(served):
        service, key, before = place.service(), new(), set(served.workers)
        with pytest.raises(httpx.TransportError):
            await service.send(route, key=key, headers=[("X-Die", "running")])
        place.unmark()
        if place.mode == "leased":
            first = await service.send(route, key=key)
            assert problem(first) == "in-progress"  # nobody knows how far it came
            place.lose(key)
        again = await service.answered(route, key=key)
        assert (again.status_code, replayed(again)) == (201, False)
        assert await service.effects() == (1 if place.joined else 2)
        assert (await service.send(route, key=key)).content == again.content

        service.effect, key = new(), new()
        with pytest.raises(httpx.TransportError):
            await service.send(route, key=key, headers=[("X-Die", "answering")])
        for _ in range(4):
            again = await service.answered(route, key=key)
            assert (again.status_code, replayed(again)) == (201, True)
        assert await service.effects() == 1
        await until(lambda before=before: set(served.workers) - before and len(served.workers) == len(before))  # type: ignore[misc]


@everywhere
async def test_workers_that_are_replaced_end_what_they_have_begun_and_leave_no_lease(served: Deployed) -> None:
    """At SIGHUP, as people deploy; and at SIGTERM."""
    here = places(served)
    for sent in (signal.SIGHUP, signal.SIGTERM):
        gates, keys = [place.gate() for place, _ in here], [new() for _ in here]
        before = served.workers
        begun = [
            asyncio.create_task(place.service().send(route, key=key, gate=gate.name))
            for (place, route), key, gate in zip(here, keys, gates, strict=True)
        ]
        await until(lambda gates=gates: all(gate.arrivals for gate in gates))  # type: ignore[misc]
        os.kill(served.processes.pid, sent)
        for gate in gates:
            gate.open()
        answers = await asyncio.gather(*begun)
        assert [answer.status_code for answer in answers] == [201] * len(here)
        if sent == signal.SIGHUP:
            await until(lambda before=before: not set(before) & set(served.workers))  # type: ignore[misc]
        else:
            await asyncio.to_thread(served.gone)
            served.start()
        for (place, route), key, gate, answer in zip(here, keys, gates, answers, strict=True):
            again = await place.service().answered(route, key=key, gate=gate.name)
            assert (again.content, replayed(again), gate.arrivals) == (answer.content, True, 1)
        assert leases(served, before) == []


def leases(server: Deployed, pids: list[int]) -> list[str]:
    """What processes that have ended left to their time."""
    with psycopg.connect(server.config.effects) as db:
        rows = db.execute("select name from idemconsumer.worker where until > clock_timestamp()").fetchall()
    return [name for (name,) in rows if int(name.rpartition(":")[2]) in pids]


async def test_a_request_that_gunicorn_cuts_off_at_its_timeout_has_its_key_free_at_once(serve: Serve) -> None:
    """H51: SIGABRT in the middle of a view, long before a lease is over. The gate stays shut."""
    for place, route in places(serve(SYNC, "postgres", "--timeout", "2")):
        service, gate, key = place.service(), place.gate(), new()
        with suppress(httpx.TransportError):  # what is sent then is gunicorn's, and other with each version
            assert (await service.send(route, key=key, gate=gate.name)).status_code == 500
        assert gate.arrivals == 1
        gate.open()
        again = await service.answered(route, key=key, gate=gate.name)
        assert (again.status_code, replayed(again), gate.arrivals) == (201, False, 2)
        assert await service.effects() == (1 if place.joined else 2)
