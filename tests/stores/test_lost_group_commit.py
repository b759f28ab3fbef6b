"""COMMIT was sent and its answer never came. What it did is found out, and nothing is done twice (J4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import Message, Reject, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import Outcome, State
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, SOURCE, Ledger, OpenStore, kinds, work, works
from tests.support.logs import LogCapture, times
from tests.support.servers.proxy import LAST_WORDS, READY_FOR_QUERY, Proxy, Trap
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.usefixtures("both_ways")

Cut = Literal["before", "after"]
DONE = b"COMMIT\x00"  # what the server says of it

before_and_after = pytest.mark.parametrize("cut", ["before", "after"])


class CutCommitAt:
    """Observer: springs a trap for the COMMIT that follows the given point, or for each one of several messages."""

    def __init__(self, proxy: Proxy) -> None:
        self.point: Point | None = None
        self.cut: Cut = "before"
        self.trap: Trap | None = None
        self.cut_groups = False
        self.groups: list[int] = []
        self._proxy = proxy

    def arm(self, point: Point, cut: Cut) -> None:
        self.point, self.cut = point, cut

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        if point is self.point:
            self.point, self.trap = None, self._proxy.cut_at(mode=self.cut)
        if self.cut_groups and point is Point.SEALING and len(keys) > 1:
            self.groups.append(len(keys))
            self._proxy.cut_at(mode="before")

    def assert_sprung(self) -> None:
        assert self.trap is not None, "the point was never reached"
        assert self.trap.sprung.is_set(), "no COMMIT followed"


@pytest.fixture
async def proxy(ledger: Ledger) -> AsyncIterator[Proxy]:
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:
        yield proxy


@pytest.fixture
def observer(proxy: Proxy) -> CutCommitAt:
    return CutCommitAt(proxy)


@pytest.fixture
async def engine(ledger: Ledger, proxy: Proxy, observer: CutCommitAt, open_store: OpenStore) -> Engine:
    """An engine behind the proxy, which has seen its scopes: their commit comes first and is not meant."""
    store = await open_store(make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port))
    engine = Engine(store, observer)
    for handler in (pay, refuse, fail, fail_second, fail_once):
        await engine.run(works(handler, "first"))
    ledger.clear()
    return engine


async def until_decided(engine: Engine, given: Work) -> Outcome:
    """As a lane does it: while nothing can be decided, and while there is another attempt."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                outcome = await engine.process(given)
            except StoreUnavailable:
                continue
            if outcome.kind not in ("retrying", "busy"):
                return outcome


@idempotent_handler(SOURCE, key="id", group_size=8)
async def pay(order: dict[str, Any], tx: Tx) -> dict[str, Any]:
    await tx.execute("insert into witness (id) values (%s)", (order["id"],))
    return {"paid": order["id"]}


@idempotent_handler(SOURCE, key="id")
async def refuse(order: dict[str, Any], tx: Tx) -> None:
    await tx.execute("insert into witness (id) values (%s)", (order["id"],))
    raise Reject("no_funds", {"short": 3})


@idempotent_handler(SOURCE, key="id", max_attempts=1)
async def fail(order: dict[str, Any], tx: Tx) -> None:
    await tx.execute("insert into witness (id) values (%s)", (order["id"],))
    raise RuntimeError


@idempotent_handler(SOURCE, key="id", group_size=8)
async def fail_second(order: dict[str, Any], tx: Tx) -> None:
    await tx.execute("insert into witness (id) values (%s)", (order["id"],))
    if order["id"] == "2":
        raise RuntimeError


@idempotent_handler(SOURCE, key="id")
async def fail_once(order: dict[str, Any], tx: Tx, message: Message) -> None:
    await tx.execute("insert into witness (id) values (%s)", (order["id"],))
    if message.attempt == 1:
        raise RuntimeError


