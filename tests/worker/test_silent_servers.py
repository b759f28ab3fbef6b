"""What a worker waits for beside its lanes, and its drain, ends although the server has gone silent (R20, J24)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import App, Tx
from idemconsumer.sql.answering import AnsweringConnection
from idemconsumer.worker import retention
from idemconsumer.worker.retention import prune_once
from tests.support.servers.proxy import Proxy, Trap
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until
from tests.support.workers import SCHEMA, Bench, Item, connected, note

Where = Literal["statement", "commit lost", "answer lost"]


@pytest.fixture
async def proxy(bench: Bench) -> AsyncIterator[Proxy]:
    async with Proxy(int(str(conninfo_to_dict(bench.dsn)["port"]))) as proxy:
        yield proxy


async def test_a_pass_of_retention_that_gets_no_answer_ends(
    bench: Bench, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, connect = list[AnsweringConnection[Any]](), retention._connect

    async def noted(dsn: str) -> AnsweringConnection[Any]:
        made.append(await connect(dsn))
        return made[-1]

    monkeypatch.setattr(retention, "_connect", noted)
    trap = proxy.freeze_at(b"begun_at", mode="after")
    pruning = asyncio.create_task(prune_once(make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port), SCHEMA))
    async with asyncio.timeout(PATIENCE):
        await trap.sprung.wait()
        made[0].patience = 0.3  # from now on: all before it may take longer
        with pytest.raises(psycopg.OperationalError, match="no answer from the server"):
            await pruning

    async def prunes() -> bool:
        return await prune_once(bench.dsn, SCHEMA) is not None

    await until(prunes, "it kept its place")


@pytest.mark.parametrize("where", ["statement", "commit lost", "answer lost"])
async def test_a_drain_does_not_wait_for_a_server_that_says_nothing(
    bench: Bench, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, where: Where
) -> None:
    """The deadlines themselves are far away: a drain hurries what it waits for."""
    tuned(monkeypatch, lookout_pause=0.05, cancel_patience=0.3)
    behind = connected(Bench(make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port), bench.broker), monkeypatch)
    app, trap, frozen = App("silent"), list[Trap](), asyncio.Event()

    @app.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        if not frozen.is_set():
            frozen.set()
            if where == "statement":
                proxy.freeze(answers_only=True)
            else:
                trap.append(proxy.freeze_at(mode="before" if where == "commit lost" else "after"))
        await note(tx, item)

    await bench.publish("q", Item("one"))
    async with behind.running(app, drain_timeout=0.1) as running, asyncio.timeout(PATIENCE):
        await frozen.wait()
        for each in trap:
            await each.sprung.wait()
        await running.leave()
    await bench.until_empty(app)
    assert bench.effects() == ["one"]
