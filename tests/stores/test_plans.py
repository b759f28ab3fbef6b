"""G5: a statement that was planned while the tables were empty stays an index lookup when they are full."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import psycopg
import pytest
from psycopg import sql

from idemconsumer.admin.dead_letters import Which
from idemconsumer.rules.claim import Claim
from idemconsumer.sql.queries import load
from idemconsumer.stores.columns import claimed
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.migrations import migrate
from tests.support.ledger import SCHEMA, Ledger

KEYS = 50_000
GROUP = 32


def params(name: str) -> Mapping[str, Any]:
    keys = [secrets.token_bytes(32) for _ in range(GROUP)]
    many = {"keys": keys}
    holder: dict[str, Any] = {"key": keys[0], "token": 1, "worker": 1, "phase": 1}
    step: dict[str, Any] = {**holder, "name": "s", "kind": 2, "state": 1, "has_undo": False, "arguments": b""}
    rows: dict[str, dict[str, Any]] = {
        "begin_sagas": {
            "key": keys[0], "scope": 1, "handler": "h", "worker": 1, "version": None, "source": "s", "position": "p",
            "message_id": None, "body": b"{}", "headers": b"{}", "delivered": b"{}", "parent": None,
        },
        "begin_steps": {**step, "placed": True},
        "finish_steps": {**step, "overlapped": False, "output": b"{}", "content_type": "json"},
        "end_sagas": {**holder, "final": 3, "result": b"{}", "content_type": "json", "status": 200, "sent": None},
    }  # fmt: skip
    claims = {"claims": claimed([Claim(key, "", None) for key in keys], [1] * GROUP)}
    results = {"bodies": [b"{}"] * GROUP, "types": ["json"] * GROUP, "statuses": None, "headers": None}
    saga = {"key": keys[0], "worker": 1}
    taking = {
        "worker": 1, "handlers": ["h", "i"], "versions": ["", ""], "scopes": "s", "app": "s", "grace": 600.0,
        "unheld": keys[:1], "tokens": [1],
    }  # fmt: skip
    others = {"key": keys[0], "app": "s", "handler": "h", "version": None, "grace": 600.0, "build": "b"}
    deliveries = {"ids": [1, 2], "delivery_tokens": [1, 2]}
    opening = {"seal": "t", "lock_timeout": "10s"}
    each: dict[str, Mapping[str, Any]] = {
        "open": opening,
        "open_sealed": {**opening, "session": ""},
        "seal": {"seal": "t"},
        "claim": {**claims, "state": 3},
        "store_results": {**many, **results},
        "forget_attempts": many,
        "take": {"names": ["q"], "limits": [10], "bytes": 1_000_000, "most": 1_000_000, "visibility": 10.0, "taker": 1},
        "fall_due": {"names": ["q", "~a/h"], "limit": 200},
        "waiting": {"names": ["q", "~a/h"]},
        "extend": {**deliveries, "visibility": 10.0, "long": [2]},
        "finish": deliveries,
        "give_back": deliveries,
        "give_back_unseen": {"names": ["q"], "taker": 1, "tokens": 10, "front": 100},
        "own_sagas": saga,
        "look_for_sagas": {**taking, "ahead": 5.0, "queues": ["q", "~a/h"]},
        "look_for_sagas_alone": {**taking, "ahead": 5.0},
        "look_for_messages": {"queues": ["q", "~a/h"], "ahead": 5.0},
        "take_sagas": {**taking, "limit": 10},
        "take_saga": {**taking, "key": keys[0]},
        "left_to_others": others,
        "leave_saga": {
            **others,
            "worker": 1,
            "token": 1,
            "error": "e",
            "stale": False,
            "heeded": False,
            "delay": 5.0,
        },
        "await_saga": saga,
        "retake_saga": {**saga, "token": 1},
        "steps": {**many, "window": 1_000_000},
        "begin_step": {**step, **opening},
        "finish_step": {**step, "seal": "t", "overlapped": False, "output": b"{}", "content_type": "json"},
        "fence": holder,
        "fence_whole": holder,
        "open_intents": saga,
        "read": many,
        "mark_attempts": {**many, "scopes": [1] * GROUP},
        "count_attempt": {"key": keys[0], "scope": "s", "error": "boom"},
        "note_error": {"key": keys[0], "error": "boom"},
        "uncount_attempt": {"key": keys[0]},
        "count_dead": {"key": keys[0]},
        **{f"{name}:one": row for name, row in rows.items()},
        **{
            name: {column: [value] * GROUP for column, value in row.items()} | {"key": keys}
            for name, row in rows.items()
        },
    }
    return {**each[name], **(claims if name.startswith("begin_sagas") else {})}


HOT = [
    "read",
    "mark_attempts",
    "count_attempt",
    "note_error",
    "uncount_attempt",
    "count_dead",
    "begin_sagas",
    "begin_sagas:one",
    "begin_steps",
    "begin_steps:one",
    "finish_steps",
    "finish_steps:one",
    "end_sagas",
    "end_sagas:one",
]

FILL = f"""
select set_config('idemconsumer.open', 't', true);
insert into idemconsumer.record (key, scope_id, state, fingerprint, changed_at)
    select sha256(n::text::bytea), 1, 3, null, clock_timestamp() from generate_series(1, {KEYS}) n;
