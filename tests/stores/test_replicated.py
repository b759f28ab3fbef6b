"""R42: a database that other tools replicate, or that was filled by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import LiteralString

import psycopg
import pytest

from idemconsumer.worker.retention import prune_once
from tests.support.ledger import SCHEMA, Ledger
from tests.support.servers.made import PrivatePostgres
from tests.support.servers.postgres import fresh_database
from tests.support.tuning import tuned

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
def published(_logical: Ledger) -> Ledger:
    """All tables of its database are in a publication, as Debezium makes it."""
    _logical.clear()
    return _logical


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
