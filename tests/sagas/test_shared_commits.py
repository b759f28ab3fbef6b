"""Sagas of one process share commits (L4), and never each other's trouble.

Rows that one transaction wrote have one `xmin`, which is how these tests see what was shared. Writes that are asked for
in one turn of the loop wait together; `full` keeps a shared commit from starting, so that others have to wait.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final, Literal, LiteralString, TypeVar

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import OutcomeKind, Saga, Step, StoreUnavailable
from idemconsumer.engine.work import Work
from idemconsumer.errors import CommitUnknown, Fenced
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark, Record, State, StepKind, StepState
from idemconsumer.sql.queries import load
from idemconsumer.stores import shared_commits
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.sharing import OTHERS
from tests.support.inside import held_by_party, spare
from tests.support.logs import LogCapture, times
from tests.support.sagas import SCHEMA, Bench, OpenStation, Remote, Station, locked, order, put, saga
from tests.support.servers.proxy import Proxy
from tests.support.waiting import until

T = TypeVar("T")
OUTPUT: Final = StoredResult(b'"out"')


async def book(order: dict[str, Any], saga: Saga) -> None:
    return


def claim_of(key: str) -> Claim:
    call = Work.of(saga(book), order(key)).call
    assert call is not None
    return call.claim


async def begin(station: Station, key: str) -> LeasedSaga:
    holding = await station.leases.begin(claim_of(key), order(key), "book", None)
    assert isinstance(holding, LeasedSaga)
    return holding


async def begin_all(station: Station, count: int) -> list[LeasedSaga]:
    return await asyncio.gather(*(begin(station, str(n)) for n in range(count)))


async def intend(station: Station, holding: LeasedSaga, name: str = "s") -> int:
    return await station.leases.intend(holding, name, has_undo=True, undo=False)


async def record(
    station: Station,
    holding: LeasedSaga,
    name: str = "s",
    *,
    state: StepState = StepState.DONE,
    body: bytes = OUTPUT.body,
) -> None:
    output = StoredResult(body)
    await station.leases.record(holding, name, StepKind.CALL, state, output, has_undo=True, overlapped=False)


async def complete(station: Station, holding: LeasedSaga) -> None:
    await station.leases.complete(holding, State.COMPLETED, OUTPUT)


def transactions(bench: Bench, query: LiteralString, params: Sequence[object] = ()) -> int:
    """How many transactions wrote the rows of that query, which selects their xmin."""
    return len({row[0] for row in bench.run(query, params)})


STEPS: Final[LiteralString] = "select xmin::text from idemconsumer.step"
RECORDS: Final[LiteralString] = "select xmin::text from idemconsumer.record"


Write = Callable[[Station, LeasedSaga], Coroutine[Any, Any, object]]


async def either(*writes: Awaitable[object]) -> list[object]:
    """All of them at once, and what each came to. None may wait for what only the long lock_timeout (10 s) ends."""
    async with asyncio.timeout(8):
        return await asyncio.gather(*writes, return_exceptions=True)


def kinds(ends: list[object]) -> list[type]:
    return [type(end) for end in ends]


@asynccontextmanager
async def full(station: Station) -> AsyncIterator[None]:
    """Nobody gets a connection, as when each is in use by a step."""
    sharing = station.store.pool._sharing
    async with AsyncExitStack() as stack:
        while spare(sharing) or not held_by_party(sharing)[OTHERS]:
            await stack.enter_async_context(sharing.place())
        yield


async def turn() -> None:
    """What was asked for is waiting now, and the first of it is under way."""
    for _ in range(3):
        await asyncio.sleep(0)


async def lined_up(*writes: Coroutine[Any, Any, T]) -> list[asyncio.Task[T]]:
    """The first one is under way, and the others wait behind it."""
    tasks = []
    for write in writes:
        tasks.append(asyncio.create_task(write))
        await turn()
    return tasks


def busy(bench: Bench) -> int:
    """Connections of stores that are in the middle of something."""
    rows = bench.run(
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'idemconsumer' and state <> 'idle'"
    )
    return int(rows[0][0])


# ------------------------------------------------------------------------------------------------------- what is shared
async def test_what_sagas_ask_for_at_once_is_one_commit_for_each_kind_of_write(bench: Bench, one: Station) -> None:
    holdings = await begin_all(one, 20)
    assert len({holding.token for holding in holdings}) == 20
    assert transactions(bench, RECORDS) == transactions(bench, "select xmin::text from idemconsumer.saga") == 1
    assert await asyncio.gather(*(intend(one, holding) for holding in holdings)) == [1] * 20
    assert transactions(bench, STEPS) == 1
    await asyncio.gather(*(record(one, holding) for holding in holdings))
    assert transactions(bench, STEPS) == 1
    await asyncio.gather(*(complete(one, holding) for holding in holdings))
    assert transactions(bench, RECORDS) == 1
    assert bench.run("select distinct state from idemconsumer.record") == [(int(State.COMPLETED),)]
    assert bench.run("select count(*) from idemconsumer.result") == [(20,)]
    assert not bench.held


async def test_different_kinds_of_write_share_one_commit(bench: Bench, one: Station) -> None:
    first, second, third = await begin_all(one, 3)
    await asyncio.gather(intend(one, second), intend(one, third, "t"))
    await record(one, third, "t")
    new, *_ = await asyncio.gather(begin(one, "new"), intend(one, first), record(one, second), complete(one, third))
    written = "select xmin::text from idemconsumer.step where name = 's' union all " + RECORDS + " where key = any(%s)"
    assert transactions(bench, written, ([new.key, third.key],)) == 1
    assert bench.run("select state from idemconsumer.step order by state") == [(1,), (2,), (2,)]


async def test_each_saga_gets_its_own_answer(bench: Bench, one: Station) -> None:
    holdings = await begin_all(one, 5)
    for holding in holdings[:2]:
        await intend(one, holding)
    assert await asyncio.gather(*(intend(one, holding) for holding in reversed(holdings))) == [1, 1, 1, 2, 2]
    rows = bench.run("select key, token from idemconsumer.saga")
    assert dict(rows) == {holding.key: holding.token for holding in holdings}


async def test_what_comes_during_a_commit_shares_the_next_one(bench: Bench, one: Station) -> None:
    holdings = await begin_all(one, 5)
    async with full(one):
        writes = await lined_up(*(intend(one, holding) for holding in holdings))
    await asyncio.gather(*writes)
    assert transactions(bench, STEPS) == 2


async def test_steps_of_one_saga_may_share_and_its_end_does_not_share_with_them(bench: Bench, one: Station) -> None:
    (holding,) = await begin_all(one, 1)
    await asyncio.gather(intend(one, holding, "a"), intend(one, holding, "b"))
    assert transactions(bench, STEPS) == 1
    await asyncio.gather(record(one, holding, "a"), complete(one, holding))
    steps = "select xmin::text from idemconsumer.step where name = 'a' union all " + RECORDS
    assert transactions(bench, steps) == 2
    assert bench.state is State.COMPLETED


async def test_a_commit_is_bounded_in_rows_and_in_bytes(bench: Bench, one: Station) -> None:
    holdings = await begin_all(one, 150)
    assert transactions(bench, RECORDS) == 2
    await asyncio.gather(*(record(one, holding, body=b'"%s"' % (b"x" * 1_500_000)) for holding in holdings[:6]))
    assert transactions(bench, STEPS) == 3


# -------------------------------------------------------------------------------------------------------------- claims
async def test_a_claim_that_a_rival_holds_or_has_made_costs_the_others_nothing(
    bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(one, "made")
    opened: list[int] = []

    def counted(pool: Pool, *, group: int) -> AbstractAsyncContextManager[PostgresClaims]:
        opened.append(group)
        return transaction(pool, group=group)

    monkeypatch.setattr(shared_commits, "transaction", counted)
    held = claim_of("held").key
    lock = int.from_bytes(held[:8], "big", signed=True)
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute("select pg_advisory_xact_lock(%s)", (lock,))
        await rival.execute(
            "insert into idemconsumer.record (key, scope_id, state, changed_at) values (%s, 1, 1, now())", (held,)
        )
        ends = await either(*(one.leases.begin(claim_of(key), order(key), "book", None)
                              for key in ("held", "made", "new", "newer")))  # fmt: skip
        await rival.rollback()
    assert ends[0] is Mark.BUSY
    assert isinstance(ends[1], Record)
    assert kinds(ends[2:]) == [LeasedSaga, LeasedSaga]
    assert opened == [4], "each was answered by the one transaction"


async def test_of_two_claims_of_one_key_at_once_one_is_made(bench: Bench, one: Station) -> None:
    ends = await either(*(one.leases.begin(claim_of("k"), order("k"), "book", None) for _ in range(2)))
    assert sorted(kind.__name__ for kind in kinds(ends)) == ["LeasedSaga", "Record"]
    assert bench.run("select count(*) from idemconsumer.saga") == [(1,)]


# ------------------------------------------------------------------------------------------------- one saga's trouble
async def test_who_is_fenced_writes_nothing_and_is_alone_told_so(bench: Bench, one: Station, two: Station) -> None:
    holdings = await begin_all(one, 3)
    new = await one.leases.retake(holdings[1].key, holdings[1].token)
    assert new is not None
    for write in (intend, record, complete):
        ends = await either(*(write(one, holding) for holding in holdings))
        assert [isinstance(end, Fenced) for end in ends] == [False, True, False]
        assert not isinstance(ends[0], BaseException)
    assert transactions(bench, STEPS) == 1
    assert bench.run("select key from idemconsumer.saga") == [(new.key,)]
    assert bench.run("select count(*) from idemconsumer.step") == [(2,)]
    assert bench.run("select count(*) from idemconsumer.result") == [(2,)]


@pytest.mark.parametrize("refuser", ["driver", "server"])
async def test_the_error_of_a_bad_row_is_its_own_sagas(bench: Bench, one: Station, refuser: str) -> None:
    bad = "nul \x00" if refuser == "driver" else secrets.token_hex(6000)  # longer than an index entry may be
    holdings = await begin_all(one, 3)
    ends = await either(intend(one, holdings[0]), intend(one, holdings[1], bad), intend(one, holdings[2]))
    assert kinds(ends)[::2] == [int, int]
    assert isinstance(ends[1], psycopg.Error)
    assert [row[0] for row in bench.run("select name from idemconsumer.step")] == ["s", "s"]
    await until(lambda: busy(bench) == 0, "what the pool makes anew is looked at and idle")


@pytest.mark.parametrize("write", [intend, record, complete], ids=lambda fn: fn.__name__)
async def test_a_locked_saga_waits_alone_and_the_others_still_share(bench: Bench, one: Station, write: Write) -> None:
    """As long as a zombie that is frozen in a transaction keeps the row."""
    holdings = await begin_all(one, 4)
    async with locked(bench, "select 1 from idemconsumer.saga where key = %s for update", holdings[0].key):
        stuck = asyncio.create_task(write(one, holdings[0]))
        await either(*(write(one, holding) for holding in holdings[1:]))
        assert transactions(bench, STEPS + " union all " + RECORDS + " where state = 3") == 1
        await until(lambda: bench.waiting() == 1, "the locked one waits by itself")
        assert not stuck.done()
    await stuck
    assert bench.run("select count(*) from idemconsumer.record where state = 3") == [(4 if write is complete else 0,)]


async def test_another_row_that_is_locked_holds_the_others_up_for_the_short_timeout_alone(
    bench: Bench, one: Station
) -> None:
    holdings = await begin_all(one, 4)
    async with locked(bench, "select 1 from idemconsumer.record where key = %s for update", holdings[0].key):
        stuck = asyncio.create_task(complete(one, holdings[0]))
        await turn()  # a shared commit is under way, though of one alone
        assert await either(*(complete(one, holding) for holding in holdings[1:])) == [None] * 3
        await until(lambda: bench.waiting() == 1, "the locked one waits by itself")
        assert await intend(one, await begin(one, "later")) == 1
        assert not stuck.done()
    await stuck
    assert bench.run("select count(*) from idemconsumer.record where state = 3") == [(4,)]


# --------------------------------------------------------------------------------------------------- trouble for all
Cut = Literal["before", "after"]


class Line:
    """A station behind a proxy."""

    def __init__(self, station: Station, proxy: Proxy) -> None:
        self.station = station
        self.proxy = proxy


@pytest.fixture
async def line(bench: Bench, open_station: OpenStation) -> AsyncIterator[Line]:
    async with Proxy(int(str(conninfo_to_dict(bench.dsn)["port"]))) as proxy:
        station = await open_station(dsn=make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port))
        await begin(station, "first")  # the scope is known from now on, so the next COMMIT is a shared one
        yield Line(station, proxy)


@pytest.mark.parametrize("cut", ["before", "after"])
async def test_a_lost_answer_to_commit_is_unknown_to_all_whose_writes_were_in_it(
    bench: Bench, line: Line, cut: Cut
) -> None:
    holdings = await begin_all(line.station, 4)
    await line.station.leases.retake(holdings[3].key, holdings[3].token)
    line.proxy.cut_at(mode=cut)
    ends = await either(*(intend(line.station, holding) for holding in holdings))
    assert kinds(ends) == [CommitUnknown] * 4, "also to who was fenced: the fence is in the same message"
    assert len({id(end) for end in ends}) == 4
    # Only a token of its own tells each of them what has become of it.
    retaken = [await line.station.leases.retake(holding.key, holding.token) for holding in holdings[:3]]
    assert all(holding is not None for holding in retaken)
    assert bench.run("select count(*) from idemconsumer.step") == [(0 if cut == "before" else 3,)]


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("nth", range(3), ids=["intents", "outputs", "completions"])
async def test_sagas_whose_shared_commit_was_lost_go_on_and_do_nothing_twice(
    bench: Bench, line: Line, remote: Remote, nth: int, cut: Cut
) -> None:
    phases = [asyncio.Barrier(3) for _ in range(3)]
    passed: list[set[str]] = [set(), set(), set()]

    async def together(key: str, phase: int) -> None:
        """In its first run only: the second one is not met by all."""
        if key not in passed[phase]:
            passed[phase].add(key)
            if await phases[phase].wait() == 0 and phase == nth:
                line.proxy.cut_at(mode=cut)
            await turn()

    async def charge(step: Step, key: str) -> str:
        charged = await remote.charge(step, key)
        await together(key, 1)
        return charged

    async def book(order: dict[str, Any], saga: Saga) -> str:
        key = str(order["id"])
        await saga.tx("first", put, key)
        await together(key, 0)
        charged = await saga.call("second", charge, key)
        await together(key, 2)
        return charged

    handler = saga(book)

    async def deliver(key: str) -> OutcomeKind:
        work = Work.of(handler, order(key))
        while True:
            try:
                return (await line.station.run(work)).kind
            except StoreUnavailable:
                await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*(deliver(key) for key in "abc"))
    assert set(outcomes) <= {OutcomeKind.APPLIED, OutcomeKind.DUPLICATE}
    assert sorted(bench.effects) == ["a", "b", "c"]
    assert sorted(remote.effects) == ["a", "b", "c"]
    assert bench.run("select count(*) from idemconsumer.record where state = 3") == [(3,)]


CHANGES: Final[list[LiteralString]] = [
    "set role pg_read_all_data", "set search_path = other, public", "set statement_timeout = 9999",
    "set timezone = 'Asia/Tokyo'",
]  # fmt: skip


async def pause(station: Station, holding: LeasedSaga) -> float:
    return await station.leases.pause(holding, [], 60.0)


@pytest.mark.parametrize("write", [intend, pause])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_small_commit_is_made_in_the_session_as_it_was(
    one: Station, logged: LogCapture, change: LiteralString, write: Callable[..., Awaitable[float]]
) -> None:
    """As a function of the database may leave it (J25)."""
    show = f"show {change.split()[1]}"
    holding = await begin(one, "k")
    async with one.store.pool.connection() as only:  # that is open
        before = await (await only.execute(show)).fetchone()
        await only.execute(change)
    assert await write(one, holding) > 0
    async with one.store.pool.connection() as again:
        assert again is only
        assert await (await again.execute(show)).fetchone() == before
    assert times(logged, "session reset, a function, trigger or view had changed its settings") == 1


async def test_a_closed_store_says_so_to_whoever_asks_or_waits(bench: Bench, one: Station) -> None:
    holdings = await begin_all(one, 3)
    async with full(one):
        writes = await lined_up(*(intend(one, holding) for holding in holdings[:2]))
        await one.store.close()
    ends = await either(*writes, intend(one, holdings[2]))
    assert kinds(ends) == [StoreUnavailable] * 3


async def test_nobody_waits_for_ever_when_the_loop_is_being_closed(bench: Bench, one: Station) -> None:
    holdings = await begin_all(one, 2)
    async with full(one):
        writes = await lined_up(*(intend(one, holding) for holding in holdings))
        running = one.leases._shared._together._running
        assert running is not None
        running.cancel()
        ends = await either(*writes)
    assert kinds(ends) == [CommitUnknown, StoreUnavailable]
    assert await intend(one, holdings[1]) == 1


# --------------------------------------------------------------------------------------------------------- cancellation
async def test_who_is_cancelled_while_it_waits_for_its_turn_writes_nothing(bench: Bench, one: Station) -> None:
    holdings = await begin_all(one, 3)
    async with full(one):
        first, second, third = await lined_up(*(intend(one, holding) for holding in holdings))
        second.cancel()
        assert kinds(await either(second)) == [asyncio.CancelledError], "at once"
    assert await either(first, third) == [1, 1]
    assert {row[0] for row in bench.run("select key from idemconsumer.step")} == {holdings[0].key, holdings[2].key}


async def test_who_is_cancelled_during_the_commit_comes_to_its_end_first(bench: Bench, one: Station) -> None:
    (holding,) = await begin_all(one, 1)
    async with full(one):
        (write,) = await lined_up(intend(one, holding))
        write.cancel()
        await turn()
        assert not write.done()
    assert kinds(await either(write)) == [asyncio.CancelledError]
    assert bench.run("select count(*) from idemconsumer.step") == [(1,)]
    await until(lambda: busy(bench) == 0, "what the pool makes anew is looked at and idle")
    await record(one, holding)


async def test_cancelling_one_saga_leaves_the_others_of_its_commit_alone(bench: Bench, one: Station) -> None:
    holdings = await begin_all(one, 3)
    async with full(one):
        writes = [asyncio.create_task(intend(one, holding)) for holding in holdings]
        await turn()
        writes[1].cancel()
    assert kinds(await either(*writes)) == [int, asyncio.CancelledError, int]
    assert transactions(bench, STEPS) == 1


# -------------------------------------------------------------------------------------------------------- the fence
@pytest.mark.parametrize("rows", ["one", "many"])
@pytest.mark.parametrize("statement", ["begin_steps", "finish_steps", "end_sagas"])
async def test_a_takeover_that_commits_during_the_statement_is_seen_by_its_fence(
    bench: Bench, one: Station, statement: str, rows: str
) -> None:
    """The statement's snapshot still shows the old token; the lock finds the new one."""
    old = await begin(one, "k")
    query = load(SCHEMA)[statement if rows == "many" else f"{statement}:one"]
    held_up = query.replace(b"where key = w.key", b"where pg_advisory_xact_lock(7) is not null and key = w.key")
    assert held_up != query
    row: dict[str, Any] = {
        "key": old.key, "token": old.token, "worker": old.worker, "phase": 1, "name": "s", "kind": 2, "state": 2,
        "has_undo": False, "placed": True, "overlapped": False, "output": None, "content_type": None, "final": 3,
        "result": None, "status": None, "sent": None, "arguments": None,
    }  # fmt: skip
    if rows == "many":
        row = {column: [value] for column, value in row.items()}
    async with await psycopg.AsyncConnection.connect(bench.dsn) as zombie:
        bench.run("select pg_advisory_lock(7)")
        try:
            writing = asyncio.create_task(zombie.execute(held_up, row))
            await until(lambda: bench.waiting() == 1, "the statement has its snapshot")
            assert await one.leases.retake(old.key, old.token) is not None
        finally:
            bench.run("select pg_advisory_unlock(7)")
        assert await (await writing).fetchall() == []
        await zombie.rollback()