insert into idemconsumer.result select sha256(n::text::bytea), '{{}}', 'json' from generate_series(1, {KEYS}) n;
insert into idemconsumer.attempt
    select sha256(n::text::bytea), 1, 1, null, clock_timestamp() from generate_series(1, {KEYS}) n;
insert into idemconsumer.dead_letter
    (identity, handler, scope, source, position, reason, error, key, body, headers, attempts, first_at, last_at)
    select sha256(n::text::bytea), '', '', '', '', '', '', sha256(n::text::bytea), '', '', 1, now(), now()
    from generate_series(1, {KEYS}) n;
insert into idemconsumer.saga (key, scope_id, handler, state, token, worker, due, attempt, source, position, body,
    headers, started_at)
    select sha256(n::text::bytea), 1, 'h', 1, 1, 1, now(), 1, '', '', '', '', now() from generate_series(1, {KEYS}) n;
insert into idemconsumer.step (key, name, kind, state, has_undo, token, started_at)
    select sha256(n::text::bytea), 's', 2, 1, false, 1, now() from generate_series(1, {KEYS}) n;
select idemconsumer.seal('t');
"""


EXPLAINED = [
    *HOT, "open", "open_sealed", "seal", "claim", "store_results", "forget_attempts", "take", "fall_due", "waiting",
    "extend", "look_for_messages", "finish", "give_back", "give_back_unseen",
    "own_sagas", "look_for_sagas", "look_for_sagas_alone", "take_sagas",
    "take_saga", "left_to_others", "leave_saga", "await_saga", "retake_saga", "steps", "begin_step", "finish_step",
    "fence", "fence_whole", "open_intents",
]  # fmt: skip


def test_each_hot_statement_can_be_explained_as_it_stands_in_its_file(shared_ledger: Ledger) -> None:
    queries = load(SCHEMA)
    with psycopg.connect(shared_ledger.dsn, autocommit=True) as connection:
        for name in EXPLAINED:
            assert connection.execute(b"explain " + queries[name], params(name)).fetchall(), name


TABLES = ("record", "result", "attempt", "dead_letter", "saga", "step")


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
def test_statements_prepared_on_empty_tables_do_not_scan_full_ones(shared_ledger: Ledger, mode: str) -> None:
    with psycopg.connect(shared_ledger.dsn, prepare_threshold=0) as connection:
        connection.execute(
            "insert into idemconsumer.scope (id, name) overriding system value values (1, 's') on conflict do nothing"
        )
        for table in TABLES:  # its ANALYZE would replan, and hide the mistake
            connection.execute(
                sql.SQL("alter table idemconsumer.{} set (autovacuum_enabled = off)").format(sql.Identifier(table))
            )
        connection.execute(sql.SQL("set plan_cache_mode = {}").format(sql.Literal(mode)))
        connection.commit()
        queries = load(SCHEMA)
        names: dict[str, str] = {}
        for name in HOT:
            if name == "end_sagas":  # as it is sent
                connection.execute(queries["no_scans"])
            for _ in range(8):  # Postgres looks at five plans of its own before it decides on a generic one
                connection.execute(queries[name], params(name))
            row = connection.execute(
                "select name from pg_prepared_statements where name like '\\_pg3%%' order by prepare_time desc limit 1",
                prepare=False,
            ).fetchone()
            assert row is not None
            names[name] = row[0]
            connection.execute("set local enable_seqscan = on", prepare=False)
        assert len(set(names.values())) == len(HOT)

        with psycopg.connect(shared_ledger.dsn) as other:
            for statement in FILL.split(";\n"):
                if statement.strip():
                    other.execute(statement.encode())

        for name in HOT:
            given = [sql.Literal(value) for value in ordered(queries[name], params(name))]
            explain = sql.SQL("explain execute {}({})").format(sql.Identifier(names[name]), sql.SQL(", ").join(given))
            if name == "end_sagas":
                connection.execute(queries["no_scans"], prepare=False)
            plan = "\n".join(line for (line,) in connection.execute(explain, prepare=False).fetchall())
            assert "Seq Scan" not in plan, f"{name}:\n{plan}"
            connection.execute("set local enable_seqscan = on", prepare=False)
        connection.rollback()  # at the end alone, since psycopg then drops what it has prepared


def test_who_takes_from_a_queue_does_not_walk_over_what_is_not_due(shared_ledger: Ledger) -> None:
    waiting = 100_000
    with psycopg.connect(shared_ledger.dsn, prepare_threshold=0) as connection:
        connection.execute("alter table idemconsumer.delayed set (autovacuum_enabled = off)", prepare=False)
        connection.execute("set enable_seqscan = off", prepare=False)  # as a session of the queue does
        connection.commit()
        query, given = load(SCHEMA)["fall_due"], params("fall_due")
        for _ in range(8):
            connection.execute(query, given)
        (name,) = connection.execute(
            "select name from pg_prepared_statements where name like '\\_pg3%%'", prepare=False
        ).fetchone() or ("",)
        connection.execute(
            "insert into idemconsumer.delayed (name, body, due_at) select 'q', '', clock_timestamp() + interval '1 day'"
            " from generate_series(1, %s)", [waiting], prepare=False,
        )  # fmt: skip
        connection.execute("insert into idemconsumer.delayed (name, body, due_at) values ('q', 'due', now())")
        values = sql.SQL(", ").join(sql.Literal(value) for value in ordered(query, given))
        explain = sql.SQL("explain (analyze, buffers, format json) execute {}({})").format(sql.Identifier(name), values)
        ((plan,),) = connection.execute(explain, prepare=False).fetchall()
        buffers = plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
        assert "Seq Scan" not in str(plan)
        assert buffers < 100, "pages that were looked at, of more than a thousand"
        moved = connection.execute("select body from idemconsumer.queue", prepare=False).fetchall()
        assert moved == [(b"due",)]
        connection.rollback()


@pytest.mark.parametrize("name", ["read_outgoing", "outbox_destinations", "fall_due_outgoing", "look_for_messages"])
def test_who_relays_does_not_walk_over_what_is_parked_or_not_due(shared_ledger: Ledger, name: str) -> None:
    query = load(SCHEMA)[name]
    known = {"destination": "kafka:b", "limit": 2_000, "bytes": 8_000_000, "queues": ["q", "outbox:"], "ahead": 5.0}
    given = {each: value for each, value in known.items() if b"%%(%s)s" % each.encode() in query}
    with psycopg.connect(shared_ledger.dsn, prepare_threshold=0) as connection:
        connection.execute("alter table idemconsumer.outbox set (autovacuum_enabled = off)", prepare=False)
        connection.execute("set enable_seqscan = off", prepare=False)
        connection.commit()
        for _ in range(8):
            connection.execute(query, given)
        (prepared,) = connection.execute(
            "select name from pg_prepared_statements where name like '\\_pg3%%'", prepare=False
        ).fetchone() or ("",)
        connection.execute(
            "insert into idemconsumer.outbox (destination, order_key, body, due_at, tries, parked_at)"
            " select 'kafka:b', 'k' || n, '', case when n % 2 = 0 then clock_timestamp() + interval '1 day' end,"
            " n % 3, case when n % 2 = 1 then clock_timestamp() end from generate_series(1, 30000) as n",
            prepare=False,
        )
        connection.execute("insert into idemconsumer.outbox (destination, body) values ('kafka:b', 'one')")
        values = sql.SQL(", ").join(sql.Literal(value) for value in ordered(query, given))
        explain = sql.SQL("explain (analyze, buffers, format json) execute {}({})").format(
            sql.Identifier(prepared), values
        )
        ((plan,),) = connection.execute(explain, prepare=False).fetchall()
        assert "Seq Scan" not in str(plan)
        assert plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"] < 100
        connection.rollback()


async def test_what_a_kept_plan_could_make_a_scan_is_not_prepared(store: PostgresStore) -> None:
    for _ in range(8):  # more often than what is run again and again is not prepared
        await store.unmark_attempts([b"k"])
        await store.forget_attempts([b"k"])
        await store.count_dead(b"k")
    async with store.pool.connection() as connection:
        assert await (await connection.execute("select statement from pg_prepared_statements")).fetchall() == []


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
def test_the_claim_keeps_no_plan_that_scans_a_full_table(shared_ledger: Ledger, mode: str) -> None:
    claim = (
        "select * from idemconsumer.claim(array(select row(key, 1, null, null, null, false, null, false)"
        "::idemconsumer.claim from unnest(%s::bytea[]) as key), 3::smallint, true)"
    )
    with psycopg.connect(shared_ledger.dsn) as connection:
        for table in ("record", "result"):
            connection.execute(
                sql.SQL("alter table idemconsumer.{} set (autovacuum_enabled = off)").format(sql.Identifier(table))
            )
        connection.execute(sql.SQL("set plan_cache_mode = {}").format(sql.Literal(mode)))
        connection.commit()
        for _ in range(8):  # PL/pgSQL keeps plans as prepared statements do
            new = [secrets.token_bytes(32) for _ in range(GROUP)]
            connection.execute(claim, [new])
            connection.execute(claim, [new])  # all of them there: the reading is planned as well
            connection.rollback()

        with psycopg.connect(shared_ledger.dsn) as other:
            for statement in FILL.split(";\n")[:3]:
                other.execute(statement.encode())
            other.execute(FILL.split(";\n")[-2].encode())

        keys = [secrets.token_bytes(32) for _ in range(GROUP)]
        there = connection.execute("select key from idemconsumer.record limit 16").fetchall()
        connection.rollback()
        scans = "select seq_scan from pg_stat_xact_user_tables where schemaname = 'idemconsumer' and relname = %s"
        before = {table: connection.execute(scans, [table]).fetchone() for table in ("record", "result")}
        found = connection.execute(claim, [keys + [key for (key,) in there]]).fetchall()
        assert {row[0] for row in found} == {key for (key,) in there}
        assert all(row[1] == 3 and row[3] is not None for row in found)
        after = {table: connection.execute(scans, [table]).fetchone() for table in ("record", "result")}
        assert after == before
        connection.rollback()


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
def test_requests_keep_no_plan_that_scans_a_full_table(shared_ledger: Ledger, mode: str) -> None:
    claim = (
        "select (c.missed).*, c.token, c.free from idemconsumer.claim_request("
        "array[row(%s, 1, null, null, null, false, null, false)::idemconsumer.claim], %s) as c"
    )
    complete = "select idemconsumer.complete_request(%s, %s, 3::smallint, '', 'json', 200::smallint, null)"
    scans = "select relname, seq_scan from pg_stat_xact_user_tables where schemaname = 'idemconsumer' order by 1"
    tables = ("record", "request", "result", "worker")
    with psycopg.connect(shared_ledger.dsn, autocommit=True) as connection:
        for table in tables:
            name = sql.Identifier(table)
            connection.execute(sql.SQL("alter table idemconsumer.{} set (autovacuum_enabled = off)").format(name))
            connection.execute(sql.SQL("vacuum analyze idemconsumer.{}").format(name))  # known to be empty, not new
        worker = connection.execute(
            "insert into idemconsumer.worker (name, lease, until, runs)"
            " values ('w', '1 hour', now() + interval '1 hour', '[]') returning id"
        ).fetchone()
        assert worker is not None
        connection.execute(sql.SQL("set plan_cache_mode = {}").format(sql.Literal(mode)))
        for filled in (False, True):
            if filled:
                with connection.transaction():
                    for statement in (*FILL.split(";\n")[:3], FILL.split(";\n")[-2]):
                        connection.execute(statement.encode())
                connection.execute(
                    "insert into idemconsumer.request (key, scope_id, token, worker, started_at)"
                    " select key, 1, 1, 0, now() from idemconsumer.record"
                )
                connection.execute(
                    "insert into idemconsumer.worker (name, lease, until, runs)"
                    " select '', '1 s', now(), '[]' from generate_series(1, 5000)"
                )
            for _ in range(8):
                with connection.transaction():
                    key = secrets.token_bytes(32)
                    before = connection.execute(scans).fetchall()
                    found = connection.execute(claim, [key, *worker]).fetchone()
                    assert found is not None
                    assert found[8] is not None
                    again = connection.execute(claim, [key, *worker]).fetchone()
                    assert again is not None
                    assert (again[1], again[9]) == (1, found[8])  # ours, so free to us
                    assert connection.execute(complete, [key, found[8]]).fetchone() == (True,)
                    after = connection.execute(scans).fetchall()
                    raise psycopg.Rollback
            assert not filled or after == before


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
def test_steps_keep_no_plan_that_scans_a_full_table(shared_ledger: Ledger, mode: str) -> None:
    begin = (
        "select idemconsumer.begin_step('t', '10s', %s, 1, 1, 1::smallint, 's', 2::smallint, %s::smallint, false, '')"
    )
    finish = "select idemconsumer.finish_step('t', %s, 's', 2::smallint, false, 1, null, null)"
    tables = ("saga", "step")
    with psycopg.connect(shared_ledger.dsn, autocommit=True) as connection:
        for table in tables:
            name = sql.Identifier(table)
            connection.execute(sql.SQL("alter table idemconsumer.{} set (autovacuum_enabled = off)").format(name))
            connection.execute(sql.SQL("vacuum analyze idemconsumer.{}").format(name))  # known to be empty, not new
        connection.execute(sql.SQL("set plan_cache_mode = {}").format(sql.Literal(mode)))
        for filled in (False, True):
            if filled:
                with psycopg.connect(shared_ledger.dsn) as other:
                    for statement in FILL.split(";\n"):
                        if statement.strip():
                            other.execute(statement.encode())
            scans = "select seq_scan from pg_stat_xact_user_tables where schemaname = 'idemconsumer' and relname = %s"
            for _ in range(8):
                with connection.transaction():
                    key = hashlib.sha256(b"7").digest() if filled else secrets.token_bytes(32)
                    if not filled:
                        connection.execute(
                            "insert into idemconsumer.saga (key, scope_id, handler, state, token, worker, due, attempt,"
                            " source, position, body, headers, started_at)"
                            " values (%s, 1, 'h', 1, 1, 1, now(), 1, '', '', '', '', now())",
                            [key],
                        )
                    before = [connection.execute(scans, [table]).fetchone() for table in tables]
                    assert connection.execute(begin, [key, 1]).fetchone() == (2 if filled else 1,)
                    connection.execute(finish, [key])
                    after = [connection.execute(scans, [table]).fetchone() for table in tables]
                    raise psycopg.Rollback
            assert not filled or after == before


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
def test_who_ends_a_saga_scans_no_table_of_children(shared_ledger: Ledger, mode: str) -> None:
    scans = "select seq_scan from pg_stat_xact_user_tables where schemaname = 'idemconsumer' and relname = 'child'"
    with psycopg.connect(shared_ledger.dsn, autocommit=True) as connection:
        connection.execute("truncate idemconsumer.child")
        connection.execute("alter table idemconsumer.child set (autovacuum_enabled = off)")
        connection.execute("vacuum analyze idemconsumer.child")
        connection.execute(sql.SQL("set plan_cache_mode = {}").format(sql.Literal(mode)))
        for filled in (False, True):
            if filled:
                connection.execute(
                    "insert into idemconsumer.child (parent, key)"
                    " select sha256(n::text::bytea), sha256(n::text::bytea) from generate_series(1, 20000) as n"
                )
            for _ in range(8):
                with connection.transaction():
                    before = connection.execute(scans).fetchone()
                    connection.execute(
                        "delete from idemconsumer.saga where key = any(%s)", ([secrets.token_bytes(32)],)
                    )
                    after = connection.execute(scans).fetchone()
            assert not filled or after == before


def test_who_chooses_among_many_letters_reads_an_index(shared_ledger: Ledger) -> None:
    queries, many = load(SCHEMA), 50_000
    pages: dict[str, dict[str, Any]] = {
        "dead_list": {"before": None, "limit": 50},
        "dead_to_redrive": {"after": many // 2, "last": many, "run": "r", "limit": 100},
    }
    few = (Which(handler="rare"), Which(reason="rare"), Which(prefix="ab"), Which(ids=[7, 9]), Which(since=60))
    with psycopg.connect(shared_ledger.dsn) as connection:
        connection.execute("truncate idemconsumer.dead_letter restart identity")
        connection.execute(
            "insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, key,"
            " body, headers, attempts, first_at, last_at) select sha256(n::text::bytea), 'h' || n %% 5,"
            " 's/-/h' || n %% 5, '', '', 'r', '', sha256(n::text::bytea), '', '', 1, now(),"
            " now() - (%s - n) * interval '1 minute' from generate_series(1, %s) n",
            [many, many],
        )
        connection.execute(
            "insert into idemconsumer.dead_retention"
            " select 's', 'h' || n, interval '40 days', interval '40 days' from generate_series(0, 4) n"
        )
        connection.execute("analyze idemconsumer.dead_letter, idemconsumer.dead_retention")
        chosen = (*few, Which(), Which(handler="h3"))
        asked = [(name, which.params | page) for name, page in pages.items() for which in chosen]
        for name, given in [*asked, ("prune_letters", {"limit": 500}), ("empty_letters", {"limit": 500})]:
            explained = connection.execute(b"explain " + queries[name], given, prepare=False).fetchall()
            plan = "\n".join(line for (line,) in explained)
            assert "Seq Scan on dead_letter" not in plan, f"{name} {given}:\n{plan}"
        connection.rollback()


def test_who_counts_letters_for_metrics_reads_none(database: str) -> None:
    migrate(database, SCHEMA)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, body,"
            " headers, attempts, first_at, last_at) select sha256(n::text::bytea), 'h', 's/-/h' || n % 5, '', '', 'r',"
            " '', convert_to(repeat('x', 500), 'UTF8'), '', 1, now(), now() from generate_series(1, 5000) n"
        )
        connection.execute("vacuum analyze idemconsumer.dead_letter")
        rows = connection.execute(b"explain " + load(SCHEMA)["measure_letters"]).fetchall()
        plan = "\n".join(line for (line,) in rows)
        assert "Index Only Scan using dead_letter_open" in plan, plan


def test_who_looks_how_things_stand_reads_what_it_counts(any_database: str) -> None:
    """Not what was redriven, though it is newer, and not sagas that wait, to find those for review."""
    migrate(any_database, SCHEMA)
    with psycopg.connect(any_database, autocommit=True) as connection:
        connection.execute(
            "insert into idemconsumer.dead_letter (identity, handler, scope, source, position, reason, error, body,"
            " headers, attempts, first_at, last_at, redriven_at) select sha256(n::text::bytea), 'h', 's/-/h', '', '',"
            " 'r', '', '', '', 1, now(), now(), case when n > 9 then now() end from generate_series(1, 5000) n"
        )
        connection.execute("insert into idemconsumer.scope (name) values ('s/-/h')")
        connection.execute(
            "insert into idemconsumer.saga (key, scope_id, handler, state, token, due, attempt, parked, source,"
            " position, body, headers, started_at) select sha256(n::text::bytea), 1, 'h', 1, 1,"
            " now() + interval '1 h', 1, case when n > 4991 then 'changed' end, '', '', '', '', now()"
            " from generate_series(1, 5000) n"
        )
        connection.execute("vacuum analyze idemconsumer.dead_letter, idemconsumer.saga, idemconsumer.scope")
        given = {"most": 20, "app": None, "scopes": None}
        for name, found in (("status_letters", 9), ("status_sagas", 21 + 9)):
            query = b"explain (analyze, format json) " + load(SCHEMA)[name]
            (((plan,),),) = connection.execute(query, given).fetchall()
            assert found <= rows_read(plan["Plan"]) < 200, plan


def test_who_gives_few_digits_of_a_key_reads_few_keys(any_database: str) -> None:
    migrate(any_database, SCHEMA)
    with psycopg.connect(any_database, autocommit=True) as connection:
        connection.execute(
            "insert into idemconsumer.attempt (key, scope_id, count, changed_at)"
            " select sha256(n::text::bytea), 1, 1, now() from generate_series(1, 5000) n"
        )
        connection.execute("vacuum analyze idemconsumer.attempt")
        given = {"low": bytes(32), "high": b"\xff" * 32, "limit": 5}
        query = b"explain (analyze, format json) " + load(SCHEMA)["known_keys"]
        (((plan,),),) = connection.execute(query, given).fetchall()
    assert rows_read(plan["Plan"]) == 5


def rows_read(node: Mapping[str, Any]) -> float:
    """Of tables, and those that a filter has removed."""
    its = node["Actual Rows"] + node.get("Rows Removed by Filter", 0) if "Relation Name" in node else 0
    return float(its * node["Actual Loops"] + sum(map(rows_read, node.get("Plans", []))))


def ordered(query: bytes, values: Mapping[str, Any]) -> list[Any]:
    """The values in the order in which psycopg numbers the parameters: that of their first appearance."""
    return [values[name] for name in sorted(values, key=lambda name: query.index(b"%%(%s)s" % name.encode()))]


SAGAS = 10_000
FILL_SAGAS = f"""
insert into idemconsumer.scope (id, name) overriding system value values (7, 's/-/h');
insert into idemconsumer.worker (id, name, lease, until, runs) overriding system value values
    (2, 'lives', '1 hour', now() + interval '1 hour', '[]'), (3, 'is lost', '1 hour', now() - interval '1 hour', '[]');
