"""A connection that goes silent while sagas run: they go on over another one (R20), and their lease stays (L38)."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import OutcomeKind, Saga
from idemconsumer.engine.work import Work
from tests.support.inside import patient_unless
from tests.support.sagas import Bench, OpenStation, Remote, Station, put, saga
from tests.support.sagas import order as order_of
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned

SOON = 1.0  # second of patience


@pytest.mark.parametrize("where", ["while a connection is made", "in a step"])
@pytest.mark.parametrize("mode", ["before", "after"])
async def test_a_stalled_answer_does_not_freeze_the_sagas_of_a_process(
    bench: Bench,
    open_station: OpenStation,
    remote: Remote,
    monkeypatch: pytest.MonkeyPatch,
    mode: Literal["before", "after"],
    where: str,
) -> None:
    """Five sagas run, and the next COMMIT gets no answer. No connection that a deadline ends is waited for again."""
    tuned(monkeypatch, ready_patience=SOON, answer_patience=SOON)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, order["id"])
        await saga.call("b", remote.charge, order["id"])
        return "done"

    handler, names = saga(book), [f"k{n}" for n in range(5)]
    async with Proxy(int(str(conninfo_to_dict(bench.dsn)["port"]))) as proxy:
        patient_unless(monkeypatch, proxy.silences)
        station = await open_station(dsn=make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port))
        station.store.pool.longest_answer = SOON
        if where == "in a step":
            before = await asyncio.gather(*(station.deliver(handler, order_of(f"before {n}")) for n in range(6)))
            assert {outcome.kind for outcome in before} == {OutcomeKind.APPLIED}
            bench.run("truncate effect")
        trap = proxy.freeze_at(mode=mode)
        works = [Work.of(handler, order_of(name)) for name in names]
        async with asyncio.timeout(25):
            outcomes = await asyncio.gather(*(_to_an_outcome(station, work) for work in works))
        assert trap.sprung.is_set()
    assert [kind for kind in outcomes if kind not in (OutcomeKind.APPLIED, OutcomeKind.DUPLICATE)] == []
    assert sorted(bench.effects) == names
    assert {name: len(remote.keys(name)) for name in names} == dict.fromkeys(names, 1)


async def _to_an_outcome(station: Station, work: Work) -> OutcomeKind:
    """As a lane: what an outage left undecided is presented again."""
    while True:
        try:
            return (await station.run(work)).kind
        except Exception:
            await asyncio.sleep(0.05)