@before_and_after
@pytest.mark.parametrize("size", [1, 5])
async def test_a_group_whose_commit_is_unknown_is_applied_once(
    ledger: Ledger, engine: Engine, observer: CutCommitAt, cut: Cut, size: int
) -> None:
    ids = [f"{n}" for n in range(size)]
    observer.arm(Point.SEALING, cut)

    async with asyncio.timeout(PATIENCE):
        outcomes = await engine.run(works(pay, *ids))

    observer.assert_sprung()
    assert kinds(outcomes) == ["applied" if cut == "before" else "duplicate"] * size
    assert [outcome.result for outcome in outcomes] == [b'{"paid":"%s"}' % id.encode() for id in ids]
    assert ledger.effects == ids
    assert ledger.states == [State.COMPLETED] * size


@pytest.mark.parametrize("size", [1, 5])
async def test_last_words_right_behind_a_commit_are_the_failure_of_none(
    ledger: Ledger, proxy: Proxy, engine: Engine, logged: LogCapture, size: int
) -> None:
    """B5: a session that somebody ends says so in the place of what is still to come, which may be a Sync's answer."""
    ids = [f"{n}" for n in range(size)]
    trap = proxy.cut_at(mode="after", answer=DONE + READY_FOR_QUERY, instead=DONE + LAST_WORDS)

    async with asyncio.timeout(PATIENCE):
        outcomes = await engine.run(works(pay, *ids))

    assert trap.sprung.is_set()
    assert times(logged, "commit unknown, claiming again")
    assert not times(logged, "handler failed")
    assert kinds(outcomes) == ["duplicate"] * size
    assert ledger.effects == ids
    assert ledger.states == [State.COMPLETED] * size


async def test_a_group_whose_commit_is_lost_again_and_again_is_halved_until_it_goes_through(
    ledger: Ledger, engine: Engine, observer: CutCommitAt
) -> None:
    """It may be the group itself that takes so long that the server ends its transaction."""
    observer.cut_groups = True

    async with asyncio.timeout(PATIENCE):
        outcomes = await engine.run(works(pay, *range(4)))

    # Of the two that come next the second may still be claimed by the session that was cut: then one is left of them.
    assert observer.groups in ([4, 4, 2], [4, 4])
    assert kinds(outcomes) == ["applied"]
    assert ledger.effects == ["0"]


@before_and_after
async def test_a_failure_that_was_to_be_counted_with_what_came_before_it_counts_once(
    ledger: Ledger, engine: Engine, observer: CutCommitAt, cut: Cut
) -> None:
    observer.arm(Point.SEALING, cut)  # the group that fails never gets there

    outcomes = await engine.run(works(fail_second, "1", "2"))

    observer.assert_sprung()
    assert kinds(outcomes) == ["applied" if cut == "before" else "duplicate", "retrying"]
    assert (outcomes[1].attempt, ledger.attempts, ledger.effects) == (1, [1], ["1"])


@before_and_after
async def test_a_rejection_whose_commit_is_unknown_is_stored_once(
    ledger: Ledger, engine: Engine, observer: CutCommitAt, cut: Cut
) -> None:
    observer.arm(Point.REJECTING, cut)

    outcome = await until_decided(engine, *works(refuse, 1))

    observer.assert_sprung()
    assert outcome.kind == ("failed" if cut == "before" else "duplicate")
    assert (outcome.state, outcome.result) == (State.FAILED, b'{"code":"no_funds","body":{"short":3}}')
    assert (ledger.effects, ledger.states) == ([], [State.FAILED])


@before_and_after
async def test_a_dead_letter_whose_commit_is_unknown_is_one_letter(
    ledger: Ledger, engine: Engine, observer: CutCommitAt, cut: Cut
) -> None:
    observer.arm(Point.DEAD_LETTERING, cut)

    outcome = await until_decided(engine, *works(fail, 1))

    observer.assert_sprung()
    assert outcome.kind == "dead"
    assert (ledger.effects, ledger.states) == ([], [State.DEAD])
    assert [reason for reason, _ in ledger.letters] == ["attempts_exhausted"]


@before_and_after
async def test_an_undecodable_message_whose_letter_is_unknown_is_one_letter(
    ledger: Ledger, engine: Engine, observer: CutCommitAt, cut: Cut
) -> None:
    observer.arm(Point.DEAD_LETTERING, cut)

    outcome = await until_decided(engine, work(pay.plan.bind("shop"), Message(SOURCE, b"\xff")))

    observer.assert_sprung()
    assert outcome.kind == "dead"
    assert [reason for reason, _ in ledger.letters] == ["undecodable"]


