"""P9: who takes what waits begins where the first of it is, and nothing that may still come is in front of that."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, LiteralString

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg import sql

from idemconsumer.sql.queries import load
from idemconsumer.worker.retention import prune_once
from tests.support.ledger import SCHEMA, Ledger
from tests.support.logs import LogCapture
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database

NAMES = {"queue": "q", "delayed": "q", "outbox": "kafka:b", "outbox_due": ""}
OTHERS = NAMES | {"queue": "r", "outbox": "kafka:c"}
PUBLISH: Mapping[str, LiteralString] = {
    "queue": "select idemconsumer.publish_bytes('q', %s)",
    "delayed": "insert into idemconsumer.delayed (name, body, due_at)"
    " values ('q', %s, clock_timestamp() - interval '0.999 seconds')",  # a clock may be set back by a second
    "outbox": "select idemconsumer.publish_bytes('kafka:b', %s)",
    "outbox_due": "insert into idemconsumer.outbox (destination, body, due_at)"
    " values ('kafka:b', %s, clock_timestamp() - interval '0.999 seconds')",
}
# Of each line: its messages, and how many of them are in front of the low water.
THERE: Mapping[str, LiteralString] = {
    "queue": "select id, coalesce(moved, id) < idemconsumer.low_water_of('queue', name) from idemconsumer.queue",
    "delayed": "select id, due_at < to_timestamp(idemconsumer.low_water_of('delayed', name) / 1e6)"
    " from idemconsumer.delayed",
    "outbox": "select id, id < idemconsumer.low_water_of('outbox', destination) from idemconsumer.outbox"
    " where parked_at is null and (due_at is null or tries > 0)",
    "outbox_due": "select id, due_at < to_timestamp(idemconsumer.low_water_of('outbox_due', '') / 1e6)"
    " from idemconsumer.outbox where due_at is not null",
}
LOW: LiteralString = "select idemconsumer.low_water_of(%s, %s)"


@pytest.fixture
def ledger(database: str) -> Iterator[Ledger]:
    with closing(Ledger(database)) as ledger:
        yield ledger


def low(ledger: Ledger, line: str = "queue") -> int:
    ((low,),) = ledger.run(LOW, (line, NAMES[line]))
    return int(low)


def raised(ledger: Ledger, line: str = "queue", times: int = 2) -> int:
    for _ in range(times):
        ledger.run("select idemconsumer.raise_low_water(%s, %s)", (line, NAMES[line]))
    return low(ledger, line)


def passed(connection: psycopg.Connection[Any], line: str) -> list[int]:
    """Messages that are in front of the low water."""
    return [number for number, wrong in connection.execute(THERE[line]) if wrong]


DO = ["publish", "commit", "roll back", "take", "raise", "raise", "others"]
STEPS = st.lists(st.tuples(st.sampled_from(DO), st.integers(0, 2)), min_size=4, max_size=30)
TAKE: LiteralString = "delete from {0} where id = (select id from {0} order by id limit 1 offset %s)"
LATE = [
    ("publish", 0),
    ("publish", 1),
    ("commit", 1),
    ("raise", 0),
    ("take", 0),
    ("raise", 0),
    ("raise", 0),
    ("commit", 0),
]


@pytest.mark.parametrize("line", NAMES)
def test_nothing_that_is_there_or_may_still_come_is_in_front_of_it(ledger: Ledger, line: str) -> None:
    """Three transactions publish, one of them elsewhere, and end in any order, while others take, and raise it in
    between, and 300 numbers are of messages that are gone at once."""

    names = [NAMES[line], NAMES[line], OTHERS[line]]
    table = line.partition("_")[0]

    @settings(max_examples=15)
    @given(STEPS)
    @example(LATE)
    def check(steps: Sequence[tuple[str, int]]) -> None:
        for each in publishers:
            each.rollback()
        ledger.clear()
        for step, who in [*steps, *(("commit", each) for each in range(3)), ("raise", 0), ("raise", 0)]:
            if step == "publish":
                publishers[who].execute(PUBLISH[line].replace(NAMES[line] or "-", names[who] or "-"), (b"x",))
            elif step == "commit":
                publishers[who].commit()
            elif step == "roll back":
                publishers[who].rollback()
            elif step == "raise":
                ledger.run("select idemconsumer.raise_low_water(%s, %s)", (line, names[who]))
            elif step == "others":
                judge.execute("select nextval(%s) from generate_series(1, 300)", (f"idemconsumer.{table}_id_seq",))
            else:
                judge.execute(sql.SQL(TAKE).format(sql.Identifier(SCHEMA, table)), (who % 2,))
            assert passed(judge, line) == [], f"after {step} of {who}"

    with ExitStack() as stack:
        judge, *publishers = (stack.enter_context(closing(psycopg.connect(ledger.dsn))) for _ in range(4))
        judge.autocommit = True
        check()


def gone(ledger: Ledger, times: int, *, backlog: bool = False) -> None:
    """So many messages of each line, 300 at a time, are published and taken, and it is raised behind or before that."""
    for _ in range(times):
        ledger.run("insert into idemconsumer.queue (name, body) select 'q', 'x' from generate_series(1, 300)")
        if backlog:
            raised(ledger, "queue")
        ledger.run("delete from idemconsumer.queue")
        ledger.run(
            "insert into idemconsumer.delayed (name, body, due_at)"
            " select 'q', 'x', clock_timestamp() - interval '0.9 seconds' from generate_series(1, 300)"
        )
        ledger.run("delete from idemconsumer.delayed")
        ledger.run(
            "insert into idemconsumer.outbox (destination, body, due_at)"
            " select 'kafka:b', 'x', case when n % 2 = 0 then clock_timestamp() - interval '0.9 seconds' end"
            " from generate_series(1, 300) as n"
        )
        if backlog:
            raised(ledger, "outbox")
        ledger.run("delete from idemconsumer.outbox")
        for line in ["delayed", "outbox_due"] if backlog else NAMES:
            raised(ledger, line)


def pages(ledger: Ledger, name: str) -> int:
    """Which the statement reads where there is one message of each line."""
    given: dict[str, Any] = {
        "names": ["q"], "limits": [10], "bytes": 1_000_000, "most": 1_000_000, "visibility": 10.0, "taker": 0,
        "limit": 10, "queues": ["q", "outbox:"], "ahead": 5.0, "destination": "kafka:b",
    }  # fmt: skip
    ledger.run("select idemconsumer.publish_bytes('q', 'x'), idemconsumer.publish_bytes('kafka:b', 'x')")
    ledger.run("insert into idemconsumer.delayed (name, body, due_at) values ('q', 'x', clock_timestamp())")
    ledger.run("insert into idemconsumer.outbox (destination, body, due_at) values ('kafka:b', 'x', clock_timestamp())")
    explain = b"explain (analyze, buffers, costs off, timing off) " + load(SCHEMA)[name]
    with psycopg.connect(ledger.dsn, options="-c enable_seqscan=off") as connection:
        for _ in range(2):  # the first one reads what is known of functions, too
            plan = "\n".join(line for (line,) in connection.execute(explain, given))
            connection.rollback()
    ledger.run("delete from idemconsumer.queue")
    ledger.run("delete from idemconsumer.delayed")
    ledger.run("delete from idemconsumer.outbox")
    read = re.search(r"Buffers: shared hit=(\d+)(?: read=(\d+))?", plan)
    assert read is not None, plan
    return int(read[1]) + int(read[2] or 0)


STATEMENTS = [
    "take", "look_for_messages", "fall_due", "waiting", "status_queues", "measure_queues",
    "read_outgoing", "outbox_destinations", "fall_due_outgoing",
]  # fmt: skip


@pytest.mark.parametrize("backlog", [False, True])
def test_what_is_gone_costs_those_who_take_nothing_while_an_old_snapshot_is_open(ledger: Ledger, backlog: bool) -> None:
    """Whether it is raised where nothing waits, or where hundreds do, which gives the queue a low water of its own."""
    gone(ledger, 1)
    with psycopg.connect(ledger.dsn) as old:
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        fresh = {name: pages(ledger, name) for name in STATEMENTS}
        gone(ledger, 12, backlog=backlog)
        time.sleep(1.1)  # a due time counts as past once a clock that is set back by a second has it so
        for line in NAMES:
            raised(ledger, line)
        later = {name: pages(ledger, name) for name in STATEMENTS}
        ledger.run("analyze")  # of tables that are empty, so that each plan seems to cost nothing
        later |= {f"{name}, analyzed": pages(ledger, name) for name in STATEMENTS}

    fresh |= {f"{name}, analyzed": fresh[name] for name in STATEMENTS}
    assert {name: (fresh[name], pages) for name, pages in later.items() if pages > 2 * fresh[name] + 20} == {}
    assert low(ledger) > 3_600


def test_a_queue_without_messages_has_no_name_and_one_with_messages_has(ledger: Ledger) -> None:
    gone(ledger, 1)
    ledger.run("select idemconsumer.publish_bytes(each, 'x') from unnest(array['a', 'r', 'kafka:c', 'sqs:b']) as each")
    names = "select line, name from idemconsumer.line order by 1, 2"
    assert ledger.run(names) == [("outbox", "kafka:c"), ("outbox", "sqs:b"), ("queue", "a"), ("queue", "r")]

    ledger.run("select idemconsumer.publish_bytes(each, 'x') from unnest(array['q', 'kafka:b']) as each")
    assert [name for _, name in ledger.run(names)] == ["kafka:b", "kafka:c", "sqs:b", "a", "q", "r"]
    assert ledger.run("select * from idemconsumer.queue_waiting order by name") == [("a", 1), ("q", 1), ("r", 1)]


def test_what_is_gone_of_many_names_costs_nothing_either(ledger: Ledger) -> None:
    """A routing key for each user, each of whom has one message."""
    with psycopg.connect(ledger.dsn) as old:
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        counted = ["look_for_messages", "outbox_destinations", "status_queues"]
        fresh = {name: pages(ledger, name) for name in counted}
        for line, table, name in [("queue", "queue", "name"), ("outbox", "outbox", "destination")]:
            with psycopg.connect(ledger.dsn) as connection:
                for _ in range(2):
                    where = {"table": sql.Identifier(SCHEMA, table), "name": sql.Identifier(name)}
                    many = (
                        "insert into {table} ({name}, body) select 'sqs:' || random(), '' from generate_series(1, 3000)"
                    )
                    connection.execute(sql.SQL(many).format(**where))
                    connection.execute(sql.SQL("delete from {table}").format(**where))
                    connection.commit()
            for _ in range(2):
                ledger.run("select idemconsumer.raise_low_water(%s, 'sqs:1')", (line,))
        later = {name: pages(ledger, name) for name in counted}
    assert {name: (fresh[name], pages) for name, pages in later.items() if pages > 2 * fresh[name] + 20} == {}


@pytest.mark.parametrize("line", ["queue", "outbox"])
def test_one_that_keeps_its_messages_keeps_no_others_low_water(ledger: Ledger, line: str) -> None:
    with psycopg.connect(ledger.dsn, autocommit=True) as connection:
        other = PUBLISH[line].replace(NAMES[line], OTHERS[line])
        for _ in range(3):
            connection.execute(PUBLISH[line], (b"stays",))
        connection.execute(other + " from generate_series(1, 1500)", (b"x",))
        connection.execute(sql.SQL("delete from {} where body = 'x'").format(sql.Identifier(SCHEMA, line)))
        raised(ledger, line)
        assert (low(ledger, line), *connection.execute(LOW, (line, OTHERS[line]))) == (1, (1_504,))
        connection.execute(other + " from generate_series(1, 1500)", (b"x",))
        assert ledger.run("select name from idemconsumer.line order by 1") == [(NAMES[line],), (OTHERS[line],)]

        connection.execute(sql.SQL("delete from {}").format(sql.Identifier(SCHEMA, line)))
        raised(ledger, line)
        ledger.run("select idemconsumer.raise_low_water(%s, %s)", (line, OTHERS[line]))
        raised(ledger, line)
        assert ledger.run("select name, low from idemconsumer.low_water") == [("", 3_004)], (
            "none needs its own any more"
        )


def test_what_has_another_place_than_its_number_is_never_in_front(ledger: Ledger) -> None:
    """As what has been in hand for long has, of a queue that is otherwise empty."""
    ledger.run(PUBLISH["queue"], (b"in hand",))
    for _ in range(4):
        ledger.run("select nextval('idemconsumer.queue_id_seq') from generate_series(1, 300)")
        if low(ledger) == 1:
            ledger.run("update idemconsumer.queue set moved = nextval('idemconsumer.queue_id_seq')")
        for name in ["q", "r"]:
            ledger.run("select idemconsumer.raise_low_water('queue', %s)", (name,))
        assert ledger.run("select * from idemconsumer.queue_waiting") == [("q", 1)]
    assert low(ledger) > 300


async def test_the_full_look_finds_what_a_hand_has_put_in_front_of_it(ledger: Ledger, logged: LogCapture) -> None:
    gone(ledger, 1)
    ledger.run("alter table idemconsumer.queue disable trigger guarded")
    ledger.run("insert into idemconsumer.queue (id, name, body) overriding system value values (1, 'q', 'x')")
    ledger.run("select idemconsumer.publish_bytes('kafka:b', 'x')")
    await prune_once(ledger.dsn, SCHEMA)
    assert low(ledger) > 1
    assert ledger.run("select * from idemconsumer.queue_waiting") == []

    ledger.run("update idemconsumer.low_water set looked_at = looked_at - interval '2 hours'")
    await prune_once(ledger.dsn, SCHEMA)
    assert ledger.run("select * from idemconsumer.queue_waiting") == [("q", 1)]
    assert low(ledger, "outbox") > 1, "nothing is in front of it"
    assert any(entry["event"].startswith("messages below the low-water mark") for entry in logged.entries)


WAYS_BACK: Mapping[str, LiteralString] = {
    "restarted": "alter sequence idemconsumer.{0}_id_seq restart",
    "set by hand": "select setval('idemconsumer.{0}_id_seq', 1)",
    "truncated": "truncate idemconsumer.{0} restart identity",
}


@pytest.mark.parametrize("line", ["queue", "outbox"])
@pytest.mark.parametrize("way", WAYS_BACK)
def test_what_a_counter_that_was_set_back_numbers_is_in_front_of_nothing(ledger: Ledger, way: str, line: str) -> None:
    """Nor once it has passed again where it was."""
    gone(ledger, 2)
    assert raised(ledger, line) > 300
    with psycopg.connect(ledger.dsn) as hand:
        hand.execute(sql.SQL(WAYS_BACK[way]).format(sql.SQL(line)))
    with psycopg.connect(ledger.dsn, autocommit=True) as judge:
        for _ in range(3):
            judge.execute(PUBLISH[line] + " from generate_series(1, 300)", (b"x",))
            assert passed(judge, line) == []
            raised(ledger, line)
        assert passed(judge, line) == []


def test_numbers_that_a_session_has_got_in_advance_are_in_front_of_nothing(ledger: Ledger) -> None:
    """ALTER SEQUENCE … CACHE is anybody's, who wants to publish faster."""
    ledger.run("alter sequence idemconsumer.queue_id_seq cache 50")
    with psycopg.connect(ledger.dsn) as early, psycopg.connect(ledger.dsn, autocommit=True) as judge:
        early.execute(PUBLISH["queue"], (b"x",))
        early.commit()
        ledger.run(PUBLISH["queue"], (b"x",))
        ledger.run("delete from idemconsumer.queue")
        raised(ledger, times=1)
        early.execute(PUBLISH["queue"], (b"x",))
        raised(ledger, times=1)
        early.commit()
        assert passed(judge, "queue") == []


