"""COMMIT was sent and its answer never came: a new token is taken from oneself, and nothing is done twice (L3)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import Outcome, OutcomeKind, Reject, Saga, Step, StoreUnavailable, Tx
from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import State
from tests.support.inside import patient_unless
from tests.support.points import Points
from tests.support.sagas import Bench, OpenStation, Remote, SagaFn, Station, order, put, saga, take_back
from tests.support.servers.proxy import Proxy, Trap
from tests.support.tuning import tuned

Cut = Literal["before", "after"]
both_cuts = pytest.mark.parametrize("cut", ["before", "after"])


class Line:
    """A station whose connections go through a proxy that cuts one COMMIT, or leaves it without an answer (R20)."""

    def __init__(self, bench: Bench, station: Station, proxy: Proxy, how: str) -> None:
        self._how = how
        self.station = station
        self.tokens: list[int] = []
        self._bench = bench
        self._proxy = proxy
        self._trap: Trap | None = None

    def arm(self, cut: Cut) -> None:
        self._trap = self._proxy.cut_at(mode=cut) if self._how == "cut" else self._proxy.freeze_at(mode=cut)

    async def deliver(self, handler: BoundHandler) -> Outcome:
        """As a lane does: what could not be decided is presented again."""
        work = Work.of(handler, order())
        for _ in range(5):
            try:
                outcome = await self.station.run(work)
            except StoreUnavailable:
                continue
            assert self._trap is not None, "the point was never reached"
            assert self._trap.sprung.is_set(), "no COMMIT followed"
            return outcome
        raise AssertionError("never decided")

    def saw_token(self) -> None:
        self.tokens.append(self._bench.token)


@pytest.fixture(params=["cut", "frozen"])
async def line(
    request: pytest.FixtureRequest,
    bench: Bench,
    points: Points,
    open_station: OpenStation,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Line]:
    tuned(monkeypatch, lookout_pause=0.05, pool_patience=0.8, spare_answer_time=-1000.0)
    async with Proxy(int(str(conninfo_to_dict(bench.dsn)["port"]))) as proxy:
        patient_unless(monkeypatch, proxy.silences)
        dsn = make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port)
        station = await open_station(points, dsn=dsn)

        async def nothing(order: dict[str, Any], saga: Saga) -> None:
            return

        await station.deliver(saga(nothing))  # the scope is known from now on, so the next COMMIT is the claim's
        bench.clear()
        station.register(bench)
        yield Line(bench, station, proxy, request.param)


def booking(line: Line, remote: Remote, *, refused: bool = False) -> SagaFn:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        line.saw_token()
        await saga.tx("first", put, "first", undo=take_back)
        charge = await saga.call("second", remote.charge, "second", undo=remote.refund)
        if refused:
            raise Reject("no")
        await saga.tx("third", put, "third")
        return charge

    return book


FORWARD: Final = [SagaPoint.STEP_COMMITTING, SagaPoint.INTENDING, SagaPoint.CALLED, Point.SEALING]


@both_cuts
@pytest.mark.parametrize("point", ["claim", *FORWARD])
async def test_a_lost_commit_on_the_way_forward_does_nothing_twice(
    bench: Bench, line: Line, points: Points, remote: Remote, point: Point | SagaPoint | str, cut: Cut
) -> None:
    handler = saga(booking(line, remote))
    if isinstance(point, (Point, SagaPoint)):
        points.on(point, lambda: line.arm(cut))
    else:
        line.arm(cut)
    outcome = await line.deliver(handler)
    known = point is Point.SEALING and cut == "after"
    assert outcome.kind is (OutcomeKind.DUPLICATE if known else OutcomeKind.APPLIED)
    assert outcome.result == b'"charged:second"'
    assert bench.effects == ["first", "third"]
    assert remote.effects == ["second"]
    assert (bench.state, bench.held) == (State.COMPLETED, False)
    runs = 1 if point == "claim" or known else 2
    assert len(line.tokens) == runs
    assert line.tokens == sorted(set(line.tokens)), "each run has a token of its own"


BACKWARD: Final = [Point.REJECTING, SagaPoint.UNDOING, SagaPoint.UNDONE, Point.SEALING]


@both_cuts
@pytest.mark.parametrize("point", BACKWARD)
async def test_a_lost_commit_on_the_way_back_undoes_nothing_twice(
    bench: Bench, line: Line, points: Points, remote: Remote, point: Point | SagaPoint, cut: Cut
) -> None:
    points.on(point, lambda: line.arm(cut))
    outcome = await line.deliver(saga(booking(line, remote, refused=True)))
    known = point is Point.SEALING and cut == "after"
    assert outcome.kind is (OutcomeKind.DUPLICATE if known else OutcomeKind.FAILED)
    assert outcome.result == b'{"code":"no","body":null}'
    assert bench.effects == ["first", "undo:first:out:first"]
    assert remote.effects == ["second", "refund:second:charged:second"]
    assert (bench.state, bench.held) == (State.FAILED, False)


@both_cuts
async def test_a_lost_commit_after_a_refund_repeats_it_under_its_key(
    bench: Bench, line: Line, points: Points, remote: Remote, cut: Cut
) -> None:
    async def refund(step: Step, output: str, name: str) -> None:
        if not remote.keys(f"refund:{name}:{output}"):
            line.arm(cut)
        await remote.refund(step, output, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("paid", remote.charge, "paid", undo=refund)
        raise Reject("no")

    assert (await line.deliver(saga(book))).kind is OutcomeKind.FAILED
    assert remote.effects == ["paid", "refund:paid:charged:paid"]
    assert len(remote.calls) == (3 if cut == "before" else 2)


@both_cuts
async def test_a_lost_commit_of_a_rejection_keeps_it(bench: Bench, line: Line, cut: Cut) -> None:
    runs: list[str] = []

    async def refuse(tx: Tx) -> None:
        runs.append("run")
        if len(runs) == 1:
            line.arm(cut)
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        try:
            await saga.tx("refused", refuse)
        except Reject:
            await saga.tx("instead", put, "instead")
        return "done"

    assert (await line.deliver(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["instead"]
    assert len(runs) == (2 if cut == "before" else 1)


@both_cuts
async def test_a_lost_commit_of_a_release_loses_nothing(bench: Bench, line: Line, cut: Cut) -> None:
    fails = ["once"]

    async def flaky(tx: Tx) -> None:
        await put(tx, "s")
        if fails:
            fails.pop()
            line.arm(cut)
            raise ValueError("once")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", flaky)

    # A release that is not known to have happened ends in a run under a new token, or in nobody's saga.
    outcome = await line.deliver(saga(book))
    if outcome.kind is not OutcomeKind.APPLIED:
        assert (await line.station.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["s"]


@both_cuts
async def test_a_lost_commit_of_a_dead_letter_writes_it_once(
    bench: Bench, line: Line, points: Points, cut: Cut
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        raise ValueError("no")

    points.on(Point.DEAD_LETTERING, lambda: line.arm(cut))
    assert (await line.deliver(saga(book, max_attempts=1))).kind is OutcomeKind.DEAD
    assert (bench.letters, bench.state) == (["attempts_exhausted"], State.DEAD)
