"""A worker that dies at any point and is started again loses nothing and doubles nothing."""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import Final

import psycopg
import pytest

from idemconsumer.message import keys
from idemconsumer.ports.observer import Point
from idemconsumer.rules.values import State
from tests.support.servers.postgres import migrated
from tests.worker.crashes import payment, work
from tests.worker.crashing_worker import BOMBS, LETTERS, PAYMENTS

SCHEMA = "idemconsumer"

# How often each point is passed before the worker dies there, so that some of the work is done and some is not.
NTH: Final = {
    Point.FETCHED: 9,
    Point.READING: 1,
    Point.READ: 1,
    Point.DISPATCHED: 9,
    Point.SUSPECTS_MARKED: 2,
    Point.SUSPECT_COUNTED: 2,
    Point.CLAIMED: 3,
    Point.HANDLED: 7,
    Point.SEALING: 3,
    Point.COMMITTED: 2,
    Point.ROLLED_BACK: 2,
    Point.ATTEMPT_COUNTED: 3,
    Point.REJECTING: 1,
    Point.REJECTED: 1,
    Point.DEAD_LETTERING: 2,
    Point.DEAD_LETTERED: 2,
    Point.SETTLING: 3,
    Point.SETTLED: 3,
    Point.RELAYED: 1,
}

# Where a batch takes a different path from single messages.
OF_BATCHES: Final = (
    Point.CLAIMED,
    Point.HANDLED,
    Point.SEALING,
    Point.COMMITTED,
    Point.ROLLED_BACK,
    Point.ATTEMPT_COUNTED,
)

PLAIN = [f"plain-{n}" for n in range(12)]
SUSPECTS = [f"suspect-{n}" for n in range(1, 9)]
BEGUN = SUSPECTS[-2:]
APPLIED = sorted([*PLAIN, *SUSPECTS, "flaky-1", "flaky-2"])


