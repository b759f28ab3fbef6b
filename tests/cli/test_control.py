"""`pause`, `resume`, `drain`, `workers`, `audit`: by hand, and with real workers under a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from idemconsumer.cli.main import main
from idemconsumer.process.child import Exit
from tests.support import forked
from tests.support.servers.postgres import migrated
from tests.support.waiting import PATIENCE, eventually

SHOP = """
import msgspec
from idemconsumer import App, Tx

class Order(msgspec.Struct):
    id: str

app = App("shop")

@app.idempotent_handler("postgres:orders", key="id")
async def take_order(order: Order, tx: Tx) -> None: ...
"""


@pytest.fixture
def dsn(database: str) -> str:
    migrated(database, "idemconsumer")
    return database


def run(dsn: str, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--dsn", dsn])


def answer(dsn: str, *words: str) -> Any:
    result = run(dsn, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def known(dsn: str, *scopes: str) -> None:
    with psycopg.connect(dsn) as connection:
        for scope in scopes:
            connection.execute("insert into idemconsumer.scope (name) values (%s)", [scope])


def test_each_decision_is_in_the_audit_and_what_changes_nothing_is_not(dsn: str) -> None:
    assert run(dsn, "audit").output == "nothing was decided yet\n"
    known(dsn, "shop/-/take_order")
    said = run(dsn, "pause", "take_order", "--reason", "wrong prices", "--by", "ann")
    assert said.output == "shop/take_order paused; 0 workers run it\n"
    assert "is paused already" in run(dsn, "pause", "take_order", "--by", "bob").output
    assert answer(dsn, "resume", "take_order") == {
        "app": "shop", "handler": "take_order", "known": True, "changed": True, "workers": 0, "unrecorded_workers": 0,
    }  # fmt: skip
    assert "is not paused" in run(dsn, "resume", "take_order", "--app", "shop").output
    resumed, paused = answer(dsn, "audit")
    assert (paused["what"], paused["target"], paused["by"], paused["reason"]) == (
        "pause", "shop/take_order", "ann", "wrong prices",
    )  # fmt: skip
    assert (resumed["what"], "@" in resumed["by"], resumed["role"]) == ("resume", True, paused["role"])
    assert "wrong prices" in run(dsn, "audit").output


def test_a_name_must_mean_one_handler(dsn: str) -> None:
    unknown = run(dsn, "pause", "take_ordr")
    assert (unknown.exit_code, "no handler 'take_ordr' is known" in unknown.output) == (Exit.USAGE, True)
    known(dsn, "shop/-/take_order", "north/-/take_order")
    several = run(dsn, "pause", "take_order")
    assert (several.exit_code, "several apps have a handler 'take_order': north, shop" in several.output) == (2, True)
    assert run(dsn, "pause", "take_order", "--app", "north").exit_code == 0
    assert run(dsn, "drain", "7").exit_code == Exit.USAGE


def test_whoever_pauses_what_nobody_knows_is_warned(dsn: str) -> None:
    known(dsn, "shop/-/take_order", "shop/-/bill", "north/-/take_ordr")
    assert run(dsn, "pause", "take_order", "--app", "shop").stderr == ""
    for said in ("paused", "is paused already"):
        result = run(dsn, "pause", "take_ordr", "--app", "shop")
        assert result.stdout == f"shop/take_ordr {said}; 0 workers run it\n"
        assert result.stderr == (
            "warning: no handler 'take_ordr' of app 'shop' is known, only: bill, take_order; if it ever "
            "runs, it starts nothing until `idemconsumer resume take_ordr --app shop`\n"
        )
    assert answer(dsn, "pause", "x", "--app", "fleet")["known"] is False
    assert run(dsn, "resume", "take_ordr", "--app", "shop").stderr == ""


@pytest.fixture
def folder_of_shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def test_one_worker_of_a_launcher_is_drained_and_a_hangup_brings_it_back(dsn: str, folder_of_shop: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
    log = folder_of_shop / "log"
    with log.open("w") as stderr:
        launcher = forked.Popen(
            [sys.executable, "-m", "idemconsumer", "run", "shop:app", "--workers", "2"],
            cwd=folder_of_shop, env=environment | {"IDEMCONSUMER_DSN": dsn}, stdin=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
    try:
        eventually(lambda: len(running(dsn)) == 2)
        first, second = running(dsn)
        assert run(dsn, "drain", str(first), "--reason", "too hot").exit_code == 0
        eventually(lambda: list(running(dsn)) == [second])
        eventually(lambda: "not restarted until SIGHUP" in log.read_text())

        (folder_of_shop / "pyproject.toml").write_text("[tool.idemconsumer]\nconcurrency = 3\n")
        launcher.send_signal(signal.SIGHUP)
        eventually(lambda: list(running(dsn).values()) == [3, 3])
        assert running(dsn).keys().isdisjoint({first, second})
        assert [entry["what"] for entry in answer(dsn, "audit")] == ["reload", "drain"]
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(PATIENCE) == Exit.DONE
        assert running(dsn) == {}
    finally:
        launcher.kill()
        launcher.wait()


def running(dsn: str) -> dict[int, int]:
    """The lanes of each worker, by its id."""
    lines = answer(dsn, "workers", "list")
    return {line["id"]: line["handlers"]["take_order"]["lanes"] for line in lines if line["state"] == "running"}
