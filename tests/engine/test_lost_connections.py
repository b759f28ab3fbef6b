"""A message that loses its connection each time it runs ends as a dead letter; one whose server goes away does not
(B13)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import App, Batch, Message, Saga, Tx, idempotent_handler
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.evidence import LostConnections
from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import ConnectionLost, StoreUnavailable
from idemconsumer.handlers.decorator import Handler
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark, Outcome, OutcomeKind
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, message, works, write
from tests.support.servers.made import PrivatePostgres
from tests.support.servers.postgres import fresh_database
from tests.support.servers.proxy import Proxy
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("both_ways")

Act = Callable[[Tx], Awaitable[object]]


class Lane:
    """Presents messages as a lane does, and takes every pause to be over."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outages = 0

    async def to_the_end(self, group: Sequence[Work]) -> list[Outcome]:
        left, done = list(group), list[Outcome]()
        async with asyncio.timeout(3 * PATIENCE):  # a server that has crashed takes seconds to come back
            while left:
                try:
                    outcomes = await self.engine.run(left[: self.engine.group_size(left[0].handler)])
                except StoreUnavailable:
                    self.outages += 1
                    assert self.outages < 100, "it is tried for ever"
                    continue
                # Busy: the server has not noticed yet that the connection of the last run is closed.
                undecided = (OutcomeKind.RETRYING, OutcomeKind.BUSY)
                decided = [outcome for outcome in outcomes if outcome.kind not in undecided]
                done += decided
                left = left[len(decided) :]
        return done


class Losing:
    """A handler that does `act` for the message `bad`, and counts the runs of each. `looks`: at what it has written, so
    that no run is repeated since that was sent ahead (J27)."""

    def __init__(self, act: Act, *, looks: bool = False, **options: Any) -> None:
        self.runs: Counter[str] = Counter()
        given: Any = {"max_attempts": 2, "group_size": 8} | options

        @idempotent_handler(SOURCE, key="id", **given)
        async def handle(order: dict[str, Any], tx: Tx) -> None:
            self.runs[order["id"]] += 1
            if looks:
                await (await tx.execute("insert into witness (id) values (%s) returning id", (order["id"],))).one()
            else:
                await write(tx, order["id"])
            if order["id"] == "bad":
                await act(tx)

        self.handler: Handler[..., Any] = handle


async def ends_its_session(tx: Tx) -> None:
    await tx.execute("select pg_terminate_backend(pg_backend_pid())")


async def closes_it(tx: Tx) -> None:
    await tx.connection.close()


async def closes_it_and_says_otherwise(tx: Tx) -> None:
    await tx.connection.close()
    raise ValueError("whatever")


async def takes_too_long_for_the_server(tx: Tx) -> None:
    await tx.execute("set local transaction_timeout = '50ms'")
    await tx.execute("select pg_sleep(60)")


async def takes_too_long_and_says_nothing_more(tx: Tx) -> None:
    await tx.execute("set local idle_in_transaction_session_timeout = '20ms'")
    await asyncio.sleep(0.1)  # what it does: no statement, so that only COMMIT meets the end


async def lends_and_takes_too_long(tx: Tx) -> None:
    await tx.connection.execute("set local idle_in_transaction_session_timeout = '20ms'")
    await asyncio.sleep(0.1)


QUIET = (takes_too_long_and_says_nothing_more, lends_and_takes_too_long)


@pytest.mark.parametrize(
    "act",
    [
        *QUIET,
        ends_its_session,
        closes_it,
        closes_it_and_says_otherwise,
        takes_too_long_for_the_server,
    ],
)
async def test_it_ends_as_a_dead_letter_and_takes_no_other_along(ledger: Ledger, engine: Engine, act: Act) -> None:
    losing, lane = Losing(act), Lane(engine)
    outcomes = await lane.to_the_end(works(losing.handler, "a", "b", "bad", "c", "d"))

    assert kinds(outcomes) == ["applied", "applied", "dead", "applied", "applied"]
    assert (ledger.effects, ledger.letters, ledger.attempts) == (["a", "b", "c", "d"], [("lost_connection", 1)], [])
    if act not in QUIET:  # else it is first noticed under those behind it
        assert lane.outages == 3 + 2, "three in a row, and then max_attempts"
    ((attempts, error),) = ledger.run("select attempts, error from idemconsumer.dead_letter")
    assert attempts == 2
    assert "the connection broke while the handler ran" in error


