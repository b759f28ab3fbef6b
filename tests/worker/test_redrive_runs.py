"""Runs of `dead redrive`: what came of them, and how one is cancelled (O32)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from idemconsumer import App, Tx
from idemconsumer.admin.dead_letters import ALL, Admin
from idemconsumer.admin.redrives import Redrives
from idemconsumer.errors import ConfigurationError
from idemconsumer.rules.values import State
from tests.support.workers import SCHEMA, Bench, Item, note


class Shop:
    """A handler with a bug until `mended`, and three dead letters."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.mended, self.app = bench, False, App("shop")
        self.redrives = Redrives(bench.dsn, SCHEMA)

        @self.app.idempotent_handler("memory:q", key="id", max_attempts=1)
        async def handle(item: Item, tx: Tx) -> None:
            await note(tx, item)
            if not self.mended:
                raise ValueError("a bug")

    async def fail(self) -> None:
        await self.bench.publish("q", *map(Item, "abc"))
        await self.bench.until_empty(self.app, concurrency=1)  # their letters are in this order

    async def open(self) -> list[int]:
        return sorted([each.id for each in await Admin(self.bench.dsn, SCHEMA).dead_letters()])

    async def outcomes(self) -> dict[str, dict[str, int]]:
        return {each.run: dict(each.outcomes) for each in await self.redrives.runs()}

    def states(self) -> list[State]:
        return sorted(State(state) for (state,) in self.bench.do("select state from idemconsumer.record"))


@pytest.fixture
async def shop(bench: Bench) -> Shop:
    shop = Shop(bench)
    await shop.fail()
    return shop


async def test_what_nobody_has_begun_is_a_dead_letter_again(bench: Bench, shop: Shop) -> None:
    first, *others = await shop.open()
    await shop.redrives.redrive(ALL, by="ann", run="r")
    bench.do(
        "update idemconsumer.queue set visible_at = now() + interval '1 h'"
        " where id = (select min(id) from idemconsumer.queue)"
    )  # in hand
    assert await shop.redrives.cancel("r", by="bob") == 2
    assert await shop.redrives.cancel("r", by="bob") == 0, "it may be repeated"
    assert (await shop.open(), shop.states()) == (others, [State.PENDING, State.DEAD, State.DEAD])
    assert await shop.outcomes() == {"r": {"waiting": 1, "cancelled": 2}}

    bench.do("update idemconsumer.queue set visible_at = now()")
    shop.mended = True
    await bench.until_empty(shop.app)
    assert (bench.effects(), await shop.open()) == (["a"], others)
    with pytest.raises(ConfigurationError, match="run r was cancelled; redrive what is left without this --run"):
        await shop.redrives.redrive(ALL, by="ann", run="r")
    await shop.redrives.redrive(ALL, by="ann", run="s")
    await bench.until_empty(shop.app)
    assert sorted(bench.effects()) == ["a", "b", "c"]
    assert await shop.outcomes() == {"r": {"applied": 1, "cancelled": 2}, "s": {"applied": 2}}
    assert first not in await shop.open()


async def test_whoever_still_makes_tickets_of_it_ends(shop: Shop) -> None:
    cancelled = list[int]()

    def cancel(_: int) -> None:
        """Once there is a ticket for the first letter, and before there is another."""
        with ThreadPoolExecutor() as elsewhere:
            cancelled.append(elsewhere.submit(asyncio.run, shop.redrives.cancel("r", by="bob")).result())

    with pytest.raises(ConfigurationError, match="was cancelled"):
        await shop.redrives.redrive(ALL, by="ann", run="r", rate=5.0, progress=cancel)
    assert cancelled == [1]
    assert len(await shop.open()) == 3


async def test_what_is_decided_right_now_is_left_to_who_decides(bench: Bench, shop: Shop) -> None:
    await shop.redrives.redrive(ALL, by="ann", run="r")
    ((key,),) = bench.do("select key from idemconsumer.redrive order by id limit 1")
    async with bench.rival(key):
        assert await shop.redrives.cancel("r", by="bob") == 2
    assert len(await shop.open()) == 2


async def test_a_run_that_is_not_there_is_no_run(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="there is no run 'nope'; `idemconsumer dead runs` lists them"):
        await shop.redrives.cancel("nope", by="bob")
    assert await shop.redrives.runs() == []