@before_and_after
@pytest.mark.parametrize("suspect", [False, True], ids=["after its failure", "before its run"])
async def test_a_message_whose_counted_attempt_is_unknown_is_applied_once(
    ledger: Ledger, engine: Engine, observer: CutCommitAt, cut: Cut, suspect: bool
) -> None:
    observer.arm(Point.FETCHED if suspect else Point.ROLLED_BACK, cut)
    if suspect:
        observer.at(Point.FETCHED, "", ())

    outcome = await until_decided(engine, *works(fail_once, 1, suspect=suspect))

    observer.assert_sprung()
    assert outcome.kind == "applied"
    assert (ledger.effects, ledger.states, ledger.attempts) == (["1"], [State.COMPLETED], [])


async def test_a_connection_that_is_cut_while_the_handler_runs_costs_no_attempt(
    ledger: Ledger, engine: Engine, proxy: Proxy
) -> None:
    global running
    running = asyncio.Event()
    first, second = await asyncio.gather(*(handled(engine, proxy, cut) for cut in (True, False)))
    assert (first, second) == ("unavailable", "applied")
    assert (ledger.effects, ledger.attempts, ledger.letters) == (["held"], [], [])


running: asyncio.Event


async def handled(engine: Engine, proxy: Proxy, cut: bool) -> str:
    """The first one loses its connections in mid-flight, the second one waits for that and comes after it."""
    if not cut:
        await running.wait()
        proxy.cut()
        await proxy.restore()
    try:
        return str((await engine.process(*works(held if cut else pay, "held"))).kind)
    except StoreUnavailable:
        return "unavailable"


@idempotent_handler(SOURCE, key="id", name="pay")
async def held(order: dict[str, Any], tx: Tx) -> None:
    rows = await tx.execute("insert into witness (id) values (%s)", (order["id"],))
    assert rows.rowcount == 1
    running.set()
    await tx.execute("select pg_sleep(20)")


# ------------------------------------------------------------------------------------------------------- cancellation
SLOW_COMMIT = """
create function wait_at_commit() returns trigger language plpgsql as $$
begin perform pg_advisory_xact_lock(42); return null; end $$;
create constraint trigger slow after insert on witness deferrable initially deferred
for each row execute function wait_at_commit()
"""


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancellation_during_commit_waits_for_its_end_and_then_goes_on(ledger: Ledger, times: int) -> None:
    ledger.run(SLOW_COMMIT)
    ledger.run("select pg_advisory_lock(42)")
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)
    task = asyncio.create_task(Engine(store).process(*works(pay, 1)))
    await until(lambda: ledger.run("select 1 from pg_locks where locktype = 'advisory' and objid = 42 and not granted"))

    for _ in range(times):
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=0.1)
        assert not done, "the connection went back while COMMIT was running on it"
    ledger.run("select pg_advisory_unlock(42)")

    async with asyncio.timeout(PATIENCE):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ledger.effects == ["1"]
    assert ledger.sessions("active", "idle in transaction") == 0
    assert (await Engine(store).process(*works(pay, 1))).kind == "duplicate"  # on the one connection there is
    await store.close()


async def test_a_cancellation_during_a_commit_whose_answer_is_lost_is_still_a_cancellation(
    ledger: Ledger, proxy: Proxy, engine: Engine, observer: CutCommitAt
) -> None:
    trap = proxy.cut_at(mode="after", answer=b"an answer that never comes")
    task = asyncio.create_task(engine.process(*works(pay, 1)))
    await until(lambda: ledger.effects)
    task.cancel()
    proxy.cut()

    async with asyncio.timeout(PATIENCE):
        with pytest.raises(asyncio.CancelledError):
            await task
        await trap.sprung.wait()
    await proxy.restore()
    assert kinds(await engine.run(works(pay, 1))) == ["duplicate"]
    assert ledger.effects == ["1"]