async def test_from_the_third_on_it_is_on_record_before_it_runs_and_runs_alone(ledger: Ledger, engine: Engine) -> None:
    on_record: list[list[int]] = []

    async def act(tx: Tx) -> None:
        on_record.append(ledger.attempts)
        await ends_its_session(tx)

    losing = Losing(act, looks=True, max_attempts=3)
    outcomes = await Lane(engine).to_the_end(works(losing.handler, "a", "bad", "b"))
    assert kinds(outcomes) == ["applied", "dead", "applied"]
    assert on_record == [[], [], [], [1], [2], [3]]
    assert losing.runs == {"a": 4, "bad": 6, "b": 1}, "those before it are committed once it runs alone"


async def test_between_two_counted_losses_it_pauses_for_half_a_minute_at_most(engine: Engine) -> None:
    losing, pauses = Losing(ends_its_session, max_attempts=3, backoff="1h, 1h"), list[float | None]()
    (work,) = works(losing.handler, "bad")
    async with asyncio.timeout(3 * PATIENCE):
        while len(pauses) < 2:
            with suppress(StoreUnavailable):
                pauses += [each.due for each in await engine.run([work]) if each.reason == "retry"]
    assert pauses == [0.0, 30.0], "the first one is not counted"


@pytest.mark.parametrize("act", [ends_its_session, closes_it])
async def test_an_item_of_a_batch_is_found(ledger: Ledger, engine: Engine, act: Act) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=2, group_size=8)
    async def store_all(orders: Batch[dict[str, Any]], tx: Tx) -> None:
        for order in orders:
            await write(tx, order["id"])
        if "bad" in [order["id"] for order in orders]:
            orders.retry(0)  # whatever it says of the others
            await act(tx)

    lane = Lane(engine)
    outcomes = await lane.to_the_end(works(store_all, "a", "b", "bad", "c"))
    # Those before it are committed while it is searched for, perhaps in a run that then says nothing.
    assert kinds(outcomes)[2:] == ["dead", "applied"]
    assert lane.outages == 3 + 2, "no other item is taken for it"
    assert (ledger.effects, ledger.letters) == (["a", "b", "c"], [("lost_connection", 1)])


async def test_while_another_session_holds_its_key_it_has_not_run(
    ledger: Ledger, store: PostgresStore, engine: Engine
) -> None:
    """As the session does that the message has closed, until the server notices."""
    (bad,), seen, outages = works(Losing(closes_it, wait=0).handler, "bad"), list[str](), 0
    assert bad.call is not None

    async def until_another_holds_it(claim: Claim) -> None:
        held = False
        while not held:
            async with store.transaction(group=1) as another:
                if held := await another.claim([claim]) != [Mark.BUSY]:  # else its own session still does
                    seen.extend(kinds(await engine.run([bad])))

    async with asyncio.timeout(3 * PATIENCE):
        while "dead" not in seen:
            try:
                seen += kinds(await engine.run([bad]))
            except StoreUnavailable:
                outages += 1
                assert outages < 100, "it is tried for ever"
                await until_another_holds_it(bad.call.claim)
    assert seen.count("busy") >= 2
    assert (outages, ledger.letters) == (3 + 2, [("lost_connection", 1)])


async def test_three_in_a_row_are_three_in_a_row(ledger: Ledger, engine: Engine) -> None:
    async def act(tx: Tx) -> None:
        if acts.pop(0) == "fails":
            raise ValueError
        await ends_its_session(tx)

    acts = ["lost", "lost", "fails"] * 3
    outcomes = await Lane(engine).to_the_end(works(Losing(act, max_attempts=3).handler, "bad"))
    assert (kinds(outcomes), ledger.letters, acts) == (["dead"], [("attempts_exhausted", 1)], [])


async def test_a_failure_behind_others_starts_the_count_anew(ledger: Ledger, engine: Engine) -> None:
    async def act(tx: Tx) -> None:
        if (what := acts.pop(0)) == "fails":
            raise ValueError
        if what == "lost":
            await ends_its_session(tx)

    # Behind `a` it fails; what it did before and after that is not three in a row.
    acts = ["lost", "lost", "fails", "lost", "lost", "ends well"]
    lane, bad, *others = Lane(engine), *works(Losing(act, max_attempts=5).handler, "bad", *"abc")
    while len(acts) > 1:
        with suppress(StoreUnavailable):
            before = [others.pop(0)] if acts[0] == "fails" else []
            await engine.run([*before, bad])
    assert bad.suspicion is Suspicion.NONE
    assert kinds(await lane.to_the_end([bad])) == ["applied"]
    assert (ledger.effects, ledger.attempts) == (["a", "bad"], [])