def test_a_copy_of_the_tables_has_no_low_water(ledger: Ledger, postgres18: PostgresServer) -> None:
    """As a logical replica, which has the rows of all tables, and no sequence."""
    gone(ledger, 2)
    assert low(ledger) > 300
    copied = ledger.run("select line, name, low, until, writers from idemconsumer.low_water")
    with fresh_database(postgres18.dsn) as dsn, closing(Ledger(dsn)) as replica:
        for row in copied:
            replica.run(
                "insert into idemconsumer.low_water (line, name, low, until, writers) values (%s, %s, %s, %s, %s)", row
            )
        replica.run("select idemconsumer.publish_bytes('q', 'x') from generate_series(1, 1000)")
        assert replica.run("select * from idemconsumer.queue_waiting") == [("q", 1_000)]
        replica.run("select idemconsumer.publish_bytes('another', 'x')")
        for name in ["another", "q"] * 4:
            replica.run("select idemconsumer.raise_low_water('queue', %s)", (name,))
        assert replica.run("select * from idemconsumer.queue_waiting where name = 'q'") == [("q", 1_000)]


@pytest.mark.parametrize("line", ["delayed", "outbox_due"])
def test_what_was_due_before_it_is_in_front_of_nothing(ledger: Ledger, line: str) -> None:
    """As where the clock was set back, or a hand has written another time."""
    raised(ledger, line)
    assert low(ledger, line) > 0
    ledger.run(PUBLISH[line], (b"x",))
    table = line.partition("_")[0]
    with psycopg.connect(ledger.dsn, autocommit=True) as hand:
        hand.execute(sql.SQL("update idemconsumer.{} set due_at = now() - interval '1 day'").format(sql.SQL(table)))
        for _ in range(4):
            assert passed(hand, line) == []
            raised(ledger, line, times=1)


