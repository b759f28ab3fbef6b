"""A message whose next attempt is due later is stored, settled, and run by any worker when it is due (D18 to D20)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from idemconsumer import App, Backoff, Batch, Message, Reject, Retry, Tx
from idemconsumer.cli.inspect import findings
from idemconsumer.errors import CommitUnknown
from idemconsumer.handlers.arguments import Duration
from idemconsumer.ports.broker import Outgoing
from idemconsumer.ports.observer import Point
from idemconsumer.rules.values import OutcomeKind, State
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.worker.retention import prune_once
from tests.support.inside import in_memory
from tests.support.workers import SCHEMA, Bench, Item, body, note
from tests.worker.crashes import payment, work
from tests.worker.crashing_worker import PAYMENTS


class Service:
    """A handler that does what `act` says, and remembers what it was given."""

    def __init__(self, act: Callable[[Message], object] = lambda _: None, **options: Any) -> None:
        self.app = App("later")
        self.act = act
        self.seen: list[Message] = []
        options = {"backoff": "1h, 1h", "key": "id", **options}

        @self.app.idempotent_handler("memory:q", **options)
        async def handle(item: Item, tx: Tx, message: Message) -> None:
            await note(tx, item)
            self.seen.append(message)
            self.act(message)


def failing(times: int, after: Duration | None = None) -> Callable[[Message], object]:
    def act(message: Message) -> None:
        if message.attempt <= times:
            raise Retry("not yet", after=after) if after is not None else ValueError("not yet")

    return act


def fall_due(bench: Bench) -> None:
    """The time until then."""
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")


def states(bench: Bench) -> list[State]:
    return [State(state) for (state,) in bench.do("select state from idemconsumer.record order by changed_at")]


def rows(bench: Bench) -> tuple[int, int, int]:
    """How many messages are delayed, in the queue, and on record as tried."""
    ((delayed,),) = bench.do("select count(*) from idemconsumer.delayed")
    ((queued,),) = bench.do("select count(*) from idemconsumer.queue")
    ((tried,),) = bench.do("select count(*) from idemconsumer.attempt")
    return delayed, queued, tried


async def test_it_is_stored_with_its_attempt_then_settled_then_run_by_another_worker(bench: Bench) -> None:
    service = Service(failing(1))
    await bench.broker.publish("q", [Outgoing(body(Item("a")), {"n": "v", "empty": ""}, "m-1")])
    worker = await bench.until_empty(service.app)
    assert worker.counts == {"retrying": 1}
    assert not in_memory(bench.broker, "q"), "settled"
    assert (states(bench), rows(bench), bench.attempts()) == ([State.PENDING], (1, 0, 1), 1)
    assert bench.do("select due_at - now() between interval '44m' and interval '1h' from idemconsumer.delayed") == [
        (True,)
    ]
    await bench.until_empty(service.app)
    assert len(service.seen) == 1, "not due"

    fall_due(bench)
    worker = await bench.until_empty(service.app)
    assert worker.counts == {"applied": 1}
    first, second = service.seen
    assert second == replace(first, attempt=2), "with everything that its broker delivered"
    assert (bench.effects(), states(bench), rows(bench)) == (["a"], [State.COMPLETED], (0, 0, 0))


async def test_a_duplicate_that_arrives_meanwhile_is_settled_and_runs_nothing(bench: Bench) -> None:
    service = Service(failing(1))
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    await bench.publish("q", Item("a"), Item("a", entity="another payload"))
    worker = await bench.until_empty(service.app)
    assert worker.counts == {"duplicate": 1, "conflict": 1}
    assert (len(service.seen), states(bench), rows(bench)) == (1, [State.PENDING], (1, 0, 1))

    fall_due(bench)
    await bench.publish("q", Item("a"))  # in the same worker, perhaps in the same group
    await bench.until_empty(service.app)
    assert (bench.effects(), len(service.seen), rows(bench)) == (["a"], 2, (0, 0, 0))


async def test_the_last_attempt_ends_as_one_letter_the_same_as_from_its_broker(bench: Bench) -> None:
    service = Service(failing(99), max_attempts=3)
    await bench.publish("q", Item("a"))
    for _ in range(3):
        await bench.until_empty(service.app)
        fall_due(bench)
    assert [message.attempt for message in service.seen] == [1, 2, 3]
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    letters = bench.do("select source, position, reason, attempts, arrivals from idemconsumer.dead_letter")
    assert letters == [("memory:q", "q#1", "attempts_exhausted", 3, 2)]
    assert (bench.effects(), states(bench), rows(bench)) == ([], [State.DEAD], (0, 0, 0))


async def test_it_may_be_rejected_at_last(bench: Bench) -> None:
    def act(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError
        raise Reject("no")

    service = Service(act)
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    fall_due(bench)
    assert (await bench.until_empty(service.app)).counts == {"failed": 1}
    assert (bench.effects(), states(bench), rows(bench)) == ([], [State.FAILED], (0, 0, 0))


@pytest.mark.parametrize("order", [None, "entity"])
async def test_a_retry_that_is_longer_than_can_be_held_is_kept_wherever_others_wait(
    bench: Bench, order: str | None
) -> None:
    def act(message: Message) -> None:
        if b'"a"' in message.body and message.attempt == 1:
            raise Retry(after="3d")

    service = Service(act, backoff="10ms, 10ms", order_by=order)
    await bench.publish("q", Item("a", "e"), Item("b", "e"))
    await bench.until_empty(service.app)
    assert (bench.effects(), rows(bench)) == (["b"], (1, 0, 1)), "what is behind it goes on"
    assert bench.do("select due_at > now() + interval '71h' from idemconsumer.delayed") == [(True,)]
    fall_due(bench)
    await bench.until_empty(service.app)
    assert (bench.effects(), rows(bench)) == (["b", "a"], (0, 0, 0))


async def test_short_pauses_are_made_unsettled(bench: Bench) -> None:
    service = Service(failing(1, after="10ms"))
    await bench.publish("q", Item("a"))
    worker = await bench.until_empty(service.app)
    assert worker.counts == {"retrying": 1, "applied": 1}
    assert bench.do("select nextval('idemconsumer.queue_id_seq')") == [(1,)], "no row was made"


async def test_of_a_group_each_failed_one_is_stored_and_the_others_are_applied(bench: Bench) -> None:
    failed = {"3", "4", "9"}

    def act(message: Message) -> None:
        if message.attempt == 1 and any(f'"{name}"'.encode() in message.body for name in failed):
            raise ValueError

    service = Service(act, group_size=8)
    await bench.publish("q", *(Item(str(n)) for n in range(12)))
    worker = await bench.until_empty(service.app, concurrency=1)
    assert worker.counts == {"applied": 9, "retrying": 3}
    assert (rows(bench), bench.attempts()) == ((3, 0, 3), 3)
    fall_due(bench)
    await bench.until_empty(service.app)
    assert sorted(map(int, bench.effects())) == list(range(12))
    assert rows(bench) == (0, 0, 0)


async def test_items_of_a_batch_are_stored_one_by_one(bench: Bench) -> None:
    app = App("later")

    @app.idempotent_handler("memory:q", key="id", group_size=8)
    async def store(items: Batch[Item], tx: Tx) -> None:
        for i, item in enumerate(items):
            await note(tx, item)
            if item.id == "b" and items.message(i).attempt == 1:
                items.retry(i, "3d")

    await bench.publish("q", Item("a"), Item("b"), Item("c"))
    await bench.until_empty(app)
    assert (sorted(bench.effects()), rows(bench)) == (["a", "c"], (1, 0, 1))
    fall_due(bench)
    await bench.until_empty(app)
    assert (sorted(bench.effects()), rows(bench)) == (["a", "b", "c"], (0, 0, 0))


async def test_after_another_deploy_its_record_is_still_its_own(bench: Bench) -> None:
    await bench.publish("q", Item("a", "e"), b'{"id": "b", "entity": "e2"}')
    await bench.until_empty(Service(failing(1)).app)
    fall_due(bench)

    def fussy(body: bytes, message: Message) -> object:
        if b'"b"' in body:
            raise ValueError("cannot be read any more")
        return {"id": "a", "entity": "e"}

    other = App("later")

    @other.idempotent_handler("memory:q", key="entity", decode=fussy)
    async def handle(item: dict[str, str], tx: Tx) -> None:
        await note(tx, Item(item["id"]))

    await bench.until_empty(other)
    assert (bench.effects(), rows(bench)) == (["a"], (0, 0, 0))
    assert sorted(states(bench)) == [State.COMPLETED, State.DEAD], "no record waits for what never comes"
    assert bench.do("select reason, source from idemconsumer.dead_letter") == [("undecodable", "memory:q")]


async def test_a_delivery_that_is_anothers_by_now_stores_nothing(bench: Bench) -> None:
    taken = "update idemconsumer.queue set token = nextval('idemconsumer.queue_token'), visible_at = 'infinity'"

    def act(message: Message) -> None:
        if message.attempt == 2:  # as if it had been hidden for too long, and were taken by another worker
            bench.do(taken)
        raise ValueError

    service = Service(act)
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    fall_due(bench)
    async with bench.running(service.app) as running:
        await running.until_count(fenced=1)
    assert (states(bench), rows(bench), bench.attempts()) == ([State.PENDING], (0, 1, 1), 1)


async def test_a_lost_answer_leaves_one_row_and_one_attempt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    put_off, calls = PostgresStore.put_off, []

    async def lost(*args: Any) -> object:
        stored = await put_off(*args)
        calls.append(stored)
        raise CommitUnknown("as if the answer had been lost")

    service = Service(failing(2))
    await bench.publish("q", Item("a"))
    for attempt, outcome in ((1, "duplicate"), (2, "fenced")):
        monkeypatch.setattr(PostgresStore, "put_off", once(lost, put_off))
        worker = await bench.until_empty(service.app)
        assert worker.counts == {outcome: 1}
        assert (calls, rows(bench), bench.attempts()) == (list(range(1, attempt + 1)), (1, 0, 1), attempt)
        fall_due(bench)
    await bench.until_empty(service.app)
    assert (bench.effects(), rows(bench)) == (["a"], (0, 0, 0))


def once(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    left = [first]
    return lambda *args: (left.pop() if left else then)(*args)


async def test_retention_spares_the_attempts_of_what_is_pending(bench: Bench) -> None:
    service = Service(failing(1), retain="1d")
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    for table in ("attempt", "record"):
        bench.do(f"update idemconsumer.{table} set changed_at = now() - interval '30 days'")
    await prune_once(bench.dsn, SCHEMA)
    assert (states(bench), bench.attempts()) == ([State.PENDING], 1)


async def test_check_says_how_many_wait_and_until_when(bench: Bench) -> None:
    service = Service(failing(1))
    await bench.publish("q", Item("a"), Item("b"))
    await bench.until_empty(service.app)
    found = [each.text async for each in findings(service.app, bench.settings()) if each.subject == "handler handle"]
    assert any(text.startswith("2 messages wait for their next attempt, the first one until 2") for text in found)


async def test_without_a_worker_nothing_is_stored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    service = Service(failing(1, after="3d"))
    message = Message("memory:q", body(Item("a")))
    outcome = await service.app.process(message)
    assert (outcome.kind, outcome.due, outcome.state) == (OutcomeKind.RETRYING, 3 * 86_400.0, None)
    assert rows(bench) == (0, 0, 1)
    assert (await service.app.process(message)).kind is OutcomeKind.APPLIED
    await service.app.close()


async def test_of_growing_pauses_the_short_ones_are_made_unsettled_and_in_order_the_long_ones_are_stored(
    bench: Bench,
) -> None:
    def act(message: Message) -> None:
        if b'"a"' in message.body and message.attempt <= 3:
            raise ValueError

    service = Service(act, backoff=Backoff(0.01, 100.0, 3_600.0), order_by="entity")
    await bench.publish("q", Item("a", "e"), Item("b", "e"))
    worker = await bench.until_empty(service.app)
    assert worker.counts == {"retrying": 3, "applied": 1}
    tried = [(message.position, message.attempt) for message in service.seen]
    assert tried == [("q#1", 1), ("q#1", 2), ("q#1", 3), ("q#2", 1)], "after 10 ms, and 1 s; then it is due in 100 s"
    assert (bench.effects(), rows(bench), bench.attempts()) == (["b"], (1, 0, 1), 3)
    fall_due(bench)
    await bench.until_empty(service.app)
    assert (bench.effects(), rows(bench)) == (["b", "a"], (0, 0, 0))


def test_its_queue_is_nobody_elses() -> None:
    (handler,) = Service().app.bound_handlers(Settings())
    assert handler.retry_source not in (handler.own_source, *(each.source for each in handler.subscriptions))
    assert handler.retry_source.startswith("postgres:~~"), "no name of an app begins with ~, so it is nobody else's"


# Of one message that fails once: where it is stored and not settled; settled; run, and not committed; committed and not
# settled. And from which worker on it is killed there.
CRASHES = [
    (Point.ATTEMPT_COUNTED, 1),
    (Point.SETTLED, 1),
    (Point.CLAIMED, 2),
    (Point.SEALING, 1),
    (Point.COMMITTED, 1),
]


@pytest.mark.kill
@pytest.mark.parametrize(("point", "worker"), CRASHES)
def test_a_crash_at(bench: Bench, point: Point, worker: int) -> None:
    dsn, scheduled = bench.dsn, {"IDEMCONSUMER_SCHEMA": SCHEMA, "CRASH_SCHEDULED": "1"}
    bench.do("drop table effect")
    bench.do("create table effect (id text, amount int)")
    bench.do("select idemconsumer.publish_bytes(%s, %s)", PAYMENTS, payment("flaky-1"))
    crashed = False
    for number in range(1, 5):  # each leaves what is not due
        crash = () if crashed or number < worker else (f"{point}:1",)
        crashed = work(dsn, *crash, **scheduled) == -signal.SIGKILL or crashed
        bench.do("update idemconsumer.queue set visible_at = clock_timestamp()")
        fall_due(bench)
        if crashed and rows(bench) == (0, 0, 0):
            break
    assert crashed, "the scenario never came to this point"
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select id from effect").fetchall() == [("flaky-1",)]
    assert (states(bench), rows(bench)) == ([State.COMPLETED], (0, 0, 0))
    assert bench.do("select 1 from idemconsumer.dead_letter") == []
