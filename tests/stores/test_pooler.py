"""R18: behind PgBouncer the role carries the settings; a pooler that takes them away is refused."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import closing, suppress
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from idemconsumer import Saga, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import OutcomeKind
from idemconsumer.sql.connecting import connect, connect_async
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.migrations import migrate
from idemconsumer.worker.retention import prune_once
from tests.support.inside import own_pool
from tests.support.ledger import SCHEMA, SOURCE, Ledger, OpenStore, kinds, to_the_end, works
from tests.support.sagas import Bench, Station, saga
from tests.support.servers.made import PrivatePgBouncer
from tests.support.servers.pgbouncer import CARRIED, carry

POOLERS = [
    pytest.param(mode, newer, ignored, id=f"{mode}, {'newer' if newer else 'debian'}{', ' + ignored}")
    for mode in ("session", "transaction")
    for newer in (False, True)
    for ignored in ("", "options")
]


@pytest.fixture
def carried(ledger: Ledger) -> Ledger:
    """Its role carries what our sessions need."""
    carry(ledger.dsn)
    return ledger


@pytest.mark.parametrize(("mode", "newer", "ignored"), POOLERS)
async def test_a_pooler_that_drops_settings_is_refused_until_the_role_carries_them(
    ledger: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore, mode: str, newer: bool, ignored: str
) -> None:
    settings = {"ignore_startup_parameters": ignored} if ignored else {}
    pooler = private_pgbouncer(ledger.dsn, mode, newer=newer, settings=settings)
    with pytest.raises(ConfigurationError, match=r"default_transaction_read_only is 'off'.*RECONNECT") as refused:
        await open_store(pooler.dsn)
    statements: Any = re.search(r"run: (.*); then", str(refused.value))
    ledger.run(cast(LiteralString, statements[1]))
    pooler.reconnect()
    store = await open_store(pooler.dsn)
    await guarded(store, ledger)


ASKED = "-c search_path=tenant,public -csynchronous_commit=remote_apply --app.tenant=a\\ b --work-mem=5000kB"


@pytest.mark.parametrize(("mode", "newer", "ignored"), POOLERS)
@pytest.mark.parametrize("by", ["address", "PGOPTIONS"])
async def test_what_the_address_asks_for_and_a_pooler_drops_is_refused(
    carried: Ledger,
    private_pgbouncer: PrivatePgBouncer,
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    newer: bool,
    ignored: str,
    by: str,
) -> None:
    carried.run("create schema tenant; create table tenant.witness (id text, note text)")
    settings = {"ignore_startup_parameters": ignored} if ignored else {}
    pooler = private_pgbouncer(carried.dsn, mode, newer=newer, settings=settings)
    dsn = pooler.dsn
    if by == "address":
        dsn = make_conninfo(dsn, options=ASKED)
    else:
        monkeypatch.setenv("PGOPTIONS", ASKED)
    with pytest.raises(ConfigurationError, match=r"search_path is .*public.*; a pooler does not forward") as refused:
        await open_store(dsn)
    with pytest.raises(ConfigurationError, match="SET synchronous_commit = 'remote_apply'; "):
        connect(dsn)
    with pytest.raises(ConfigurationError, match="SET synchronous_commit = 'remote_apply'; "):
        await connect_async(dsn)
    statements: Any = re.search(r"run: (.*); then", str(refused.value))
    carried.run(cast(LiteralString, statements[1]))
    with monkeypatch.context() as console:
        console.delenv("PGOPTIONS", raising=False)
        pooler.reconnect()
    store = await open_store(dsn)
    connect(dsn).close()
    await (await connect_async(dsn)).close()

    @idempotent_handler(SOURCE, key="id")
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("insert into witness (id) select current_setting('app.tenant')")

    assert kinds(await Engine(store).run(works(handle, 1))) == ["applied"]
    assert carried.run("select id from tenant.witness") == [("a b",)]
    assert carried.run("select id from public.witness") == []


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_who_reads_a_suspect_is_known_to_be_alive(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore, mode: str
) -> None:
    store = await open_store(private_pgbouncer(carried.dsn, mode).dsn)
    claim = Claim(key=b"k" * 32, scope="shop/-/handle", fingerprint=None)
    held = "select count(*) from pg_locks where locktype = 'advisory'"
    async with store.reading([claim], 1), store.reading([claim], 2) as rival:
        assert (rival.ours, rival.begun) == (set(), set())
    assert carried.run(held) == [(0,)]
    async with store.reading([claim], 3) as next_one:
        assert (next_one.ours, next_one.begun) == (set(), {claim.key})


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_who_waits_for_a_lock_is_recognized_by_the_servers_own_pid(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore, mode: str
) -> None:
    async def take(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("insert into witness (id) values ('taken')")

    brief, patient = (idempotent_handler(SOURCE, key="id", timeout=each, max_attempts=1) for each in ("300ms", "20s"))

    @idempotent_handler(SOURCE, key="id", timeout="300ms", max_attempts=2)
    async def asleep(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("select pg_sleep(60)")

    engine = Engine(await open_store(private_pgbouncer(carried.dsn, mode).dsn))
    (work,) = works(brief(take), 1)
    with psycopg.connect(carried.dsn) as rival:
        rival.execute("set transaction read write")
        rival.execute("lock table witness")
        assert [(await engine.process(work)).reason for _ in range(3)] == ["contention"] * 3
    assert kinds(await to_the_end(engine, works(patient(take), 1))) == ["applied"]
    assert (await engine.process(*works(asleep, 2))).reason == "retry"


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_step_that_waits_for_a_lock_is_recognized_too(
    ledger: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore, mode: str
) -> None:
    async def take(tx: Tx) -> None:
        await tx.execute("insert into effect (name) values ('taken')")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        for connection in own_pool(station.store)._pool:
            connection._told = 0  # by the transactions before this step, in the same process of the server
        await saga.tx("s", take)

    with closing(Bench(ledger.dsn)) as bench:
        carry(ledger.dsn)
        station = Station(await open_store(private_pgbouncer(ledger.dsn, mode).dsn), bench.register(), None)
        handler = saga(book, max_attempts=1, timeout="300ms")
        with psycopg.connect(ledger.dsn) as rival:
            rival.execute("set transaction read write")
            rival.execute("lock table effect")
            outcomes = [await station.deliver(handler)]
            outcomes += [await station.resume(handler) for _ in range(2)]
            assert {outcome.kind for outcome in outcomes} == {OutcomeKind.RETRYING}
        *_, last = await station.to_the_end(saga(book, max_attempts=1, timeout="20s"), outcomes[-1])
        assert last.kind is OutcomeKind.APPLIED
        assert bench.effects == ["taken"]


async def guarded(store: PostgresStore, ledger: Ledger) -> None:
    """Messages of several lanes are applied once, and nobody but the engine commits."""

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] < 40:
            for _ in range(4):
                await tx.execute("select 1 from witness where id = %s", (str(order["id"]),))
            await tx.execute("insert into witness (id) values (%s)", (str(order["id"]),))
            return
        await tx.connection.rollback()
        with suppress(psycopg.Error):
            await tx.connection.execute("insert into witness (id) values ('after the rollback')")

    engine = Engine(store)

    async def lane(first: int) -> list[str]:
        ended: list[str] = []
        for number in [*range(first, 40, 4), first, 40 + first]:
            ended += kinds(await engine.run(works(handle, number)))
        return ended

    async with asyncio.timeout(60):
        ended = Counter(kind for lane_ended in await asyncio.gather(*map(lane, range(4))) for kind in lane_ended)
    assert ended == {OutcomeKind.APPLIED: 40, OutcomeKind.DUPLICATE: 4, OutcomeKind.DEAD: 4}
    assert Counter(ledger.effects) == Counter(str(number) for number in range(40))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("idle_in_transaction_session_timeout", "0"),
        ("idle_in_transaction_session_timeout", "29s"),
        ("idle_in_transaction_session_timeout", "2h"),
        ("statement_timeout", "0"),
        ("statement_timeout", "29s"),
        ("lock_timeout", "0"),
        ("client_connection_check_interval", "0"),
        ("default_transaction_read_only", "off"),
        ("default_transaction_isolation", "serializable"),
        ("array_nulls", "off"),
    ],
)
async def test_each_setting_of_the_role_is_read_back(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, name: str, value: str
) -> None:
    carry(carried.dsn, {name: value})
    pooler = private_pgbouncer(carried.dsn, "transaction")
    with pytest.raises(
        ConfigurationError, match=rf"database: {name} is '[^']*'; .* SET {name} = '{CARRIED.get(name, 'on')}'; then"
    ):
        await check_database(pooler.dsn, SCHEMA)


async def test_a_lease_bounds_what_the_role_may_allow(carried: Ledger, private_pgbouncer: PrivatePgBouncer) -> None:
    pooler = private_pgbouncer(carried.dsn, "transaction")
    await check_database(pooler.dsn, SCHEMA)
    with pytest.raises(ConfigurationError, match=r"idle_in_transaction_session_timeout is '35000ms'.*'20000ms'"):
        await check_database(pooler.dsn, SCHEMA, lease=20.0)
    carry(carried.dsn, {"idle_in_transaction_session_timeout": "20s"})
    pooler.reconnect()
    await check_database(pooler.dsn, SCHEMA, lease=20.0)


async def test_one_value_of_the_role_has_to_do_for_handlers_and_sagas(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer
) -> None:
    pooler = private_pgbouncer(carried.dsn, "transaction")
    carry(carried.dsn, {"idle_in_transaction_session_timeout": "0"})
    with pytest.raises(ConfigurationError, match=r"SET idle_in_transaction_session_timeout = '32000ms'; then"):
        await check_database(pooler.dsn, SCHEMA, beside=32.0)
    with pytest.raises(ConfigurationError, match=r"lease of sagas, 20 s, is below the longest timeout .*, 30 s"):
        await check_database(pooler.dsn, SCHEMA, beside=20.0)
    await check_database(carried.dsn, SCHEMA, beside=20.0)


@pytest.mark.parametrize("newer", [False, True])
async def test_a_pooler_that_holds_no_transaction_is_refused(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, newer: bool
) -> None:
    pooler = private_pgbouncer(carried.dsn, "statement", newer=newer)
    with pytest.raises(ConfigurationError, match="set pool_mode = transaction or session"):
        await check_database(pooler.dsn, SCHEMA)


@pytest.mark.parametrize("newer", [False, True])
async def test_nothing_is_prepared_where_the_next_transaction_may_run_elsewhere(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore, newer: bool
) -> None:
    settings = {"max_prepared_statements": "0"} if newer else {}
    store = await open_store(private_pgbouncer(carried.dsn, "transaction", newer=newer, settings=settings).dsn)
    pids = set()
    async with store.pool.connection() as first, store.pool.connection() as second:
        for _ in range(6):  # each leaves a session of the server to the other one
            async with first.transaction():
                await first.execute("select %s::text", ("a",))
                async with second.transaction():
                    await second.execute("select %s::text", ("a",))
                    pids |= {row[0] for row in await (await second.execute("select pg_backend_pid()")).fetchall()}
            async with second.transaction():
                pids |= {row[0] for row in await (await second.execute("select pg_backend_pid()")).fetchall()}
            assert await store.pool.run(first, "waiting", {"names": ["x"]}) == [(0, 0)]
    assert len(pids) > 1


@pytest.mark.parametrize("newer", [False, True])
async def test_the_next_pass_of_pruning_finds_no_lock_of_the_last_one(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, newer: bool
) -> None:
    pooler = private_pgbouncer(carried.dsn, "transaction", newer=newer)
    assert await prune_once(pooler.dsn, SCHEMA) == 0
    assert await prune_once(carried.dsn, SCHEMA) == 0


def test_migrations_run_through_a_pooler(database: str, private_pgbouncer: PrivatePgBouncer) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("alter database {} set default_transaction_read_only = on").format(name))
    pooler = private_pgbouncer(database, "transaction")
    assert migrate(pooler.dsn, SCHEMA)
    assert migrate(pooler.dsn, SCHEMA) == []


STATE = (
    "select current_setting('search_path'), current_setting('default_transaction_read_only'),"
    " current_setting('session_replication_role'),"
    " (select count(*) from pg_locks where locktype = 'advisory' and objid = 7)"
)
ONE = {"default_pool_size": "1"}  # so that the next transaction gets the same session


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("end", ["raises", "returns"])
@pytest.mark.parametrize(
    "statements",
    [
        ["select pg_advisory_lock(7)"],
        ["set search_path = other"],
        ["rollback", "set search_path = other"],
        ["rollback", "set default_transaction_read_only = off"],
        ["rollback", "set session_replication_role = replica"],
        ["rollback; set search_path = other"],
    ],
    ids=", ".join,
)
async def test_what_a_handler_leaves_in_a_poolers_session_reaches_nobody(
    carried: Ledger,
    private_pgbouncer: PrivatePgBouncer,
    open_store: OpenStore,
    statements: list[LiteralString],
    end: str,
    newer: bool,
) -> None:
    store = await open_store(private_pgbouncer(carried.dsn, "transaction", newer=newer, settings=ONE).dsn)
    seen: list[object] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=1)
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] != "changes":
            seen.append(await (await tx.execute(STATE)).first())
            return
        for statement in statements:
            await tx.connection.execute(statement)
        if end == "raises":
            raise ValueError

    engine = Engine(store)
    assert kinds(await engine.run(works(handle, "before"))) == ["applied"]
    kept = end == "returns" and not statements[0].startswith("rollback")
    assert kinds(await engine.run(works(handle, "changes"))) == ["applied" if kept else "dead"]
    assert kinds(await engine.run(works(handle, "after"))) == ["applied"]
    assert seen[0] == seen[1]


TOLD = "select " + ", ".join(
    f"current_setting('{name}')" for name in ("timezone", "datestyle", "application_name", "client_encoding")
)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_what_libpq_asked_for_outlasts_each_reset(
    carried: Ledger,
    private_pgbouncer: PrivatePgBouncer,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    newer: bool,
) -> None:
    """The pooler sets it in the server's session, where RESET ALL takes it away; the pooler learns that."""
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    monkeypatch.setenv("PGDATESTYLE", "SQL, DMY")
    pooler = private_pgbouncer(carried.dsn, mode, newer=newer, settings=ONE)
    seen: list[object] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        act, _, _ = order["id"].partition(" ")
        if act == "looks":
            seen.append(await (await tx.execute(TOLD)).first())
        elif act == "resets":
            await tx.execute("reset all")
        else:
            await (tx if act == "sets" else tx.connection).execute("set local timezone = 'Europe/Berlin'")
        if act == "fails":
            raise ValueError

    store = await PostgresStore.open(pooler.dsn, SCHEMA, connections=1, longest_run=30.0)  # all that the pooler has
    engine = Engine(store)
    for n, (act, outcome) in enumerate(
        {"takes": "applied", "fails": "dead", "resets": "applied", "sets": "applied"}.items()
    ):
        assert kinds(await to_the_end(engine, works(handle, f"{act} {n}"))) == [outcome]
        assert kinds(await to_the_end(engine, works(handle, f"looks after {n}"))) == ["applied"]
        group = works(handle, f"looks first {n}", f"{act} in {n}", f"looks last {n}")
        assert kinds(await to_the_end(engine, group)) == ["applied", outcome, "applied"]
    assert set(seen) == {("Asia/Tokyo", "SQL, DMY", "idemconsumer", "UTF8")}
    await store.close()


