"""What `check` says of settings that make claims expensive beside many records, or keep what is pruned."""

from __future__ import annotations

import msgspec
import psycopg
import pytest

from idemconsumer.stores.server import Server, TunedTable, advice, of_server, of_tables, wal_gb
from tests.support.servers.postgres import migrated

GOOD = Server(records=2e6, wal_mb=16 * 1024, minutes=30, compression="off", lz4=True, autovacuum=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, []),
        ({"wal_mb": 1024}, ["max_wal_size = '16GB'"]),
        ({"records": 1e8}, []),
        ({"records": 1.2e8}, ["max_wal_size = '48GB'"]),
        ({"minutes": 5}, ["checkpoint_timeout = '30min'"]),
        ({"compression": "lz4"}, []),
        ({"compression": "pglz"}, ["wal_compression = 'lz4'"]),
        ({"compression": "on", "lz4": False}, ["wal_compression = 'off'"]),
        ({"records": 5e5, "wal_mb": 1024, "minutes": 5, "compression": "pglz"}, []),
        ({"records": 0, "autovacuum": False}, ["autovacuum = 'on'"]),
        ({"wal_mb": 1024, "minutes": 5}, ["max_wal_size = '16GB'", "checkpoint_timeout = '30min'"]),
    ],
)
def test_each_setting_that_is_far_from_enough_is_named_with_what_to_write(
    given: dict[str, object], said: list[str]
) -> None:
    texts = of_server(msgspec.structs.replace(GOOD, **given))
    assert len(texts) == len(said)
    for text, statement in zip(texts, said, strict=True):
        assert text.startswith(f"{statement.split()[0]} is ")
        assert text.endswith(f"run: ALTER SYSTEM SET {statement}; SELECT pg_reload_conf()")


def test_the_log_between_two_checkpoints_grows_with_the_index() -> None:
    assert [wal_gb(records) for records in (0, 5e7, 5.1e7, 1e8, 1e9)] == [16, 16, 32, 32, 320]


def test_a_table_is_named_that_autovacuum_does_not_visit_or_late() -> None:
    assert of_tables("s", [TunedTable("record", 1e8, True, 0.02), TunedTable("dead_letter", 1e8, True, 0.2)]) == []
    assert of_tables("s", [TunedTable("record", 1e3, True, 0.2)]) == []
    (off,) = of_tables("s", [TunedTable("queue", 0, False, 0.02)])
    assert off.endswith('run: ALTER TABLE "s"."queue" RESET (autovacuum_enabled)')
    (late,) = of_tables("s", [TunedTable("record", 1e8, True, 0.2)])
    assert late.endswith('run: ALTER TABLE "s"."record" SET (autovacuum_vacuum_scale_factor = 0.02)')


async def test_the_settings_of_a_server_and_of_its_tables_are_read(database: str) -> None:
    assert await advice(database, "idemconsumer") == []
    migrated(database, "idemconsumer")
    assert await advice(database, "idemconsumer") == []
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("alter table idemconsumer.result set (autovacuum_enabled = off)")
        connection.execute("alter table idemconsumer.step reset (autovacuum_vacuum_scale_factor)")
        connection.execute("update pg_class set reltuples = 2e6 where oid = 'idemconsumer.step'::regclass")
    said = await advice(database, "idemconsumer")
    assert [text.partition(";")[0].partition(",")[0] for text in said] == [
        "autovacuum of table result is off",
        "autovacuum of table step starts once 20% of its 2 million rows are dead",
    ]
