"""`python -m examples.checkout.demo`: kills the worker after each step of a checkout, and shows the resumption.

Exit code 1 when anything happened twice, or not at all. The database is a throwaway Postgres.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg

from examples.checkout.app import TABLES, Order, app, checkout
from examples.checkout.gateway import Gateway
from idemconsumer import Outcome
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.stores.migrations import migrate

ROOT = Path(__file__).parents[2]
PAUSE = 0.7  # seconds after a step, in which the worker is killed
PATIENCE = 60.0
STOCK = 100
FAILED = "no_such_address"


@dataclass(frozen=True)
class Act:
    """An order, where its worker is killed, and how it must end."""

    order: Order
    kill: str | None
    ends: str = "dispatched"


def order(number: str, *, card: str = "visa", address: str = "Elm Street 1", pause: float = PAUSE) -> Order:
    return Order(number, "lamp", 1, card, 30, address, pause)


ACTS = [
    Act(order("plain", pause=0.0), kill=None),
    Act(order("timeout", card="timeout", pause=0.0), kill=None),
    Act(order("declined", card="declined", pause=0.0), kill=None, ends="declined"),
    Act(order("killed-1"), kill="stock_reserved"),
    Act(order("killed-2", card="slow"), kill="charged, not answered"),
    Act(order("killed-3"), kill="card_charged"),
    Act(order("killed-4"), kill="dispatched"),
    Act(order("killed-5", address="nowhere"), kill="refunded, not recorded", ends=FAILED),
]


class Shop:
    """A database, a gateway, and one worker at a time, each a process of its own."""

    def __init__(self, dsn: str, gateway_file: Path) -> None:
        self.gateway = Gateway(gateway_file)
        self._dsn = dsn
        self._environment = os.environ | {"IDEMCONSUMER_DSN": dsn, "CHECKOUT_GATEWAY": str(gateway_file)}
        self._worker: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        command = [sys.executable, "-m", "idemconsumer", "run", "examples.checkout.app:app", "--log-level", "error"]
        self._worker = subprocess.Popen(command, cwd=ROOT, env=self._environment)

    def kill(self) -> int:
        """SIGKILL: no drain, no goodbye."""
        assert self._worker is not None
        self._worker.kill()
        self._worker.wait()
        return self._worker.pid

    def close(self) -> None:
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._worker.wait(10)
            self._worker.kill()
        self.gateway.close()

    async def rows(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as connection:
            cursor = await connection.execute(query.encode(), params)
            return await cursor.fetchall() if cursor.description else []

    async def reached(self, act: Act) -> bool:
        """Whether the act's saga is where its worker is to be killed."""
        charged = sum(what == "charge" and card == "slow" for what, card, _ in self.gateway.effects())
        refunded = sum(what == "refund" for what, _, _ in self.gateway.effects())
        match act.kill:
            case "charged, not answered":
                return charged > 0
            case "refunded, not recorded":
                return refunded > 0
            case step:
                query = "select 1 from idemconsumer.step join idemconsumer.saga using (key)"
                where = " where step.name = %s and step.state = 2 and convert_from(body, 'utf8')::jsonb ->> 'id' = %s"
                return bool(await self.rows(query + where, step, act.order.id))


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE:g} s in vain until {what}")
        await asyncio.sleep(0.02)


async def play(shop: Shop, act: Act) -> Outcome:
    """One order, twice as the broker may deliver it, and a worker that dies at its appointed place."""
    number = act.order.id
    for _ in range(2):
        await app.publish("postgres:orders", asdict(act.order))
    told = f"{number:<9} {act.order.card:<8} "
    if act.kill is not None:
        await until(lambda: shop.reached(act), f"{number} is at {act.kill}")
        pid, died = shop.kill(), time.monotonic()
        shop.open()
        told += f"worker {pid} killed at {act.kill!r}, "
    outcome = await app.result(checkout, key=number, wait=PATIENCE)
    if act.kill is not None:
        told += f"ended by another {time.monotonic() - died:.1f} s later: "
    result = None if outcome.result is None else json.loads(outcome.result)
    state = "not ended" if outcome.state is None else outcome.state.name.lower()
    print(f"{told}{state} {result}", flush=True)
    return outcome


def verdict(
    acts: Iterable[Act],
    ends: dict[str, str],
    charges: Iterable[tuple[str, str, int]],
    moved: Iterable[tuple[str, int]],
    parcels: Iterable[str],
) -> list[str]:
    """What is wrong: each order's effects, against how it must end."""
    wrong = []
    stock: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    for number, quantity in moved:
        stock[number] += quantity
        moves[number] += 1
    sent, paid = Counter(parcels), Counter((what, card) for what, card, _ in charges)
    expected: Counter[tuple[str, str]] = Counter()
    for act in acts:
        number, card, good = act.order.id, act.order.card, act.ends == "dispatched"
        if ends.get(number) != act.ends:
            wrong.append(f"{number} ended {ends.get(number)}, not {act.ends}")
        if (stock[number], moves[number]) != ((-1, 1) if good else (0, 2)):
            wrong.append(f"{number}: stock was moved {moves[number]} times, by {stock[number]} in all")
        if sent[number] != int(good):
            wrong.append(f"{number} was dispatched {sent[number]} times")
        if act.ends != "declined":
            expected["charge", card] += 1
        if act.ends == FAILED:
            expected["refund", card] += 1
    for what, card in sorted(expected.keys() | paid.keys()):
        if (times := paid[what, card]) != expected[what, card]:
            wrong.append(f"{times} {what}s of card {card}, not {expected[what, card]}")
    return wrong


def how(outcome: Outcome) -> str:
    """`dispatched`, or the rejection's code."""
    result = None if outcome.result is None else json.loads(outcome.result)
    return str(result["code"]) if isinstance(result, dict) else "dispatched" if result else "nothing"


async def perform(shop: Shop) -> list[str]:
    await shop.rows(TABLES)
    await shop.rows("insert into stock values ('lamp', %s)", STOCK)
    shop.open()
    ends = {act.order.id: how(await play(shop, act)) for act in ACTS}
    queue = "select count(*) from idemconsumer.queue"
    await until(lambda: _none(shop, queue), "the second delivery of every order is answered")
    moved = await shop.rows("select order_id, quantity from stock_moved")
    parcels = [number for (number,) in await shop.rows("select order_id from parcel")]
    return verdict(ACTS, ends, shop.gateway.effects(), moved, parcels)


async def _none(shop: Shop, query: str) -> bool:
    return await shop.rows(query) == [(0,)]


async def main() -> int:
    with EmbeddedPostgres() as postgres, tempfile.TemporaryDirectory() as folder:
        os.environ["IDEMCONSUMER_DSN"] = postgres.dsn
        migrate(postgres.dsn, "idemconsumer")
        shop = Shop(postgres.dsn, Path(folder) / "gateway.sqlite")
        try:
            wrong = await perform(shop)
        finally:
            await app.close()
            shop.close()
    kills = sum(act.kill is not None for act in ACTS)
    for line in wrong:
        print(f"WRONG: {line}")
    print(f"{len(ACTS)} orders, each delivered twice, {kills} workers killed:", end=" ")
    print("something happened twice, or not at all" if wrong else "everything happened exactly once")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