@pytest.mark.parametrize("end", ["rollback", "commit"])
async def test_once_a_handler_has_ended_its_transaction_nothing_more_is_sent(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore, end: LiteralString
) -> None:
    """The pooler would send it to any session, while only one is reset."""
    engine = Engine(await open_store(private_pgbouncer(carried.dsn, "transaction").dsn))
    sent: list[str] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        with suppress(psycopg.Error):  # the guard refuses a COMMIT
            await tx.connection.execute(end)
        await tx.connection.execute("set search_path = other")
        sent.append("set")

    assert kinds(await engine.run(works(handle, 1))) == ["dead"]
    assert sent == []
    assert "leave COMMIT and ROLLBACK to the engine" in carried.run("select error from idemconsumer.dead_letter")[0][0]


async def test_transactions_are_read_committed_whatever_a_stranger_has_set_in_the_poolers_session(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore
) -> None:
    pooler = private_pgbouncer(carried.dsn, "transaction", settings=ONE)
    engine, seen = Engine(await open_store(pooler.dsn)), list[str]()

    @idempotent_handler(SOURCE, key="id")
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        seen.append(await (await tx.execute("select current_setting('transaction_isolation')", into=str)).one())

    assert kinds(await engine.run(works(handle, "before"))) == ["applied"]
    with psycopg.connect(pooler.dsn, autocommit=True) as stranger:
        stranger.execute("set default_transaction_isolation = serializable")
    assert kinds(await engine.run(works(handle, "after"))) == ["applied"]
    assert seen == ["read committed"] * 2


@pytest.mark.parametrize(
    "statement", ["set default_transaction_read_only = off", "set session_replication_role = replica"]
)
async def test_a_poolers_session_without_our_rules_claims_nothing_and_is_dropped(
    carried: Ledger, private_pgbouncer: PrivatePgBouncer, open_store: OpenStore, statement: LiteralString
) -> None:
    pooler = private_pgbouncer(carried.dsn, "transaction", settings=ONE)
    engine = Engine(await open_store(pooler.dsn))

    @idempotent_handler(SOURCE, key="id")
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        pass

    assert kinds(await engine.run(works(handle, "before"))) == ["applied"]
    with psycopg.connect(pooler.dsn, autocommit=True) as stranger:
        stranger.execute(statement)
    with pytest.raises(StoreUnavailable, match="somebody has changed"):
        await engine.run(works(handle, "after"))
    assert kinds(await engine.run(works(handle, "after"))) == ["applied"]
