"""R42, R43: a database that other tools replicate, or that was filled by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, LiteralString

import psycopg
import pytest

from idemconsumer.engine.engine import Engine
from idemconsumer.errors import ConfigurationError, StoreChanged, StoreUnavailable
from idemconsumer.handlers.arguments import Tx
from idemconsumer.handlers.decorator import Handler, idempotent_handler
from idemconsumer.sql.queries import NUMBERED
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.session import PoolSession
from idemconsumer.worker.retention import prune_once
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, works
from tests.support.servers.made import PrivatePostgres
from tests.support.servers.postgres import fresh_database, lent
from tests.support.tuning import tuned
from tests.support.waiting import until

UNIDENTIFIED: LiteralString = """
select c.relname from pg_class as c
where c.relnamespace = 'idemconsumer'::regnamespace and c.relkind in ('r', 'p') and c.relreplident not in ('f', 'i')
    and not exists (select from pg_index as i where i.indrelid = c.oid and i.indisprimary)
"""
# What one pass prunes, besides records.
OLD: LiteralString = """
insert into idemconsumer.scope (name, seen_at) values ('old', now() - interval '3 days')
    on conflict (name) do update set seen_at = excluded.seen_at, retired_at = null;
insert into idemconsumer.attempt (key, scope_id, count, changed_at)
    select 'k', id, 1, now() - interval '1 year' from idemconsumer.scope where name = 'old';
insert into idemconsumer.signal (key, scope_id, name, body, sent_at)
    select 'k', id, 's', '', now() - interval '1 year' from idemconsumer.scope where name = 'old';
insert into idemconsumer.delivery_log
    values (now(), now() - interval '1 day', 'a', 'h', 'w', '{1}', 's', '', '', '{1}', '{1}', '{1}');
"""
LEFT: LiteralString = """
select 'attempt' from idemconsumer.attempt union all select 'signal' from idemconsumer.signal
union all select 'delivery_log' from idemconsumer.delivery_log
union all select 'scope' from idemconsumer.scope where name = 'old' and retired_at is null order by 1
"""


@pytest.fixture(scope="module")
def _logical(private_postgres: PrivatePostgres) -> Iterator[Ledger]:
    server = private_postgres(settings={"wal_level": "logical"})
    with fresh_database(server.dsn) as dsn, closing(Ledger(dsn)) as ledger:
        ledger.run("create publication everything for all tables")
        yield ledger


@pytest.fixture
def published(_logical: Ledger) -> Iterator[Ledger]:
    """All tables of its database are in a publication, as Debezium makes it."""
    with lent(_logical) as ledger:
        yield ledger


def test_each_table_says_which_row_is_which(shared_ledger: Ledger) -> None:
    assert shared_ledger.run(UNIDENTIFIED) == []


async def test_what_is_published_is_pruned_too(published: Ledger) -> None:
    published.run(OLD)
    await prune_once(published.dsn, SCHEMA)
    assert published.run(LEFT) == []


@pytest.mark.parametrize("table", ["attempt", "signal", "delivery_log"])
async def test_what_cannot_be_pruned_keeps_nothing_else(published: Ledger, table: LiteralString) -> None:
    published.run(OLD)
    published.run("create function refuse() returns trigger language plpgsql as $$ begin raise 'kept'; end $$")
    on: LiteralString = f"on idemconsumer.{table}"
    published.run(f"create trigger refuse before delete {on} for each row execute function refuse()")
    try:
        with pytest.raises(psycopg.errors.RaiseException, match="kept"):
            await prune_once(published.dsn, SCHEMA, every=60.0)
        assert published.run(LEFT) == [(table,)]
        assert await prune_once(published.dsn, SCHEMA, every=60.0) is None, "the pass is over"
    finally:
        published.run("drop function refuse cascade")


async def test_a_range_that_cannot_be_pruned_keeps_no_other(published: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, retention_blocks=1)
    published.run("insert into idemconsumer.scope (name) values ('seen') on conflict do nothing")
    published.run(
        "begin; select set_config('idemconsumer.open', 't', true);"
        " insert into idemconsumer.record (key, scope_id, state, changed_at)"
        " select sha256(n::text::bytea), s.id, 3, now() - interval '1 year'"
        " from generate_series(1, 500) as n, idemconsumer.scope as s where s.name = 'seen';"
        " select idemconsumer.seal('t'); commit"
    )
    published.run(OLD)
    published.run(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin if old.ctid = '(0,1)' then raise 'kept'; end if; return old; end $$"
    )
    published.run("create trigger refuse before delete on idemconsumer.record for each row execute function refuse()")
    try:
        with pytest.raises(psycopg.errors.RaiseException, match="kept"):
            await prune_once(published.dsn, SCHEMA)
        assert published.run("select distinct (ctid::text::point)[0] from idemconsumer.record") == [(0,)]
        assert published.run(LEFT) == []
    finally:
        published.run("drop function refuse cascade")


# ------------------------------------------------------------------------------------------------------ sequences (R43)
IDENTITIES: LiteralString = """
select c.relname from pg_class as c join pg_attribute as a on a.attrelid = c.oid
where c.relnamespace = 'idemconsumer'::regnamespace and a.attidentity <> '' order by 1
"""
COLUMNS: LiteralString = """
select column_name, data_type from information_schema.columns where table_schema = 'idemconsumer' and table_name = %s
    and is_nullable = 'NO' and is_identity = 'NO'
