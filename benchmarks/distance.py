"""The store path with the database farther away: what costs then is each round trip that somebody waits for.

`one pipeline` is the limit: groups as large as ours, nothing claimed, and all statements of a group sent before the
first answer is read. A handler that reads before it writes has to wait for what it reads, with whatever library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks import end_to_end
from benchmarks._brokers import KafkaTopic
from benchmarks._child import Child, child
from benchmarks._crew import LANES, Crew, crew, fill_stock
from benchmarks._loads import Load
from benchmarks._measure import Result, Subject, Table, Target, side_by_side
from benchmarks._sizes import OURS, WAITING
from benchmarks._stage import Stage, url
from benchmarks.end_to_end import BEST, Reach
from benchmarks.rivals.applying import AUTOCOMMIT
from benchmarks.rivals.store import PIPELINED
from benchmarks.sagas import beside_dbos

_TRIPS = (0.0, 0.5, 1.0, 2.0)  # ms that the proxy adds; 0: no proxy
_GOALS = {0.5: 10.0, 1.0: 18.0}  # of ours to bare
_ARTICLES = 20_000  # taken in turn, so that no two messages meet at one
_WAITING = f"group {WAITING}"
_MOST = 1_000_000  # deliveries; each run is over earlier


async def distance(stage: Stage) -> Result:
    tables = []
    async with crew(stage) as team, child("benchmarks.delaying") as proxy:
        tables.append(await _proxy_itself(stage, team, proxy))
        for trip in _TRIPS:
            far, facts = await _away(stage, proxy, trip)
            limits = [Target(OURS, "bare", _GOALS.get(trip)), Target(OURS, PIPELINED, 0.7 if trip else None)]
            names = ["bare", AUTOCOMMIT, "by hand", _WAITING, OURS, PIPELINED]
            waiting = Target(OURS, _WAITING, None if trip else 1.0)
            targets = [*limits, waiting, Target(OURS, AUTOCOMMIT), Target(OURS, "by hand")]
            tables.append(await _table(stage, team, f"{trip:g} ms away", names, targets, far, facts=facts))
        for trip in (0.0, 1.0):
            far, facts = await _away(stage, proxy, trip)
            for does, names in (
                ("two", ["bare", "by hand", _WAITING, OURS, PIPELINED]),
                ("read", ["bare", "by hand", _WAITING, OURS]),
            ):
                title = f"{trip:g} ms away, {'an insert and an update' if does == 'two' else 'a read, then an insert'}"
                targets = [Target(OURS, to) for to in names if to != OURS]
                tables.append(await _table(stage, team, title, names, targets, far, does=does, facts=facts))
        tables.append(await _kafka(stage, proxy, 0.5, 6.0))
        tables.append(await _sagas(stage, proxy, 1.0))
    return Result("distance", tables)


async def _kafka(stage: Stage, proxy: Child, trip: float, goal: float) -> Table:
    """From a filled topic to the row, the database alone being far away."""
    far, facts = await _away(stage, proxy, trip)
    topic, count = KafkaTopic(stage), 5_000 if stage.quick else 40_000
    consumers = {end_to_end.OURS: end_to_end.Consumer.ours(), BEST: end_to_end.Consumer.module("hand", "best")}

    def subject(consumer: end_to_end.Consumer) -> Subject:
        async def measured(number: int) -> float:
            return (await end_to_end.consume(stage, topic, consumer, count, most=20.0, reach=far)).rate

        return measured

    subjects = {name: subject(consumer) for name, consumer in consumers.items()}
    targets, rounds = [Target(end_to_end.OURS, BEST, goal)], 1 if stage.quick else 3
    title = f"{trip:g} ms away, end to end: kafka"
    return await side_by_side(
        title, subjects, targets, rounds=rounds, say=stage.say, facts={"messages": count, **facts}
    )


async def _sagas(stage: Stage, proxy: Child, trip: float) -> Table:
    far, facts = await _away(stage, proxy, trip)
    return await beside_dbos(stage, f"{trip:g} ms away, sagas of three steps", far, {"round trip": facts["round trip"]})


async def _proxy_itself(stage: Stage, team: Crew, proxy: Child) -> Table:
    """It adds nothing here, and so shows what it costs by being there."""
    through = await _through(proxy, stage.postgres, 0.0)
    ways: dict[str, Reach] = {"direct": _direct, "through the proxy": through}
    subjects = {
        f"{name}, {way}": _subject(stage, team, name, reach)
        for name in ("bare", PIPELINED)
        for way, reach in ways.items()
    }
    targets = [Target(f"{name}, through the proxy", f"{name}, direct") for name in ("bare", PIPELINED)]
    facts = {f"round trip, {way}": _measured(reach(stage.postgres)) for way, reach in ways.items()}
    return await side_by_side(
        "The proxy itself", subjects, targets, rounds=1 if stage.quick else 3, say=stage.say, facts=facts
    )


async def _table(
    stage: Stage, team: Crew, title: str, names: Sequence[str], targets: Sequence[Target], reach: Reach, *,
    facts: Mapping[str, object], does: str = "",
) -> Table:  # fmt: skip
    subjects = {name: _subject(stage, team, name, reach, does) for name in names}
    rounds = 1 if stage.quick else 3
    return await side_by_side(title, subjects, targets, rounds=rounds, say=stage.say, plot=not does, facts=facts)


def _subject(stage: Stage, team: Crew, name: str, reach: Reach, does: str = "") -> Subject:
    seconds = 0.5 if stage.quick else 4.0

    async def measured(number: int) -> float:
        with stage.database() as dsn:
            if does:
                await fill_stock(dsn, _ARTICLES)
            load = Load(prefix="w", count=_MOST, seconds=seconds / 4, does=does, hot=_ARTICLES if does else 0)
            await team.ask(name, load, reach(dsn))
            load = msgspec.structs.replace(load, prefix="m", seconds=seconds)
            (answer,) = await team.ask(name, load, reach(dsn))
            await team.close()
            return float(answer["count"] / answer["seconds"])

    return measured


async def _away(stage: Stage, proxy: Child, trip: float) -> tuple[Reach, dict[str, object]]:
    reach = await _through(proxy, stage.postgres, trip / 1_000) if trip else _direct
    return reach, {"lanes": LANES, "round trip": _measured(reach(stage.postgres))}


async def _through(proxy: Child, dsn: str, round_trip: float) -> Reach:
    port = await proxy.ask(port=int(str(conninfo_to_dict(dsn).get("port") or 5432)), round_trip=round_trip)
    return lambda address: url(address, host="127.0.0.1", port=port)


def _direct(address: str) -> str:
    return address


def _measured(dsn: str) -> str:
    """The median of some statements that do nothing."""
    took = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(200):
            began = time.perf_counter()
            connection.execute("select 1")
            took.append(time.perf_counter() - began)
    return f"{statistics.median(took) * 1_000:.2f} ms"