async def _tx(station: Station, holding: LeasedSaga, *, undo: bool) -> None:
    async with station.leases.step(holding, "s", has_undo=True, undo=undo) as step:
        await step.finish(None if undo else OUTPUT, overlapped=False)


def forward(station: Station, holding: LeasedSaga) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "tx": lambda: _tx(station, holding, undo=False),
        "intent": lambda: intend(station, holding),
        "output": lambda: record(station, holding),
        "rejection": lambda: record(station, holding, state=StepState.REJECTED),
    }


def backward(station: Station, holding: LeasedSaga) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "undo of a tx": lambda: _tx(station, holding, undo=True),
        "undo intent": lambda: station.leases.intend(holding, "s", has_undo=True, undo=True),
        "undone": lambda: record(station, holding, state=StepState.UNDONE),
    }


@pytest.mark.parametrize("end", ["tx", "output", "rejection"])
async def test_a_step_that_has_come_to_its_end_is_not_written_forward_again(
    bench: Bench, one: Station, end: str
) -> None:
    """Even by its rightful owner: whatever made a run forget it, nothing is done twice."""
    writes = forward(one, await begin(one, "k"))
    await writes[end]()
    before = bench.run("select * from idemconsumer.step")
    for again in writes.values():
        with pytest.raises(Fenced, match="already ended"):
            await again()
    assert bench.run("select * from idemconsumer.step") == before


@pytest.mark.parametrize("end", ["undo of a tx", "undone"])
async def test_a_step_is_undone_once_and_keeps_what_it_was(bench: Bench, one: Station, end: str) -> None:
    holding = await begin(one, "k")
    await forward(one, holding)["tx" if end == "undo of a tx" else "output"]()
    ((position, output),) = bench.run("select position, output from idemconsumer.step")
    undoing = await one.leases.undo(holding, StoredResult(b"{}"))
    assert undoing is not None
    writes = backward(one, undoing)
    if end == "undone":
        with pytest.raises(Fenced):
            await writes["undone"]()  # nothing was said to the remote yet
        await writes["undo intent"]()
    await writes[end]()
    kept = (int(StepState.UNDONE), position, output)
    assert bench.run("select state, position, output from idemconsumer.step") == [kept]
    for again in (*writes.values(), *forward(one, undoing).values()):
        with pytest.raises(Fenced, match="already ended"):
            await again()