"""
VALUES = {
    "text": "'x'",
    "uuid": "gen_random_uuid()",
    "bytea": "''",
    "jsonb": "'[]'",
    "ARRAY": "'{}'",
    "interval": "'1 day'",
    "boolean": "true",
}


def filled(ledger: Ledger, table: str) -> None:
    """One row, with whatever its columns take."""
    columns = ledger.run(COLUMNS, [table])
    names = "".join(f"{name}, " for name, _ in columns)
    values = "".join(VALUES.get(kind, "now()" if kind.startswith("timestamp") else "1") + ", " for _, kind in columns)
    ledger.run(f"insert into idemconsumer.{table} ({names} id) overriding system value values ({values} 700)")


def remedy_of(refusal: Exception) -> str:
    return str(refusal).partition("run as the schema's owner: ")[2]


def test_each_table_whose_rows_are_numbered_is_known(shared_ledger: Ledger) -> None:
    assert [table for (table,) in shared_ledger.run(IDENTITIES)] == sorted(NUMBERED)


async def test_a_sequence_behind_its_table_is_refused_until_its_remedy_was_run(shared_ledger: Ledger) -> None:
    for table in NUMBERED:
        filled(shared_ledger, table)
    shared_ledger.run(  # numbered from a sequence that stands by itself
        "begin; select set_config('idemconsumer.open', 't', true); insert into idemconsumer.step"
        " (key, name, kind, state, has_undo, position, token, started_at)"
        " values ('k', 's', 1, 2, false, 700, 1, now());"
        " select idemconsumer.seal('t'); commit"
    )
    tables = ", ".join(sorted([*NUMBERED, "step"]))
    with pytest.raises(ConfigurationError, match=f"sequences are behind the rows of {tables}, as after") as refused:
        await check_database(shared_ledger.dsn, SCHEMA)
    shared_ledger.run(remedy_of(refused.value))
    await check_database(shared_ledger.dsn, SCHEMA)


async def test_a_table_that_somebody_has_locked_is_not_waited_for(book: Ledger) -> None:
    filled(book, "audit")
    with psycopg.connect(book.dsn) as other:
        other.execute("lock table idemconsumer.audit, idemconsumer.scope in access exclusive mode")
        await check_database(book.dsn, SCHEMA)


async def test_after_logical_replication_what_is_behind_is_said(published: Ledger) -> None:
    """As a subscription leaves them: the rows are there, and the sequences stand where they began."""
    for table in ("scope", "dead_letter", "queue", "audit"):
        filled(published, table)
    with fresh_database(published.dsn) as dsn, closing(Ledger(dsn)) as copy:
        copy.run("truncate idemconsumer.upkeep, idemconsumer.migration")
        published.run("select pg_create_logical_replication_slot('copy', 'pgoutput')")
        copy.run(
            f"create subscription copy connection '{published.dsn}' publication everything"
            " with (create_slot = false, slot_name = copy)"
        )
        try:
            await until(lambda: copy.run("select 1 from pg_subscription_rel where srsubstate <> 'r'") == [])
            with pytest.raises(ConfigurationError, match="are behind the rows of audit, dead_letter, queue, scope, as"):
                await check_database(copy.dsn, SCHEMA)
        finally:
            copy.run("alter subscription copy disable")
            copy.run("alter subscription copy set (slot_name = none)")
            copy.run("drop subscription copy")
            published.run(
                "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where active_pid is not null"
            )
            published.run("select pg_drop_replication_slot('copy')")


@idempotent_handler(SOURCE, key="id", max_attempts=1)
async def _fails(item: dict[str, str]) -> None:
    raise ValueError


@idempotent_handler(SOURCE, key="id")
async def _publishes(item: dict[str, str], tx: Tx) -> None:
    await tx.execute("select idemconsumer.publish('q', '{}')")


@idempotent_handler(SOURCE, key="id", max_attempts=2, backoff="1d, 1d")
async def _put_off(item: dict[str, str]) -> None:
    raise ValueError


@pytest.mark.parametrize(
    ("table", "handler", "kind"),
    [
        ("dead_letter", _fails, "dead"),
        ("scope", _publishes, "applied"),
        ("queue", _publishes, "applied"),
        ("delayed", _put_off, "retrying"),
    ],
)
async def test_a_number_that_is_taken_is_nobodys_fault(
    ledger: Ledger, store: PostgresStore, table: LiteralString, handler: Handler[..., Any], kind: str
) -> None:
    """Neither the handler's nor fatal: it is waited for until what is said was run."""
    engine = Engine(store, watched=True)
    ledger.run(f"select nextval('idemconsumer.{table}_id_seq')")
    filled(ledger, table)
    behind: LiteralString = f"select setval('idemconsumer.{table}_id_seq', 699)"
    ledger.run(behind)
    with pytest.raises(StoreUnavailable, match=f"the sequence of table {table} returns numbers") as said:
        await engine.run(works(handler, "a"))
    assert ledger.attempts == ([1] if handler is _fails else []), "of a failure of its own alone"
    ledger.run(behind)
    ledger.run(remedy_of(said.value))
    assert kinds(await engine.run(works(handler, "a"))) == [kind]


