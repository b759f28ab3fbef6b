"""`idemconsumer skip`: where partitions stand still, and a person's decision."""

from __future__ import annotations

import json

import psycopg
import pytest
from click.testing import CliRunner, Result

from idemconsumer.cli.main import main
from tests.support.servers.postgres import migrated

STOP = "insert into idemconsumer.kafka_stop values ('c', %s, 'orders', 3, 4711, 4720, 'wrong CRC', false, now(), now())"


@pytest.fixture
def dsn(database: str) -> str:
    migrated(database, "idemconsumer")
    return database


def stand_still(dsn: str, group: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(STOP, [group])


def run(dsn: str, *words: str) -> Result:
    return CliRunner().invoke(main, ["skip", *words, "--dsn", dsn])


def skipped(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("select group_name from idemconsumer.kafka_stop where skip").fetchall()
    return [group for (group,) in rows]


def test_without_a_place_it_lists_where_partitions_stand_still(dsn: str) -> None:
    assert run(dsn).output == "no partition is blocked\n"
    stand_still(dsn, "shop")
    for word in ("kafka:orders/3@4711", "shop", "wrong CRC"):
        assert word in run(dsn).output
    (listed,) = json.loads(run(dsn, "--json").output)
    assert (listed["topic"], listed["partition"], listed["first"], listed["next"]) == ("orders", 3, 4711, 4720)


def test_a_place_is_skipped_in_its_group(dsn: str) -> None:
    stand_still(dsn, "shop")
    result = run(dsn, "kafka:orders/3@4711")
    assert (result.exit_code, result.output) == (0, "kafka:orders/3@4711 will be skipped up to 4719 in group shop\n")
    assert skipped(dsn) == ["shop"]
    assert run(dsn).output == "no partition is blocked\n"


def test_of_several_groups_one_has_to_be_chosen(dsn: str) -> None:
    stand_still(dsn, "shop")
    stand_still(dsn, "audit")
    result = run(dsn, "kafka:orders/3@4711")
    assert (result.exit_code, "audit, shop; choose one with --group" in result.output) == (2, True)
    assert run(dsn, "kafka:orders/3@4711", "--group", "audit").exit_code == 0
    assert skipped(dsn) == ["audit"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("orders-3-4711", "write kafka:TOPIC/PARTITION@OFFSET"),
        (
            "kafka:orders/3@4712",
            "no partition is blocked at kafka:orders/3@4712; blocked: kafka:orders/3@4711",
        ),
    ],
)
def test_a_place_where_nobody_stands_is_an_error(dsn: str, place: str, words: str) -> None:
    stand_still(dsn, "shop")
    result = run(dsn, place)
    assert (result.exit_code, words in result.output) == (2, True)
    assert skipped(dsn) == []