insert into idemconsumer.saga (key, scope_id, handler, state, token, worker, due, attempt, source, position, body,
    headers, started_at)
    select sha256((kind || '/' || n)::bytea), 7, 'h', 1, 1, owner, now() + wait, 1, '', '', '', '', now()
    from generate_series(1, {SAGAS}) as n,
        (values ('waits', null::bigint, interval '1 day'), ('held', 2, '0'), ('stale', 3, '0')) as k (kind, owner, wait)
"""


def test_who_looks_for_sagas_scans_no_table_however_many_there_are(shared_ledger: Ledger) -> None:
    """As many that wait, that are held, and that lost their worker (L32)."""
    queries = load(SCHEMA)
    with psycopg.connect(shared_ledger.dsn) as connection:
        connection.execute("alter table idemconsumer.saga set (autovacuum_enabled = off)")
        for statement in FILL_SAGAS.split(";\n"):
            connection.execute(statement.encode())
        connection.execute("savepoint filled")
        scans = "select seq_scan from pg_stat_xact_user_tables where schemaname = 'idemconsumer' and relname = 'saga'"
        read = "select idx_tup_fetch from pg_stat_xact_user_tables where relname = 'saga'"
        for name in ("own_sagas", "look_for_sagas", "take_saga", "take_sagas") * 2:
            before = connection.execute(scans).fetchone(), connection.execute(read).fetchone()
            given = {**params(name), "key": None} if name == "own_sagas" else params(name)
            rows = connection.execute(queries[name], given, prepare=False).fetchall()
            assert connection.execute(scans).fetchone() == before[0], name
            assert before[1] is not None
            ((fetched,),) = connection.execute(read).fetchall()
            assert fetched - before[1][0] < 100, f"{name} reads no more than it needs"
            assert len(rows) == {"own_sagas": 0, "look_for_sagas": 1, "take_saga": 0, "take_sagas": 10}[name]
            if name == "take_sagas":
                connection.execute("rollback to filled")
                connection.execute("analyze idemconsumer.saga")
        connection.rollback()


def test_who_looks_for_sagas_reads_none_that_sleep(shared_ledger: Ledger) -> None:
    """Of another app, so that each would be read to find that out (L41)."""
    queries = load(SCHEMA)
    with psycopg.connect(shared_ledger.dsn) as connection:
        connection.execute("alter table idemconsumer.saga set (autovacuum_enabled = off)")
        connection.execute("insert into idemconsumer.scope (id, name) overriding system value values (7, 't/-/h')")
        connection.execute(
            "insert into idemconsumer.saga (key, scope_id, handler, version, state, token, due, attempt, source,"
            " position, body, headers, started_at) select sha256(n::text::bytea), 7, 'h', '1', 1, 1,"
            " now() + interval '1 hour', 1, '', '', '', '', now() from generate_series(1, %s) as n",
            [SAGAS],
        )
        for name in ("look_for_sagas", "take_sagas"):
            explain = b"explain (analyze, buffers, format json) " + queries[name]
            for _ in range(2):  # the first one reads what is known of functions, too
                plan = connection.execute(explain, params(name), prepare=False).fetchone()
            assert plan is not None
            top = plan[0][0]["Plan"]
            assert "Seq Scan on saga" not in str(plan)
            assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 200, f"{name} reads what sleeps"
        connection.rollback()


# Of version 1 all of them, due since `since`; of version 2, which the process runs, a single one, due a second ago.
FILL_VERSIONS = f"""
insert into idemconsumer.scope (id, name) overriding system value values (7, 's/-/h');
insert into idemconsumer.saga (key, scope_id, handler, state, token, due, attempt, version, source, position, body,
    headers, started_at)
    select sha256(n::text::bytea), 7, 'h', 1, 1, now() - wait, 1, version, '', '', '', '', now()
    from (select n, '1', %(since)s::interval from generate_series(1, {SAGAS}) as n union select 0, '2', interval '1s')
        as w (n, version, wait)