async def test_what_somebody_elses_trigger_says_about_our_tables_is_nobodys_fault(
    ledger: Ledger, store: PostgresStore
) -> None:
    ledger.run("create function refuse() returns trigger language plpgsql as $$ begin raise 'not now'; end $$")
    ledger.run("create trigger refuse before insert on idemconsumer.dead_letter execute function refuse()")
    with pytest.raises(StoreUnavailable, match="P0001: not now"):
        await Engine(store).run(works(_fails, "a"))
    ledger.run("drop function refuse cascade")
    assert kinds(await Engine(store).run(works(_fails, "a"))) == ["dead"]


# --------------------------------------------------------------------------------------------- whose statement it was
@idempotent_handler(SOURCE, key="id", max_attempts=1)
async def _writes(item: dict[str, str], tx: Tx) -> str:
    await tx.execute("insert into witness (id) values (%s)", (item["id"],))
    return "done"


@idempotent_handler(SOURCE, key="id", max_attempts=1)
async def _lacks(item: dict[str, str], tx: Tx) -> None:
    await tx.execute("select 1 from of_the_user")


DEFERRED: LiteralString = """
create function refuse() returns trigger language plpgsql as $$ begin perform 1 from of_the_user; return null; end $$;
create constraint trigger refuse after insert on witness deferrable initially deferred
    for each row execute function refuse()
"""