def test_what_was_refused_keeps_it_and_what_was_delayed_or_parked_comes_behind(ledger: Ledger) -> None:
    """X5: what was refused is sent again in its place, so that is in front of nothing."""
    states = ["due_at = now() - interval '1 hour', tries = 1", "parked_at = now(), tries = 8", "due_at = now()"]
    numbers = []
    for state in states:
        ((number,),) = ledger.run("select idemconsumer.publish_bytes('kafka:b', 'x')")
        ledger.run(f"update idemconsumer.outbox set {state} where due_at is null and parked_at is null")
        numbers.append(number)
    assert raised(ledger, "outbox") == numbers[0]

    given = {"destination": "kafka:b", "limit": 10, "bytes": 1_000_000, "ids": [numbers[1]], "key": None, "error": None,
             "since": None, "parked": True}  # fmt: skip
    with psycopg.connect(ledger.dsn, autocommit=True) as connection:
        connection.execute("delete from idemconsumer.outbox where id = %s", (numbers[0],))
        low = raised(ledger, "outbox")
        assert low > numbers[2]
        connection.execute(load(SCHEMA)["retry_outgoing"], given)
        connection.execute(load(SCHEMA)["fall_due_outgoing"], given)
        assert [row[0] >= low for row in connection.execute(load(SCHEMA)["read_outgoing"], given)] == [True, True]