class Bench:
    """The queue, the witness (a table that would take every effect twice) and the worker processes."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.db = psycopg.connect(dsn, autocommit=True)
        self.db.execute("create table effect (id text, amount int)")

    def publish(self, *bodies: bytes, queue: str = PAYMENTS) -> None:
        for body in bodies:
            self.db.execute("select idemconsumer.publish_bytes(%s, %s)", (queue, body))

    def work(self, *crash: str, batches: bool = False) -> int:
        """A worker until it has emptied the queue, or died; its exit status."""
        return work(self.dsn, *crash, IDEMCONSUMER_SCHEMA=SCHEMA, **({"CRASH_BATCHES": "1"} if batches else {}))

    def let_visibility_pass(self) -> None:
        """What a dead worker held is delivered again after 10 s."""
        self.db.execute("update idemconsumer.queue set visible_at = clock_timestamp()")

    def effects(self) -> Counter[str]:
        return Counter(name for (name,) in self.db.execute("select id from effect").fetchall())

    def queued(self) -> int:
        row = self.db.execute("select count(*) from idemconsumer.queue where name <> %s", (LETTERS,)).fetchone()
        assert row is not None
        return int(row[0])

    def attempts(self) -> int:
        """How many messages are on record as begun."""
        row = self.db.execute("select count(*) from idemconsumer.attempt").fetchone()
        assert row is not None
        return int(row[0])

    def states(self) -> Counter[State]:
        return Counter(State(n) for (n,) in self.db.execute("select state from idemconsumer.record").fetchall())

    def forwarded(self) -> Counter[str]:
        """How often each dead letter has been sent on."""
        rows = self.db.execute("select message_id from idemconsumer.queue where name = %s", (LETTERS,))
        return Counter(number for (number,) in rows.fetchall())

    def letters(self) -> list[tuple[str, bytes]]:
        rows = self.db.execute("select reason, body from idemconsumer.dead_letter").fetchall()
        return sorted((str(reason), bytes(body)) for reason, body in rows)


@pytest.fixture
def bench(database: str) -> Bench:
    migrated(database, SCHEMA)
    bench = Bench(database)
    bench.publish(*map(payment, SUSPECTS))
    # As an earlier worker leaves them that was killed with them in hand, and with the last ones begun.
    bench.db.execute("update idemconsumer.queue set deliveries = 1")
    for name in BEGUN:
        key = keys.digest("crashing", None, "pay", name)
        bench.db.execute("insert into idemconsumer.attempt values (%s, 1, 0, null, clock_timestamp())", (key,))
    bench.publish(*(payment(name) for name in PLAIN[:6]), payment("flaky-1"), b"{", payment("refused-1"))
    bench.publish(*(payment(name) for name in PLAIN[:4]), payment("poison-1"), payment("plain-1", amount=2))
    bench.publish(payment("suspect-1"), payment("refused-1"), payment("flaky-2"), b'{"amount": 1}')
    bench.publish(*(payment(name) for name in PLAIN[6:]), payment("poison-1"), payment("flaky-1"))
    return bench


def test_every_point_has_its_crash() -> None:
    of_the_outbox = {Point.RELAYING}  # tests/worker/test_outbox_crashes.py
    assert set(NTH) == set(Point) - of_the_outbox


@pytest.mark.kill
@pytest.mark.parametrize("point", NTH)
def test_a_crash_at(bench: Bench, point: Point) -> None:
    assert bench.work(f"{point}:{NTH[point]}") == -signal.SIGKILL, "the scenario never came to this point"
    assert max(bench.effects().values(), default=0) <= 1
    bench.let_visibility_pass()
    assert bench.work() == 0
    nothing_is_lost_or_doubled(bench)
    if point is Point.RELAYED:  # sent, and not marked yet: sent again under the same id
        assert 2 in bench.forwarded().values()


@pytest.mark.long
@pytest.mark.kill
@pytest.mark.parametrize("point", OF_BATCHES)
def test_a_crash_of_a_worker_with_batches_at(bench: Bench, point: Point) -> None:
    assert bench.work(f"{point}:2", batches=True) == -signal.SIGKILL, "the scenario never came to this point"
    assert max(bench.effects().values(), default=0) <= 1
    bench.let_visibility_pass()
    assert bench.work(batches=True) == 0
    nothing_is_lost_or_doubled(bench)


def nothing_is_lost_or_doubled(bench: Bench) -> None:
    assert sorted(bench.effects().elements()) == APPLIED
    assert (bench.queued(), bench.attempts()) == (0, 0)
    assert bench.states() == {State.COMPLETED: len(APPLIED), State.FAILED: 1, State.DEAD: 1}
    rejection = bench.db.execute(
        "select convert_from(body, 'UTF8') from idemconsumer.result join idemconsumer.record using (key)"
        " where state = 4"
    ).fetchall()
    assert [json.loads(body) for (body,) in rejection] == [{"code": "no_funds", "body": {"amount": 1}}]
    numbers = bench.db.execute("select id from idemconsumer.dead_letter").fetchall()
    assert bench.forwarded().keys() == {f"crashing-dead-{number}" for (number,) in numbers}
    letters = bench.letters()
    # If its attempts were over when the worker died, the next worker counts one more and blames that.
    poison = "killed_worker" if ("killed_worker", payment("poison-1")) in letters else "attempts_exhausted"
    assert letters == sorted(
        [
            ("conflict", payment("plain-1", amount=2)),
            ("key_missing", b'{"amount": 1}'),
            ("undecodable", b"{"),
            (poison, payment("poison-1")),
        ]
    )


@pytest.mark.long
@pytest.mark.kill
def test_a_worker_that_dies_at_one_point_after_the_other_comes_to_the_same_end(bench: Bench) -> None:
    points = (Point.CLAIMED, Point.HANDLED, Point.SUSPECT_COUNTED, Point.SEALING, Point.COMMITTED, Point.SETTLING)
    for point in points:
        assert bench.work(f"{point}:2") == -signal.SIGKILL
        bench.let_visibility_pass()
    assert bench.work() == 0
    assert sorted(bench.effects().elements()) == APPLIED
    assert bench.queued() == 0


@pytest.mark.kill
def test_a_message_that_kills_its_worker_ends_as_a_dead_letter_and_takes_no_other_along(bench: Bench) -> None:
    around = [f"around-{n}" for n in range(6)]
    bench.publish(*map(payment, [*around[:3], "bomb", *around[3:]]), queue=BOMBS)
    deaths = 0
    while deaths < 10 and bench.work() != 0:
        deaths += 1
        bench.let_visibility_pass()
    # Once in a group without suspects, once in a group of suspects, then alone and counted, as often as it may.
    assert deaths == 4
    assert ("killed_worker", payment("bomb")) in bench.letters()
    assert bench.effects() == Counter([*APPLIED, *around])
    assert (bench.queued(), bench.attempts()) == (0, 0)
