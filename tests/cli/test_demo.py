"""The demo kills real workers, counts a real ledger, and would say so if a payment stood there twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from idemconsumer.cli.demo import DemoReport, verdict
from idemconsumer.stores.migrations import migrate
from tests.support import ROOT
from tests.support.waiting import eventually

COMMAND = [sys.executable, "-m", "idemconsumer"]
KEYS = ["messages", "deliveries", "kills", "applied", "duplicates", "lost", "twice", "seconds"]


def processes_of(folder: Path) -> list[int]:
    """Everything that runs with this temporary folder, so what a demo has started and not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"TMPDIR={folder}".encode() in environment:
            found.append(int(entry.parent.name))
    return found


def environment(folder: Path) -> dict[str, str]:
    # Settings of the caller, which are not the demo's.
    return os.environ | {"TMPDIR": str(folder), "IDEMCONSUMER_HANDLERS": "reserve_stock", "IDEMCONSUMER_WORKERS": "x"}


@pytest.mark.kill
@pytest.mark.slow
def test_every_payment_is_applied_once_while_workers_are_killed(folder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "--json", "--messages", "300", "--kills", "3", "--seed", "1"],
        env=environment(folder), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert list(said) == KEYS
    assert (said["messages"], said["applied"], said["lost"], said["twice"]) == (300, 300, 0, 0)
    assert said["kills"] == 3
    assert 60 <= said["duplicates"] <= 120
    assert said["deliveries"] > said["messages"] + said["duplicates"], "no worker had anything in hand when it died"
    assert done.stderr.count("in hand") == 3
    assert processes_of(folder) == []


@pytest.mark.kill
def test_nothing_outlives_a_demo_that_is_killed(folder: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", "--messages", "5000"],
        env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as demo:  # fmt: skip
        assert demo.stderr is not None
        while "kill 1" not in (line := demo.stderr.readline()):
            assert line, "it ended before the first kill"
        assert len(processes_of(folder)) > 3
        demo.send_signal(signal.SIGKILL)
    eventually(lambda: not processes_of(folder))


def test_a_ledger_with_too_much_or_too_little_fails() -> None:
    good = DemoReport(
        messages=1_000, deliveries=1_450, kills=5, applied=1_000, duplicates=300, lost=0, twice=0, seconds=12.3
    )
    assert good.passed
    assert "PASSED" in verdict(good)
    assert "exactly once" in verdict(good)
    for lost, twice in ((1, 0), (0, 1)):
        bad = DemoReport(
            messages=1_000, deliveries=1_450, kills=5, applied=1_000, duplicates=300, lost=lost, twice=twice, seconds=1
        )
        assert not bad.passed
        assert "FAILED" in verdict(bad)


async def test_the_example_books_a_payment_once(database: str) -> None:
    migrate(database, "idemconsumer")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("create table account (name text primary key, balance bigint not null default 0)")
        connection.execute("insert into account values ('ann')")
        connection.execute(
            "select idemconsumer.publish('payments', p::jsonb) from unnest(%s::text[]) p",
            (
                [
                    '{"id": "p-1", "account": "ann", "amount": 500}',
                    '{"id": "p-2", "account": "bob", "amount": 500}',
                    '{"id": "p-1", "account": "ann", "amount": 500}',
                ],
            ),
        )
        done = subprocess.run(
            [*COMMAND, "run", "payments:app", "--handlers", "from_postgres", "--until-empty"],
            cwd=ROOT / "examples", env=os.environ | {"IDEMCONSUMER_DSN": database},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert connection.execute("table account").fetchall() == [("ann", 500)]
        assert connection.execute("select count(*) from idemconsumer.queue").fetchone() == (0,)
