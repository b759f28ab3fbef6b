"""Real strands, explored: in whatever order deliveries arrive, end, fail, meet a rival, or are taken back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import pytest

from idemconsumer import Tx, idempotent_handler
from idemconsumer.engine.work import Work
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Delivery, Epoch
from idemconsumer.worker.in_flight import InFlight, Wait
from idemconsumer.worker.strands import Strands
from tests.model.explorer import Violation, walk
from tests.support.failures import NoFailures
from tests.support.workers import Item, body

LANES: Final = 2
MINUTE: Final = 60.0


class Given(NamedTuple):
    """A delivery. `epoch`: which one it is of; the second one may be taken back."""

    key: str
    order: str | None
    epoch: int = 0
    fails: int = 0
    busy: int = 0


ORDERED: Final = (Given("a", "x", fails=1), Given("b", "x", busy=1), Given("c", "y"), Given("d", "x"))
OF_ONE_KEY: Final = (Given("a", "x", fails=1), Given("a", "y"), Given("b", "y", busy=1), Given("a", None))
TAKEN_BACK: Final = (Given("a", "x", epoch=1, fails=1), Given("b", "x", epoch=1), Given("a", "x"), Given("b", "x"))
FREE: Final = (Given("a", None, busy=1), Given("b", None, fails=2), Given("a", None), Given("c", None))
RIVALS: Final = (Given("a", "x", epoch=1, fails=1, busy=1), Given("a", "x"), Given("b", "x"))


@idempotent_handler("memory:q", key="id", order_by="entity")
async def handle(item: Item, tx: Tx) -> None: ...


BOUND: Final = handle.plan.bind("model")


class Station:
    """What a walk has led to so far."""

    def __init__(self, given: Sequence[Given], way: Iterable[str]) -> None:
        self.given = given
        self.epochs = (Epoch(), Epoch())
        self.strands = Strands(NoFailures(), self._forgotten, room=9)
        self.held: list[InFlight] = []
        self.gone: list[InFlight] = []
        self.done: list[InFlight] = []
        self.fails = [each.fails for each in given]
        self.busy = [each.busy for each in given]
        self.lanes: list[list[InFlight]] = [[] for _ in range(LANES)]
        self.asked: list[InFlight] = []  # of a round that reads their records
        self.met = set[InFlight]()  # a rival
        self.was_away = False  # the database
        self.now = 0.0
        for action in way:
            self.act(action)

    def _forgotten(self, gone: Iterable[InFlight]) -> None:
        self.gone += gone

    @property
    def actions(self) -> Iterator[str]:
        if len(self.held) < len(self.given):
            yield "arrives"
        for lane, group in enumerate(self.lanes):
            if not group and self.strands.ready:
                yield f"take {lane}"
            if group:
                yield f"ends {lane}"
                if not self.was_away and group[0].strand.deferred:
                    yield f"outage {lane}"
                if self.fails[self._number(group[0])]:
                    yield f"fails {lane}"
                if self.busy[self._number(group[0])]:
                    yield f"busy {lane}"
        if not self.epochs[1].retiring and any(each.epoch for each in self.given):
            yield "taken back"
        if self.strands.next_due < float("inf"):
            yield "time"
        if self.asked:
            yield from ("undecided", "decided")
            if self.fails[self._number(self.asked[0])]:
                yield "unanswered"
        elif self.strands.rivals:
            yield "round"

    def _number(self, held: InFlight) -> int:
        return self.held.index(held)

    def act(self, action: str) -> None:
        what, _, lane = action.partition(" ")
        group = self.lanes[int(lane)] if lane.isdecimal() else []
        if what == "arrives":
            given = self.given[len(self.held)]
            message = Message("memory:q", body(Item(given.key, given.order or "")))
            delivery = Delivery(message, self.epochs[given.epoch])
            held = InFlight(Work.of(BOUND, message), delivery, cast(Any, None))
            self.held.append(held)
            self.strands.add(held, given.order)
        elif what == "take":
            self.lanes[int(lane)] = self.strands.take(2, self.now)
        elif what == "time":
            self.now += MINUTE
            self.strands.sweep()
            self.strands.wake(self.now)
        elif what == "taken":
            self.epochs[1].end()
            self.strands.sweep()
        elif what == "round":
            self.asked = self.strands.round(self.now)
        elif group:
            self._end(what, group)
            self.lanes[int(lane)] = []
        else:
            if what != "undecided":
                self._end("ends" if what == "decided" else "fails", self.asked)
            self.strands.claim_again(self.asked)
            self.asked = []

    def _end(self, what: str, group: list[InFlight]) -> None:
        """All of it, or, since the first one fails or is busy, or the database is away, nothing."""
        strands = dict.fromkeys(held.strand for held in group)
        self.was_away |= what == "outage"
        if what == "ends":
            for held in group:
                self.strands.end(held)
                self.done.append(held)
        elif what == "fails":
            self.fails[self._number(group[0])] -= 1
            group[0].due = self.now + MINUTE
        elif what == "busy":
            self.busy[self._number(group[0])] -= 1
            self.strands.await_rival(group[0], self.now)
            self.met.add(group[0])
        for strand in strands:
            if strand.taken and strand.line[0] is group[0] and what == "fails":
                self.strands.rest(strand, self.now)
            elif strand.taken:
                self.strands.put_back(strand)

    @property
    def state(self) -> tuple[object, ...]:
        """All that decides what can happen next."""
        number, of = self._number, self.strands
        known = {strand: index for index, strand in enumerate(of._all)}
        strands = [
            (
                tuple(map(number, strand.line)),
                (strand.order, strand.taken, strand.ready, strand.waits, strand.due <= self.now, strand.deferred),
            )
            for strand in known
        ]
        heap = [known.get(strand, -1) for _, strand in sorted(of._heap, key=lambda each: each[0])]
        later = [known.get(strand, -1) for _, _, strand in sorted(of._later, key=lambda each: each[:2])]
        keys = [(key, known.get(strand, -1), others) for key, (strand, others) in of._of_key.items()]
        lanes = tuple(sorted(tuple(map(number, group)) for group in self.lanes))
        ended = tuple(map(number, self.done)), frozenset(map(number, self.gone)), self.epochs[1].retiring
        due = tuple(held.due > 0 for held in self.held)
        lines = repr(strands), repr(heap), repr(later), repr(keys), lanes, tuple(map(number, self.asked))
        return *lines, ended, due, self.was_away, *self.fails, *self.busy

    @property
    def broken(self) -> str | None:
        """A promise that does not hold."""
        running = [held for group in self.lanes for held in group]
        if any(not held.strand.deferred for held in running if held in self.met):
            return "a lane waits for a rival again"
        if any(held.strand.deferred is not group[0].strand.deferred for group in self.lanes for held in group):
            return "a lane does not wait for a rival at all"
        if any(held.due > self.now for held in running):
            return "one that has failed runs before it is due"
        if any(held.running != (held in running) for strand in self.strands._all for held in strand.line):
            return "what runs is not what a lane has"
        retried = [strand for strand in self.strands._all if strand.waits is Wait.RETRY]
        if any(strand.due != strand.line[0].due for strand in retried):
            return "one waits for the time of another"
        if self.strands._bytes != sum(strand.bytes for strand in self.strands._all):
            return "what waits is not what its bytes are counted for"
        keys = [{held.key for held in group} for group in self.lanes]
        if keys[0] & keys[1]:
            return "a key runs in two lanes"
        orders = [{order for held in group if (order := self._order(held))} for group in self.lanes]
        if orders[0] & orders[1]:
            return "an order runs in two lanes"
        if sorted(map(self._number, [*running, *self.done])) != sorted({*map(self._number, [*running, *self.done])}):
            return "a delivery runs twice"
        waiting = [held for strand in self.strands._all if strand.waits for held in strand.line]
        for epoch in self.epochs:
            if epoch.waiting != sum(held.delivery.epoch is epoch for held in waiting):
                return "what waits is not what counts as waiting"
        if any(held.delivery.epoch is self.epochs[0] for held in self.gone):
            return "what is ours was forgotten"
        for order in ("x", "y"):
            its = [self._number(held) for held in self.done if self._order(held) == order]
            if its != sorted(its):
                return "an order is not kept"
        return None

    def _order(self, held: InFlight) -> str | None:
        """One that has met a rival has lost it, and one of a key with several follows the first one of that (D1)."""
        given = self.given[self._number(held)]
        several = sum(other.key == held.key for other in self.held) > 1
        return None if given.busy or several else given.order


class Way:
    """One of those to a state, which is what makes two of them equal."""

    def __init__(self, given: Sequence[Given], actions: tuple[str, ...] = ()) -> None:
        self.given, self.actions = given, actions
        self.station = Station(given, actions)
        self.state = self.station.state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Way) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)


def successors(way: Way) -> Iterator[tuple[str, Way]]:
    for action in way.station.actions:
        yield action, Way(way.given, (*way.actions, action))


def broken(before: Way, after: Way) -> str | None:
    return after.station.broken


def end(way: Way) -> int | None:
    """All have ended, and nothing is left."""
    station = way.station
    over = len(station.done) + len(station.gone) == len(way.given) == len(station.held)
    assert not over or not (len(station.strands) or station.strands._of_key or station.strands._of_order)
    return 0 if over else None


@pytest.mark.parametrize(
    "given",
    [ORDERED, OF_ONE_KEY, TAKEN_BACK, FREE, RIVALS],
    ids=["ordered", "of one key", "taken back", "free", "rivals"],
)
def test_each_runs_once_in_its_order_and_none_waits_for_ever(given: Sequence[Given]) -> None:
    explored = walk(Way(given), successors, broken=broken, same=lambda way: way, end=end)
    assert explored.states > 50


def test_without_strands_an_order_runs_in_two_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model sees it."""
    monkeypatch.setattr(Strands, "_known", lambda *_: None)
    with pytest.raises(Violation, match="an order runs in two lanes"):
        walk(Way(ORDERED), successors, broken=broken, same=lambda way: way, end=end)
