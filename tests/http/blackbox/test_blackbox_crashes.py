"""Server processes that die or are stopped, and COMMITs that are cut."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import httpx
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.http.blackbox.client import new, problem, replayed
from tests.http.blackbox.places import Place, Running, places
from tests.support.servers.proxy import Proxy
from tests.support.waiting import until

Start = Callable[..., Running]


async def test_a_server_that_is_killed(place: Place, start: Start) -> None:
    """While the endpoint runs; then, with another key, when its answer is stored and not sent."""
    running = start(place)
    service, key = place.service(running), new()
    with pytest.raises(httpx.TransportError):
        await service.send(key=key, headers=[("X-Die", "running")])
    running.gone()
    place.unmark()
    running.start()
    if place.mode == "leased":
        assert problem(await service.send(key=key)) == "in-progress"  # nobody knows how far it came
        place.lose(key)
    again = await service.answered(key=key)
    assert (again.status_code, replayed(again)) == (201, False)
    assert await service.effects() == (1 if place.joined else 2)

    service.effect, key = new(), new()
    with pytest.raises(httpx.TransportError):
        await service.send(key=key, headers=[("X-Die", "answering")])
    running.gone()
    running.start()
    for _ in range(2):
        again = await service.send(key=key)
        assert (again.status_code, replayed(again)) == (201, True)
    assert await service.effects() == 1


async def test_a_server_that_is_stopped_ends_what_it_has_begun(place: Place, start: Start) -> None:
    running = start(place)
    service, gate, key = place.service(running), place.gate(), new()
    first = asyncio.create_task(service.send(key=key, gate=gate.name))
    await until(lambda: gate.arrivals)
    assert running.process is not None
    assert running.process.pid is not None
    os.kill(running.process.pid, signal.SIGTERM)
    gate.open()
    answer = await first
    await asyncio.to_thread(running.gone)
    running.start()
    again = await service.send(key=key, gate=gate.name)
    assert (again.content, replayed(again), answer.status_code) == (answer.content, True, 201)
    assert (gate.arrivals, await service.effects()) == (1, 1)


@pytest.mark.parametrize("place", places("postgres", "hybrid"), ids=str, indirect=True)
async def test_a_commit_that_is_cut(place: Place, start: Start) -> None:
    """Before the server of the database has it, and after, so that its answer is lost."""
    dsn = place.server.config.dsn
    async with Proxy(int(str(conninfo_to_dict(dsn)["port"]))) as proxy:
        service = place.service(start(place, dsn=make_conninfo(dsn, host="127.0.0.1", port=proxy.port)))
        for mode, runs in {"before": 2 if place.joined else 1, "after": 1}.items():
            service.effect, gate, key = new(), place.gate(), new()
            first = asyncio.create_task(service.send(key=key, gate=gate.name))
            await until(lambda gate=gate: gate.arrivals)  # type: ignore[misc]
            trap = proxy.cut_at(mode=mode)  # type: ignore[arg-type]
            gate.open()
            answer = await first
            assert trap.sprung.is_set(), mode
            assert answer.status_code == 201, (mode, answer.text)
            again = await service.send(key=key, gate=gate.name)
            assert (again.content, replayed(again)) == (answer.content, True), mode
            assert (gate.arrivals, await service.effects()) == (runs, 1), mode