async def test_one_that_mends_itself_is_applied(ledger: Ledger, engine: Engine) -> None:
    async def act(tx: Tx) -> None:
        if acts.pop():
            await ends_its_session(tx)

    acts = [False, True, True, True, True]
    outcomes = await Lane(engine).to_the_end(works(Losing(act).handler, "bad"))
    assert (kinds(outcomes), ledger.letters, ledger.attempts) == (["applied"], [], [])


async def test_who_runs_while_another_ends_its_session_is_not_to_blame(ledger: Ledger, engine: Engine) -> None:
    """Its loss is noticed under its neighbours, who then run alone, and end well."""

    @idempotent_handler(SOURCE, key="id", max_attempts=2, group_size=8)
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == "bad":
            await tx.execute("set local idle_in_transaction_session_timeout = '20ms'")
        else:
            await asyncio.sleep(0.1)
            await write(tx, "more")

    outcomes = await Lane(engine).to_the_end(works(handle, "bad", "a", "b"))
    assert (kinds(outcomes), ledger.letters) == (["applied"] * 3, [])


async def test_a_message_that_is_delivered_anew_each_time_ends_too(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", ledger.dsn)
    app, seen = App("shop"), list[str]()
    app.include(Losing(ends_its_session).handler)
    async with asyncio.timeout(PATIENCE):
        for _ in range(20):
            if "dead" in seen:
                break
            try:
                seen.append(str((await app.process(message("bad"))).kind))
            except StoreUnavailable:
                seen.append("unavailable")
    await app.close()
    assert seen.count("unavailable") == 3 + 2
    assert ledger.letters == [("lost_connection", 1)]


async def test_one_that_a_handler_has_processed_inside_itself_ends_too(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs alone, as a part of that handler: neither waits for the other (B16)."""
    monkeypatch.setenv("IDEMCONSUMER_DSN", ledger.dsn)
    app, inner = App("shop"), list[str]()
    losing = Losing(ends_its_session, looks=True)
    app.include(losing.handler)

    @app.idempotent_handler("memory:outer", key="id", max_attempts=20)
    async def outer(order: dict[str, Any], saga: Saga) -> None:  # with a tx it is refused (J29)
        inner.append(str((await app.process(message("bad"), handler=losing.handler)).kind))

    async with asyncio.timeout(PATIENCE):
        for n in range(20):
            if "dead" in inner:
                break
            await app.process(Message("memory:outer", b'{"id": %d}' % n), handler=outer)
    await app.close()
    assert inner[-1] == "dead"
    assert (ledger.letters, losing.runs["bad"]) == ([("lost_connection", 1)], 3 + 2)


# ------------------------------------------------------------------------------------------------- and real outages
@pytest.mark.parametrize("suspect", [False, True], ids=["a new message", "a suspect"])
async def test_a_server_that_restarts_again_and_again_ends_no_message(
    private_postgres: PrivatePostgres, suspect: bool
) -> None:
    server = private_postgres()
    with fresh_database(server.dsn) as dsn:
        ledger = Ledger(dsn)
        ledger.close()

        async def act(tx: Tx) -> None:
            if acts.pop():
                await asyncio.to_thread(restart, server)
                await tx.execute("select 1")

        acts = [False] + [True] * 8
        losing = Losing(act, max_attempts=1)
        store = await PostgresStore.open(dsn, SCHEMA, connections=1, longest_run=30.0)  # none rests
        outcomes = await Lane(Engine(store)).to_the_end(works(losing.handler, "a", "bad", "b", suspect=suspect))
        await store.close()
        assert (kinds(outcomes), acts) == (["applied"] * 3, [])
        with psycopg.connect(dsn) as connection:
            assert connection.execute("select count(*) from idemconsumer.dead_letter").fetchone() == (0,)


def restart(server: EmbeddedPostgres) -> None:
    server.kill()
    server.start()


async def test_what_loses_its_connection_with_others_that_did_nothing_is_not_to_blame(ledger: Ledger) -> None:
    """Somebody cuts them all, as a pooler does that restarts again and again."""
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:

        async def act(tx: Tx) -> None:
            if acts.pop():
                proxy.cut()
                await proxy.restore()
                await tx.execute("select 1")

        acts = [False] + [True] * 8
        losing = Losing(act, looks=True, max_attempts=1)
        dsn = make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port)
        store = await PostgresStore.open(dsn, SCHEMA, connections=4, longest_run=30.0)
        async with AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(store.pool.connection())
        outcomes = await Lane(Engine(store)).to_the_end(works(losing.handler, "a", "bad", "b"))
        await store.close()
    assert (kinds(outcomes), acts) == (["applied"] * 3, [])
    assert ledger.run("select count from idemconsumer.attempt") == []


async def test_a_message_of_which_a_proxy_ends_each_time_is_found_in_the_end() -> None:
    """It takes all connections along, and is not the fault of somebody who cuts them for ever."""

    async def started() -> datetime:
        return datetime.fromtimestamp(0, UTC)

    losses, judged = LostConnections(started, lambda seconds: True), list[object]()
    while not any(judged):
        losses.lost(b"bad", ConnectionLost("it is cut"))
        judged.append(await losses.judge(b"bad"))
    assert len(judged) == 20 + 3


# ------------------------------------------------------------------------------------------------- a session crashes
class Crashing:
    """`bad` crashes its session, the first `in_company` times once all `beside` it wait for the server in theirs."""

    def __init__(self, in_company: int, beside: int, says: str = "nothing more") -> None:
        self.left, self.beside, self.says = in_company, beside, says
        self.waiting = 0
        self.changed = asyncio.Condition()

        @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=1)
        async def handle(order: dict[str, Any], tx: Tx) -> None:
            await write(tx, order["id"])
            await (self.crash if order["id"] == "bad" else self.wait)(tx)

        self.handler: Handler[..., Any] = handle

    async def crash(self, tx: Tx) -> None:
        if self.left:
            async with self.changed:
                await self.changed.wait_for(lambda: self.waiting == self.beside)
            self.waiting, self.left = 0, self.left - 1
        os.kill(tx.connection.info.backend_pid, signal.SIGKILL)
        await tx.execute("select pg_sleep(60)")

    async def wait(self, tx: Tx) -> None:
        if not self.left:
            return
        async with self.changed:
            self.waiting += 1
            self.changed.notify_all()
        if self.says == "nothing more":
            await tx.execute("select pg_sleep(60)")
        if self.says == "through tx.connection":
            await tx.connection.execute("select pg_sleep(60)")
        try:
            await tx.execute("select pg_sleep(60)")
        except psycopg.Error:
            raise ValueError("something else") from None


@pytest.mark.parametrize(  # one engine lets a suspect run alone
    ("both_ways", "engines", "in_company", "says"),
    [
        ("waits", 1, 3, "through tx.connection"),
        ("ahead", 2, 3 + 1, "something else"),
        pytest.param("ahead", 1, 3, "through tx.connection", marks=pytest.mark.long),
        pytest.param("waits", 2, 3 + 1, "something else", marks=pytest.mark.long),
        pytest.param("waits", 1, 3, "nothing more", marks=pytest.mark.long),
        pytest.param("ahead", 1, 3, "nothing more", marks=pytest.mark.long),
    ],
    indirect=["both_ways"],
)
async def test_who_runs_while_another_crashes_its_session_is_not_to_blame(
    private_postgres: PrivatePostgres, engines: int, in_company: int, says: str
) -> None:
    """The message that does it ends as one that loses its connection; the server itself does not start anew."""
    server = private_postgres()
    with fresh_database(server.dsn) as dsn:
        Ledger(dsn).close()
        stores = [await PostgresStore.open(dsn, SCHEMA, connections=6, longest_run=30.0) for _ in range(engines)]
        each_engine = [Engine(store) for store in stores]
        crashing = Crashing(in_company, 2, says)
        innocent = works(crashing.handler, "a", "b")
        bad, *others = await asyncio.gather(
            Lane(each_engine[0]).to_the_end(works(crashing.handler, "bad")),
            *(Lane(each_engine[-1]).to_the_end([work]) for work in innocent),
        )
        for store in stores:
            await store.close()
        assert (kinds(bad), [kinds(each) for each in others]) == (["dead"], [["applied"], ["applied"]])
        assert [work.suspicion for work in innocent] == [Suspicion.NONE] * 2
        with psycopg.connect(dsn) as connection:
            letters = connection.execute("select reason, attempts from idemconsumer.dead_letter").fetchall()
        assert letters == [("lost_connection", 1)]


@pytest.mark.parametrize("both_ways", ["waits", pytest.param("ahead", marks=pytest.mark.long)], indirect=True)
async def test_one_that_crashes_its_session_each_time_ends_alone(private_postgres: PrivatePostgres) -> None:
    server = private_postgres()
    with fresh_database(server.dsn) as dsn:
        Ledger(dsn).close()
        store = await PostgresStore.open(dsn, SCHEMA, connections=4, longest_run=30.0)
        outcomes = await Lane(Engine(store)).to_the_end(works(Crashing(0, 0).handler, "bad"))
        await store.close()
        assert kinds(outcomes) == ["dead"]
