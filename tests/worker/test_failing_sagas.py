"""A function that fails in all sagas is tried by one at a time, at no cost of attempts, until it works (D17)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from idemconsumer import App, Reject, Retry, Saga, Step, Tx
from idemconsumer.rules.breaker import IN_A_ROW
from tests.support.logs import LogCapture, times
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE
from tests.support.workers import Bench, Item, note

SLOWED, WORKS = "a function fails in all sagas, trying one at a time", "saga function works again"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls there is hardly a pause."""
    tuned(monkeypatch, next_probe_pause=0.01, failed_probe_pause=0.01)
    tuned(monkeypatch, longest_probe_pause=0.05)


class Service:
    """What one function of the sagas depends on: a transaction's, a call's, or the undo of either."""

    def __init__(self, up: Callable[[str], bool], where: str, *, own: int | None = None, **options: Any) -> None:
        self.app = App("failing")
        self.up = up
        self.inside = self.most = self.calls = 0
        self.error: Exception = ConnectionError("the service is down")

        async def book(item: Item, saga: Saga) -> None:
            await saga.tx("before", note, item)
            match where:
                case "tx":
                    await saga.tx(f"of {item.id}", partial(self.ask, item), max_attempts=own)
                case "call":
                    await saga.call(f"of {item.id}", self.ask_remote, item, max_attempts=own)
                case "undo":
                    await saga.call(f"of {item.id}", fine, undo=partial(self.take_back, item), max_attempts=own)
                    raise Reject("no")

        options.setdefault("max_attempts", 3)
        self.app.idempotent_handler("memory:q", key="id", backoff="10ms, 10ms", **options)(book)

    async def ask(self, item: Item, tx: Tx) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.calls += 1
        try:
            await tx.execute("select pg_sleep(0.002)")
            if not self.up(item.id):
                raise self.error
        finally:
            self.inside -= 1

    async def ask_remote(self, step: Step, item: Item) -> None:
        await self.ask(item, _Nothing())  # type: ignore[arg-type]

    async def take_back(self, item: Item, step: Step, output: object) -> None:
        await self.ask(item, _Nothing())  # type: ignore[arg-type]


class _Nothing:
    async def execute(self, query: str) -> None:
        await asyncio.sleep(0.002)


async def fine(step: Step) -> None:
    return


@pytest.mark.parametrize("where", ["tx", "call", "undo"])
async def test_a_dependency_of_sagas_that_is_down_costs_no_attempts(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tuned(monkeypatch, probe_hangs_after=PATIENCE)  # else a machine that stands still tries another one
    service = Service(lambda _: False, where)
    await bench.publish("q", *(Item(str(n)) for n in range(20)))
    async with bench.running(service.app, concurrency=8) as running:
        await running.until(lambda: times(logged, SLOWED) == 1)
        begun = service.calls + 16  # beyond all that were on their way to it, one on each lane
        await running.until(lambda: service.calls >= begun and not service.inside)
        service.most, begun = 0, service.calls
        await running.until(lambda: service.calls >= begun + 30)
        assert service.most == 1, "one at a time"
        assert bench.do("select count(*) from idemconsumer.dead_letter") == [(0,)]
        service.up = lambda _: True
        ended = "failed" if where == "undo" else "applied"
        await running.until_count(**{ended: 20})
    assert bench.do("select count(*) from idemconsumer.dead_letter") == [(0,)]
    assert (times(logged, SLOWED), times(logged, WORKS)) == (1, 1)


async def test_lambdas_of_one_handler_are_not_taken_for_each_other(bench: Bench, logged: LogCapture) -> None:
    app, up = App("failing"), False

    async def ask(step: Step, answers: bool) -> None:
        if not answers:
            raise ConnectionError("the service is down")

    @app.idempotent_handler("memory:q", key="id", backoff="10ms, 10ms", max_attempts=3)
    async def book(item: Item, saga: Saga) -> None:
        await saga.call("reserve", lambda step: ask(step, True))
        await saga.call("charge", lambda step: ask(step, up))

    await bench.publish("q", *(Item(str(n)) for n in range(20)))
    async with bench.running(app, concurrency=1) as running:  # so that a saga reserves between two that fail
        await running.until(lambda: times(logged, SLOWED) == 1 or running.worker.counts.get("dead", 0) > 0)
        up = True
        await running.until_count(applied=20)
    assert bench.do("select count(*) from idemconsumer.dead_letter") == [(0,)]


async def test_poison_among_good_sagas_is_buried_as_ever(bench: Bench, logged: LogCapture) -> None:
    service = Service(lambda name: int(name) % 4 != 0, "tx")
    await bench.publish("q", *(Item(str(n)) for n in range(40)))
    # One at a time: else a database that stands still holds up what is good, and only failures are over.
    async with bench.running(service.app, concurrency=1) as running:
        await running.until_count(applied=30, dead=10)
    assert times(logged, SLOWED) == 0


@pytest.mark.parametrize("where", ["tx", "undo"])
async def test_sagas_that_have_failed_let_those_through_that_have_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    tuned(monkeypatch, failed_probe_pause=10_000.0)
    tried, before = list[str](), list[str]()

    def up(name: str) -> bool:
        tried.append(name)
        if name == "good":
            before.extend(tried)
        return name == "good"

    service = Service(up, where)
    await bench.publish("q", *(Item(f"bad-{n}") for n in range(10)), Item("good"))
    async with bench.running(service.app, concurrency=1) as running:
        await running.until_count(**{"failed" if where == "undo" else "applied": 1}, dead=10)
    assert len(before) <= 11 + 2 * (IN_A_ROW - 1), "each bad one once before it, but for the first ones"
    assert bench.do("select distinct attempts from idemconsumer.dead_letter") == [(3,)]


@pytest.mark.parametrize(
    ("options", "ended"),
    [({"own": 1}, "dead"), ({"fail_on": (OSError,)}, "failed")],
)
async def test_a_step_that_is_to_run_once_runs_once(bench: Bench, options: Any, ended: str) -> None:
    service = Service(lambda _: False, "tx", **options)
    await bench.publish("q", *(Item(str(n)) for n in range(12)))
    async with bench.running(service.app) as running:
        await running.until_count(**{ended: 12})
    assert service.calls == 12


async def test_a_step_that_asks_for_another_attempt_has_not_failed(bench: Bench, logged: LogCapture) -> None:
    service = Service(lambda _: False, "tx", max_attempts=2)
    service.error = Retry()
    await bench.publish("q", *(Item(str(n)) for n in range(12)))
    async with bench.running(service.app) as running:
        await running.until_count(dead=12)
    assert (service.calls, times(logged, SLOWED)) == (24, 0)


async def test_a_function_that_can_never_succeed_has_an_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    tuned(monkeypatch, failing_is_free_for=0.2)
    service = Service(lambda _: False, "call", max_attempts=2)
    await bench.publish("q", *(Item(str(n)) for n in range(10)))
    async with bench.running(service.app) as running:
        await running.until_count(dead=10)
    assert times(logged, SLOWED) == 1
