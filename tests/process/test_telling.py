"""Reports: who writes them waits for nobody, and the totals of who reads them never go back (O11)."""

from __future__ import annotations

import asyncio
import os

from idemconsumer.channel import MOST, Channel, Ear
from idemconsumer.observe.counts import Counts
from idemconsumer.observe.fleet import Fleet
from idemconsumer.observe.reports import HandlerState, Report, encoded
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.health import Phase
from idemconsumer.rules.values import Outcome, OutcomeKind
from tests.support.waiting import until


def line(applied: int, **more: object) -> bytes:
    counts = Counts()
    counts.of("take").ended([Outcome(OutcomeKind.APPLIED)] * applied)
    counts.of("take").handled(applied, 0.5)
    return encoded(Report(app="shop", phase=Phase.CONSUMING, patience=5.0, counts=counts, **more))  # type: ignore[arg-type]


def applied(crew: Fleet) -> int:
    return crew.counts.outcomes.get("applied", 0)


def test_a_report_says_little_of_each_handler_and_nothing_is_lost() -> None:
    counts, crew = Counts(), Fleet(1)
    for number in range(300):
        its = counts.of(f"handler_{number}")
        if number % 3 == 0:
            its.ended([Outcome(OutcomeKind.APPLIED)])
            its.handled(2, 0.5)
            its.groups.observe(0.5)
    states = {name: HandlerState(8, 0, 0, 0.0) for name in counts.handlers}
    said = encoded(Report(app="shop", phase=Phase.CONSUMING, patience=5.0, counts=counts, handlers=states))
    assert len(said) < 300 * 150
    crew.begun(0)
    crew.told(0, said)
    crew.ended(0)
    assert {name: of.groups.buckets for name, of in crew.counts.handlers.items()} == {
        name: of.groups.buckets for name, of in counts.handlers.items()
    }
    assert crew.counts.of("handler_0").handling.sum == 0.5
    assert sum(crew.counts.of("handler_1").sizes.buckets) == 0


async def test_a_full_pipe_blocks_nobody_and_tears_no_line() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    channel = Channel()
    channel.attach(f"{writing} reports")
    try:
        for number in range(40):  # far beyond what a pipe holds
            channel.tell("report", b"%d" % number * 5_000, patience=0.0)
        received = os.read(reading, 1_000_000)
        channel.tell("report", b"later", patience=0.0)
        channel.tell("report", b"x" * MOST, patience=0.0)  # longer than a line may be
        received += os.read(reading, 1_000_000)
    finally:
        os.close(reading)
    whole = [b"report " + b"%d" % number * 5_000 for number in range(40)]
    *lines, last, end = received.split(b"\n")
    assert 3 < len(lines) < 40
    assert lines == whole[: len(lines)]
    assert (last, end) == (b"report later", b"")
    channel.tell("report", b"to nobody", patience=0.0)
    assert not channel.reports
    os.close(writing)


async def test_who_is_a_member_is_in_the_pipe_though_a_large_report_is_under_way() -> None:
    """K15"""
    heard: list[tuple[str, bytes]] = []
    ear, channel = Ear(lambda kind, value: heard.append((kind, value))), Channel()
    channel.attach(f"{ear.theirs} reports")
    report = b"x" * 500_000  # eight times what a pipe holds
    channel.tell("report", report, patience=0.0)
    channel.joined("group", "member")
    beating = asyncio.get_running_loop().run_in_executor(None, channel.tell, "beat", b"5")
    await until(beating.done)
    ear.listen()
    assert heard == [("report", report), ("members", b'{"group": "member"}'), ("beat", b"5")]
    assert ear.said("members") == {"group": "member"}
    os.close(ear.theirs)
    ear.close()


async def test_who_is_a_member_is_told_later_where_the_launcher_stands_still_and_nobody_waits() -> None:
    """K15: it may never change again, and the next beat is a second away."""
    heard: list[tuple[str, bytes]] = []
    ear, channel = Ear(lambda kind, value: heard.append((kind, value))), Channel()
    channel.attach(f"{ear.theirs} reports")
    for _ in range(40):  # far beyond what a pipe holds
        channel.tell("report", b"x" * 30_000, patience=0.0)
    channel.joined("group", "first")
    channel.joined("group", "second")
    ear.listen()
    assert ear.said("members") is None
    channel.tell("beat", b"5", patience=0.0)
    ear.listen()
    assert [kind for kind, _ in heard[-2:]] == ["members", "beat"]
    assert ear.said("members") == {"group": "second"}
    os.close(ear.theirs)
    ear.close()


async def test_the_launcher_hears_the_last_whole_line_also_of_a_worker_that_has_died() -> None:
    heard: list[tuple[str, bytes]] = []
    ear = Ear(lambda kind, value: heard.append((kind, value)))
    assert not os.get_blocking(ear.theirs)
    os.write(ear.theirs, b"report one\nbeat 5\nreport two\nreport thr")
    await until(lambda: heard == [("report", b"two"), ("beat", b"5")])
    os.write(ear.theirs, b"ee\nreport fo")
    os.close(ear.theirs)
    ear.close()
    assert heard[2:] == [("report", b"three"), ("end", b"")]


def test_totals_never_go_back_though_workers_die() -> None:
    crew = Fleet(2)
    for worker, number in ((0, 3), (1, 4)):
        crew.begun(worker)
        crew.told(worker, line(number))
    assert applied(crew) == 7

    crew.ended(0)
    assert applied(crew) == 7, "what a dead worker has told is kept"
    crew.begun(0)
    crew.told(0, line(1))
    crew.told(0, line(2))
    assert applied(crew) == 9, "and what the next one tells comes on top, once"

    crew.told(1, b'{"of another version":1}')
    crew.told(1, b"{torn")
    assert applied(crew) == 9
    crew.ended(1)
    sizes = crew.counts.of("take").sizes
    assert (sum(sizes.counts), sizes.sum) == (3, 9.0)
    assert crew.states == {"starting": 0, "consuming": 1, "draining": 0, "leaving": 0, "waiting": 0, "vacant": 1}


def test_parts_of_a_source_add_up_and_what_all_see_counts_once() -> None:
    crew = Fleet(2)
    for worker, behind in ((0, 3), (1, 4)):
        crew.begun(worker)
        lag = {"kafka:a": Lag(behind, 1.0 * behind, part=True), "sqs:b": Lag(behind, None)}
        crew.told(worker, line(0, lag=lag))
    assert crew.lag == {"kafka:a": Lag(7, 4.0, part=True), "sqs:b": Lag(4, None)}
