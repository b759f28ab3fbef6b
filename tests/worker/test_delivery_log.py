"""The delivery log: what became of each delivery, for `explain` (O22, O23)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest

from idemconsumer import App, ConfigurationError, Message, Reject, Saga, StoreUnavailable, Tx
from idemconsumer.admin.stored_keys import KeyDetail, Keys
from idemconsumer.ports.observer import Point
from idemconsumer.stores.columns import LoggedDeliveries
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.worker.retention import prune_once
from tests.support.logs import LogCapture, times
from tests.support.servers.made import PrivatePgBouncer
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE
from tests.support.workers import SCHEMA, Bench, Item, note

UNWRITTEN = "the delivery log cannot be written, messages run without it"


class Service:
    def __init__(self, **options: Any) -> None:
        self.app = App("shop")
        self.act: Callable[[Message], object] = lambda _: None
        # The server adds to each time what its statement was under way, by which two attempts may change places.
        options = {"backoff": "200ms, 200ms", "max_attempts": 2, **options}

        @self.app.idempotent_handler("memory:q", key="id", **options)
        async def take(item: Item, tx: Tx, message: Message) -> None:
            await note(tx, item)
            self.act(message)


def fail_once(message: Message) -> None:
    if message.attempt == 1:
        raise ValueError("Ann is wrong")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, delivery_log_pause=0.0, delivery_log_farewell=PATIENCE)


@pytest.fixture(autouse=True)
def logs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers keep it for a day, unless the test says otherwise."""
    settings = bench.settings
    monkeypatch.setattr(bench, "settings", lambda **given: settings(**{"delivery_log": "1d", **given}))


async def explained(bench: Bench, key: str = "a") -> KeyDetail:
    known = Keys(bench.dsn, SCHEMA)
    return await known.explain(await known.find(handler="take", key=key))


async def told(bench: Bench, key: str = "a") -> list[str]:
    """The oldest first."""
    return [each.outcome for each in reversed((await explained(bench, key)).deliveries)]


def rows(bench: Bench) -> int:
    return int(bench.do("select count(*) from idemconsumer.delivery_log")[0][0])


async def test_each_delivery_is_told_with_its_outcome_place_worker_and_attempt(bench: Bench) -> None:
    service = Service()
    service.act = fail_once
    await bench.publish("q", Item("a"), Item("b"))
    await bench.until_empty(service.app)
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    detail = await explained(bench)
    found = [(each.outcome, each.attempt, each.place) for each in reversed(detail.deliveries)]
    assert found == [
        ("retrying: ValueError", 1, "memory:q q#1"), ("applied", 2, "memory:q q#1"), ("duplicate", 1, "memory:q q#3")
    ]  # fmt: skip
    assert all(each.worker.endswith(f" {os.getpid()}") and each.seconds >= 0 for each in detail.deliveries)
    events = [event for event in detail.timeline if event.what.startswith("delivery ")]
    assert [event.what.removeprefix("delivery ") for event in events] == [outcome for outcome, _, _ in found]
    assert "Ann" not in repr(detail.deliveries)


async def test_what_ends_without_a_groups_commit_is_there_too(bench: Bench) -> None:
    service = Service()

    def act(message: Message) -> None:
        if message.key == "refused":
            raise Reject("no_funds")
        if message.key == "broken":
            raise ValueError

    service.act = act
    for _ in range(2):
        await bench.publish("q", Item("refused"), Item("broken"), Item("fine"))
        await bench.until_empty(service.app)
    await bench.publish("q", Item("fine", "other"))
    await bench.until_empty(service.app)
    assert await told(bench, "refused") == ["failed: no_funds", "duplicate of failed"]
    assert await told(bench, "broken") == [
        "retrying: ValueError", "dead: attempts_exhausted", "dead: attempts_exhausted"
    ]  # fmt: skip
    assert await told(bench, "fine") == ["applied", "duplicate", "conflict"]


