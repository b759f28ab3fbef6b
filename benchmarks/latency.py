"""What a message's time grows by, at half of what the bare consumer can take, with the same arrivals for both."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from benchmarks._child import child
from benchmarks._crew import LANES, crew
from benchmarks._loads import Load
from benchmarks._measure import Figure, Result, Spread, Table
from benchmarks._sizes import OURS
from benchmarks._stage import Stage

_GOALS = {"p50": 1.0, "p99": 5.0}  # milliseconds more than bare

_KEEPS_UP = 10.0  # milliseconds of bare's p50; above, the machine had no half to spare


async def latency(stage: Stage) -> Result:
    rounds, seconds = (1, 2.0) if stage.quick else (3, 8.0)
    async with crew(stage) as team:
        rate = 0.5 * await team.subject("bare", Load(prefix="", count=4_000 if stage.quick else 16_000))(0)
    stage.say(f"Latency: {rate:,.0f} messages/s arrive")
    times: dict[str, list[list[float]]] = {"bare": [], OURS: []}
    async with child("benchmarks.rivals.arrivals") as running:
        for number in range(rounds):
            for name in times if number % 2 == 0 else reversed(times):
                with stage.database() as dsn:
                    question = {"dsn": dsn, "name": name, "lanes": LANES, "rate": rate}
                    for count in (rate * 0.5, rate * seconds):  # the first is the warm-up
                        load = Load(prefix=secrets.token_hex(3), count=int(count))
                        answer: Any = await running.ask(load=msgspec.to_builtins(load), **question)
                    await running.ask(close=True)
                times[name].append([seconds * 1e3 for seconds in answer])
                stage.say(f"Latency: {name}: p50 {times[name][-1][0]:.2f} ms, p99 {times[name][-1][1]:.2f} ms")
    idle = Spread.of(row[0] for row in times["bare"]).median < _KEEPS_UP
    figures: list[Figure] = []
    facts: dict[str, Any] = {"arrivals a second": round(rate), "lanes": LANES}
    for place, (name, goal) in enumerate(_GOALS.items()):
        figures += [
            Figure(f"{who}, {name}", "ms", Spread.of(row[place] for row in rows)) for who, rows in times.items()
        ]
        added = Spread.of(mine[place] - other[place] for mine, other in zip(times[OURS], times["bare"], strict=True))
        figures.append(Figure(f"added, {name}", "ms", added, goal if idle else None))
    if not idle:
        facts["no verdict"] = "bare could not keep up"
    return Result("latency", [Table("Latency at half load", figures, facts=facts, plot=True)])