"""
RUNS_1 = '[{"app": "s", "handler": "h", "version": "1"}]'


@pytest.mark.parametrize(
    ("since", "lives"), [("1 hour", True), ("1 minute", False)], ids=["it lives", "it is just gone"]
)
def test_who_looks_for_sagas_steps_over_those_of_versions_that_others_run(
    shared_ledger: Ledger, since: str, lives: bool
) -> None:
    """Also over those of a version that nobody runs any more, until they have waited for long enough (L60)."""
    queries = load(SCHEMA)
    with psycopg.connect(shared_ledger.dsn) as connection:
        connection.execute("alter table idemconsumer.saga set (autovacuum_enabled = off)")
        for statement in FILL_VERSIONS.split(";\n"):
            connection.execute(statement.encode(), {"since": since} if "since" in statement else None)
        if lives:
            connection.execute(
                "insert into idemconsumer.worker (name, lease, until, runs)"
                " values ('of 1', '1 hour', now() + interval '1 hour', %s)", [RUNS_1],
            )  # fmt: skip
        connection.execute("savepoint filled")
        read = "select idx_tup_fetch + seq_tup_read from pg_stat_xact_user_tables where relname = 'saga'"
        for name in ("look_for_sagas", "take_sagas") * 2:
            ((before,),) = connection.execute(read).fetchall()
            given = {**params(name), "versions": ["2", "2"]}
            assert len(connection.execute(queries[name], given, prepare=False).fetchall()) == 1
            ((after,),) = connection.execute(read).fetchall()
            assert after - before < 100, f"{name} reads no more than it needs"
            if name == "take_sagas":
                connection.execute("rollback to filled")
                connection.execute("analyze idemconsumer.saga")
        connection.rollback()
