"""`crash_matrix` finds what is wrong with each of the usual consumers, and where, and nothing in right ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest

from idemconsumer import App, ConfigurationError, Message
from idemconsumer.stores.migrations import migrate
from idemconsumer.testing import MatrixDelivery, MatrixReport, crash_matrix
from idemconsumer.testing.matrix_process import Consume
from tests.crash_matrix import consumers
from tests.support import ROOT
from tests.support.waiting import PATIENCE

ORDER = {"id": "o-1", "sku": "pen", "qty": 2}
SHOP = """
create table stock (sku text primary key, qty int not null, updated_at timestamptz not null default now());
create table line (number bigint generated always as identity, sku text);
create table seen (id text primary key);
create table done (id text primary key);
insert into stock values ('pen', 10, '2026-01-01');
insert into line (sku) values ('ink')
"""


@pytest.fixture
def shop(database: str) -> str:
    with psycopg.connect(database) as db:
        db.execute(SHOP)
    return database


def wrong(report: MatrixReport) -> dict[str, str]:
    return {f"{run.what} {run.point}".rstrip(): run.effect for run in report.wrong}


@pytest.mark.parametrize(
    ("consume", "found"),
    [
        (consumers.mark_before_work, {"killed after insert into seen (id) values ($1)": "lost"}),
        (
            consumers.mark_in_another_transaction,
            {
                "rival after select from seen where id = $1": "twice",
                "rival after update stock set qty = qty - $1 where sku = $2": "twice",
                "killed after COMMIT": "twice",
                "rival after COMMIT": "twice",
                "killed after insert into seen (id) values ($1)": "twice",
                "rival after insert into seen (id) values ($1)": "twice",
            },
        ),
        (
            consumers.acknowledge_first,
            {
                "killed after the acknowledgement": "lost",
                "killed before the first statement": "lost",
                "killed after insert into seen (id) values ($1) on conflict do nothing": "lost",
                "killed after update stock set qty = qty - $1 where sku = $2": "lost",
            },
        ),
        (
            consumers.cache_in_memory,
            {
                "killed after COMMIT": "twice",
                "killed before the acknowledgement": "twice",
                "rival before the first statement": "twice",
                "rival after update stock set qty = qty - $1 where sku = $2": "twice",
                "rival after COMMIT": "twice",
                "rival before the acknowledgement": "twice",
                "rival after the acknowledgement": "twice",
                "fresh process": "twice",
            },
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_what_is_wrong_is_found_where_it_is(consume: Consume, found: dict[str, str], shop: str) -> None:
    report = await crash_matrix(consume, ORDER, dsn=shop, tables=["stock"])
    assert wrong(report) == found, str(report)


@pytest.mark.parametrize(
    "consume",
    [consumers.right, consumers.right_in_a_pipeline, pytest.param(consumers.ours, marks=pytest.mark.long)],
)
async def test_what_is_right_passes(consume: Consume, shop: str) -> None:
    migrate(shop, "idemconsumer")
    report = await crash_matrix(consume, ORDER, dsn=shop, tables=["stock", "line"])
    assert not report.wrong, str(report)
    assert not report.missed, str(report)
    assert report.points >= 6, str(report)


@pytest.mark.long
@pytest.mark.parametrize(
    ("app", "source", "points"),
    [
        (consumers.app, "kafka:orders", {"claimed", "sealing", "committed", "settling", "settled"}),
        (consumers.trips, "rabbitmq:trips", {"step_committing", "step_committed", "intended", "called", "settled"}),
    ],
)
async def test_our_own_worker_passes_at_each_of_its_points(app: App, source: str, points: set[str], shop: str) -> None:
    message = Message(source, json.dumps(ORDER).encode(), {"n": "v"})
    report = await crash_matrix(app, message, dsn=shop, tables=["stock"], timeout=PATIENCE)
    assert not report.wrong, str(report)
    assert points <= {name.partition(" ")[0] for name in report.names}, str(report)


@pytest.mark.long
async def test_a_handler_of_ours_that_has_another_transaction_is_found(shop: str) -> None:
    message = Message("sqs:orders", json.dumps(ORDER).encode())
    report = await crash_matrix(consumers.loose, message, dsn=shop, tables=["stock"], timeout=PATIENCE)
    assert {"killed handled reserve_beside", "killed sealing reserve_beside"} <= wrong(report).keys(), str(report)
    assert "killed committed reserve_beside" not in wrong(report), str(report)
    assert {run.effect for run in report.wrong} == {"twice"}, str(report)


@pytest.mark.parametrize(
    ("test", "ends"),
    [
        ("test_consumer.py", "1 failed"),
        pytest.param("test_handler.py", "1 passed", marks=pytest.mark.long),
        pytest.param("test_kit.py", "1 passed", marks=pytest.mark.long),
    ],
)
def test_the_page_runs_as_printed(test: str, ends: str, shop: str, tmp_path: Path) -> None:
    """The consumer there checks and then acts: its test fails, as the page says."""
    page = (ROOT / "docs" / "crash-matrix.md").read_text("utf-8")
    examples = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(examples) == page.count("```python")
    for name, code in examples:
        (tmp_path / name).write_text(code, "utf-8")
    with psycopg.connect(shop) as db:
        db.execute("alter table stock drop column updated_at")
    (tmp_path / "conftest.py").write_text(
        f"import pytest\n\n@pytest.fixture\ndef dsn():\n    return {shop!r}\n\n"
        f"@pytest.fixture(scope='session')\ndef idem_setup():\n    return {SHOP!r}\n",
        "utf-8",
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\npythonpath = .\n", "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:faker", test]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ends in ran.stdout, ran.stdout
    if "failed" in ends:
        (printed,) = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        assert [line for line in printed.splitlines() if line.strip() not in ran.stdout] == [], ran.stdout


async def test_what_cannot_be_run_is_said(shop: str) -> None:
    """Each with what to write instead."""

    async def told(consume: Consume, *, tables: Sequence[str] = ("stock",), ignore: Sequence[str] = ()) -> str:
        with pytest.raises(ConfigurationError) as refused:
            await crash_matrix(consume, ORDER, dsn=shop, tables=tables, ignore=ignore)
        return str(refused.value)

    async def local(delivery: MatrixDelivery, dsn: str) -> None: ...

    assert "write it at the top level of a module" in await told(local)
    assert "ignore=['stock.at'] are not columns of stock" in await told(consumers.right, ignore=["stock.at"])
    assert "name in tables= the tables that it changes" in await told(consumers.right, tables=["done"])
    assert "leave them out with ignore=['stock.updated_at']" in await told(consumers.dated)
    assert "ZeroDivisionError" in await told(consumers.broken)
    with psycopg.connect(shop, application_name="test"):
        assert "open connections: 'test' (process" in await told(consumers.right)


async def test_what_is_never_acknowledged_is_stuck(shop: str) -> None:
    report = await crash_matrix(consumers.never_twice, ORDER, dsn=shop, tables=["stock"], timeout=3)
    assert [run.what for run in report.wrong if run.effect == "stuck"] == ["duplicate"], str(report)
    assert "RuntimeError: I know this one" in str(report)