async def test_what_is_applied_is_logged_in_its_own_commit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the rest is lost with its process, or where the database is away: nothing else is."""

    async def away(self: PostgresStore, rows: Sequence[LoggedDeliveries]) -> None:
        raise StoreUnavailable("it is away")

    monkeypatch.setattr(PostgresStore, "log_deliveries", away)
    service, seen = Service(), list[int]()
    await bench.publish("q", Item("a"), Item("b"), Item("a"))
    async with bench.running(service.app) as running:
        running.points.on(Point.COMMITTED, lambda: seen.append(rows(bench)))
        await running.until_count(applied=2, duplicate=1)
    assert seen[0] >= 1
    assert (await told(bench, "a"), await told(bench, "b")) == (["applied"], ["applied"])


async def test_a_transaction_that_is_not_committed_logs_nothing(bench: Bench) -> None:
    """The trigger refuses its COMMIT, after the row was written."""
    bench.do(
        "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;"
        "create constraint trigger refused after insert on effect deferrable initially deferred for each row"
        " execute function refuse()"
    )
    service = Service(max_attempts=1)
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    assert await told(bench) == ["dead: attempts_exhausted"]


@pytest.mark.parametrize(
    "trouble",
    [
        "lock table idemconsumer.delivery_log in access exclusive mode",
        "lock table idemconsumer.delivery_log in share mode",
    ],
)
async def test_a_log_that_cannot_be_written_costs_no_message_anything(
    bench: Bench, logged: LogCapture, trouble: str
) -> None:
    service = Service()
    async with bench.running(service.app) as running:
        with psycopg.connect(bench.dsn) as holder:
            holder.execute(trouble.encode())
            await bench.publish("q", Item("a"))
            await running.until_count(applied=1)
            await bench.publish("q", Item("b"), Item("a"))
            await running.until_count(applied=2, duplicate=1)
        await bench.publish("q", Item("c"))
        await running.until_count(applied=3)
    assert bench.effects() == ["a", "b", "c"]
    assert (times(logged, UNWRITTEN), times(logged, "handler failed")) == (1, 0)
    assert await told(bench, "c") == ["applied"]


async def test_one_that_is_gone_or_full_is_no_failure_either(bench: Bench, logged: LogCapture) -> None:
    service = Service()
    async with bench.running(service.app) as running:
        bench.do("alter table idemconsumer.delivery_log add constraint full_disk check (false) not valid")
        await bench.publish("q", Item("a"))
        await running.until_count(applied=1)
        bench.do("drop table idemconsumer.delivery_log")
        await bench.publish("q", Item("b"))
        await running.until_count(applied=2)
    assert (bench.effects(), times(logged, UNWRITTEN)) == (["a", "b"], 1)


async def test_only_who_asks_for_it_is_logged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("shop")

    @app.idempotent_handler("memory:q", key="id")
    async def take(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await bench.publish("q", Item("b"))
    await bench.until_empty(app, delivery_log=None)
    assert rows(bench) == 0
    await bench.publish("q", Item("c"))
    await bench.until_empty(app, delivery_log="2h")
    assert bench.do("select extract(epoch from until - at)::int from idemconsumer.delivery_log") == [(7200,)]
    with pytest.raises(ConfigurationError, match="settings: `delivery_log`: 'soon' is not a duration"):
        app.worker(bench.settings(delivery_log="soon"))

    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    monkeypatch.setenv("IDEMCONSUMER_DELIVERY_LOG", "1d")
    for _ in range(2):
        await app.process(Message("memory:q", b'{"id": "d"}', position="7"))
    await app.close()
    assert await told(bench, "d") == ["applied", "duplicate"]


async def test_of_a_saga_deliveries_are_logged_and_no_attempts(bench: Bench) -> None:
    app = App("shop")

    @app.idempotent_handler("memory:q", key="id", backoff="1ms, 1ms")
    async def take(item: Item, saga: Saga) -> None:
        if item.id == "a" and not bench.effects():
            bench.do("insert into effect (id) values ('a')")
            raise ValueError

    await bench.publish("q", Item("a"), Item("b"))
    async with bench.running(app) as running:
        await running.until(lambda: bench.do("select count(*) from idemconsumer.record where state = 3") == [(2,)])
        await bench.publish("q", Item("a"))
        await running.until_count(duplicate=1)
    assert await told(bench, "a") == ["retrying: ValueError", "duplicate"]
    assert await told(bench, "b") == ["applied"]


async def test_a_key_is_forgotten_in_the_log_and_its_neighbours_are_not(bench: Bench) -> None:
    service = Service(group_size=8)
    await bench.publish("q", Item("a"), Item("b"))
    await bench.until_empty(service.app)
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    known = Keys(bench.dsn, SCHEMA)
    key = await known.find(handler="take", key="a")
    await known.forget(key, by="ann")
    assert (await told(bench, "a"), await told(bench, "b")) == ([], ["applied"])
    left = "select string_agg(positions, e'\\n' order by until) from idemconsumer.delivery_log"
    assert bench.do(left)[0][0].split("\n") == ["", "q#2", ""]


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_key_is_forgotten_there_whatever_limit_the_role_has(
    bench: Bench, private_pgbouncer: PrivatePgBouncer, pooled: bool
) -> None:
    """The whole log is read for it, and the limit of the role is meant for workers."""
    await bench.publish("q", Item("a"))
    await bench.until_empty(Service(group_size=8).app)
    bench.do("create table seen (its text)")
    bench.do(
        "create function see() returns trigger language plpgsql as $$ begin"
        " insert into seen values (current_setting('statement_timeout')); return new; end $$"
    )
    bench.do("create trigger see before update on idemconsumer.delivery_log for each row execute function see()")
    for setting in ("statement_timeout = 35000", "idle_in_transaction_session_timeout = 30000", "lock_timeout = 10000",
                    "client_connection_check_interval = 5000", "default_transaction_read_only = on"):  # fmt: skip
        bench.do(f"do $$ begin execute format('alter database %I set {setting}', current_database()); end $$")
    known = Keys(private_pgbouncer(bench.dsn, "transaction").dsn if pooled else bench.dsn, SCHEMA)
    await known.forget(await known.find(handler="take", key="a"), by="ann")
    assert bench.do("select its from seen") == [("10min",)]


async def test_rows_go_when_their_time_is_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prune_once.__globals__["_LIMITS"], "prune_deliveries", 1)
    await bench.publish("q", Item("a"), Item("b"), Item("a"))
    await bench.until_empty(Service(group_size=1).app)
    await bench.publish("q", Item("c"))
    await bench.until_empty(Service().app, delivery_log="2d")
    before = rows(bench)

    async def prune() -> None:
        # A worker that left in its pass is waited for.
        bench.do("update idemconsumer.upkeep set by = null, until = '-infinity'")
        await prune_once(bench.dsn, SCHEMA)

    await prune()
    assert rows(bench) == before >= 3
    bench.do("update idemconsumer.delivery_log set until = until - interval '25 hours'")
    await prune()
    assert (rows(bench), await told(bench, "a"), await told(bench, "c")) == (1, [], ["applied"])