VIOLATED: LiteralString = """
create function violate() returns trigger language plpgsql as $$ begin raise foreign_key_violation; end $$;
create constraint trigger violate after insert on witness deferrable initially deferred
    for each row when (new.id = 'a') execute function violate()
"""


@pytest.mark.parametrize("group", [["a"], ["a", "b"]])
@pytest.mark.parametrize(
    ("gone", "back"),
    [
        ("function idemconsumer.seal(text) rename to gone", "function idemconsumer.gone(text) rename to seal"),
        ("table idemconsumer.result rename body to gone", "table idemconsumer.result rename gone to body"),
    ],
)
async def test_what_is_missing_when_a_handler_has_run_is_not_its_failure(
    ledger: Ledger, store: PostgresStore, group: list[str], gone: LiteralString, back: LiteralString
) -> None:
    engine = Engine(store)
    ledger.run("alter " + gone)
    with pytest.raises(StoreChanged, match=r"does not exist.*run `idemconsumer migrate up` first"):
        await engine.run(works(_writes, *group))
    ledger.run("alter " + back)
    assert kinds(await engine.run(works(_writes, *group))) == ["applied"] * len(group)
    assert ledger.attempts == []


async def test_what_a_handlers_own_statements_lack_is_its_failure(ledger: Ledger, store: PostgresStore) -> None:
    """Also one that its deferred trigger sends, at the engine's COMMIT."""
    engine = Engine(store)
    assert kinds(await engine.run(works(_lacks, "a"))) == ["dead"]
    ledger.run(DEFERRED)
    assert kinds(await engine.run(works(_writes, "b"))) == ["dead"]
    ledger.run("drop function refuse cascade")
    assert (ledger.effects, [reason for reason, _ in ledger.letters]) == ([], ["attempts_exhausted"] * 2)


@pytest.mark.parametrize("whose", ["ours", "ours, met before", "its own"])
async def test_what_others_have_met_may_be_back_when_it_is_asked_for(
    ledger: Ledger, store: PostgresStore, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Else a good message would be dead, since its statement works again when it is sent without the handler."""
    engine, rollback = Engine(store), PoolSession.rollback
    if whose == "its own":
        ledger.run(VIOLATED)

    async def met() -> None:
        ledger.run("alter function idemconsumer.seal(text) rename to gone")
        with pytest.raises(StoreChanged):
            await engine.run(works(_writes, "another"))

    async def mended(session: PoolSession) -> None:
        if whose != "its own":
            ledger.run("alter function idemconsumer.gone(text) rename to seal")
        await rollback(session)

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def meets(item: dict[str, str], tx: Tx) -> None:
        await tx.execute("insert into witness (id) values (%s)", (item["id"],))
        if whose == "ours, met before":
            ledger.run("alter function idemconsumer.seal(text) rename to gone")
        else:
            await met()
        if whose == "its own":
            ledger.run("alter function idemconsumer.gone(text) rename to seal")
        monkeypatch.setattr(PoolSession, "rollback", mended)

    if whose == "ours, met before":
        await met()
        ledger.run("alter function idemconsumer.gone(text) rename to seal")
    if whose != "its own":
        with pytest.raises(StoreChanged, match="does not exist"):
            await engine.run(works(meets, "a"))
    else:
        assert kinds(await engine.run(works(meets, "a"))) == ["dead"]
    assert ledger.effects == []


async def test_what_somebody_elses_trigger_says_after_a_handler_is_not_its_failure(
    ledger: Ledger, store: PostgresStore
) -> None:
    ledger.run("create function refuse() returns trigger language plpgsql as $$ begin raise 'not now'; end $$")
    ledger.run("create trigger refuse before insert on idemconsumer.result execute function refuse()")
    with pytest.raises(StoreUnavailable, match="P0001: not now"):
        await Engine(store).run(works(_writes, "a"))
    ledger.run("drop function refuse cascade")
    assert kinds(await Engine(store).run(works(_writes, "a"))) == ["applied"]
