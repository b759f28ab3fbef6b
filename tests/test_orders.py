"""The order service of examples/orders: every process is killed, and everything happens once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from examples.orders.app import CONFIRMED, TABLES, shop, stock
from examples.orders.counting import Count
from examples.orders.storm import ORDERS
from examples.orders.web import api
from idemconsumer.testing import Idem
from tests.support import ROOT
from tests.support.pids import alive
from tests.support.servers.made import Server
from tests.support.waiting import eventually

# A company whose servers are nowhere, which says what it runs.
STANDING = """
import signal
from examples.orders.company import Company
from tests.support.pids import children
from tests.support.waiting import eventually
company = Company("postgresql://127.0.0.1:1/none", "postgresql://127.0.0.1:1/none", "127.0.0.1:1")
for name in ("Django", "worker"):
    company.start(name)
launcher = company._running["worker"].pid
eventually(lambda: children(launcher))
print(*(each.pid for each in company._running.values()), *children(launcher), flush=True)
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.parametrize("orders", [20, pytest.param(ORDERS, marks=pytest.mark.long)])
def test_every_order_and_what_follows_from_it_happens_once(
    orders: int,
    kafka: Server,
    postgres18: object,  # skips, or fails under CI, where there is no embedded server
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.orders.storm", str(orders)],
        cwd=ROOT, env=os.environ | {"IDEMCONSUMER_KAFKA": kafka.address}, capture_output=True, text=True, check=False,
        timeout=200 + orders,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("PASSED\n")
    for name in ("FastAPI", "Django", "worker", "consumer"):
        assert f"{name} is killed" in done.stdout
    assert done.stdout.count(f"{orders:>7} {orders:>7} {0:>7} {0:>7}") == 6


def test_no_process_outlives_the_storm() -> None:
    with subprocess.Popen([sys.executable, "-c", STANDING], cwd=ROOT, stdout=subprocess.PIPE, text=True) as storm:
        assert storm.stdout is not None
        pids = [int(pid) for pid in storm.stdout.readline().split()]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        storm.send_signal(signal.SIGTERM)
    eventually(lambda: not any(alive(pid) for pid in pids), f"{pids} are left")


def test_a_count_sees_what_is_lost_and_what_happened_twice() -> None:
    good = Count("orders", 2, Counter(["a", "b"]))
    assert (good.lost, good.twice) == (0, 0)
    bad = Count("orders", 2, Counter(["a", "a"]))
    assert (bad.lost, bad.twice) == (1, 1)


@pytest.fixture(scope="session")
def idem_setup() -> str:
    return TABLES


async def test_an_order_is_taken_placed_and_confirmed(idem: Idem) -> None:
    kit = await idem(shop, stock)
    async with kit.http(api) as client:
        headers = {"Idempotency-Key": "1", "X-Customer": "ann"}
        order = {"ref": "1", "sku": "pen", "quantity": 2}
        taken, again = [await client.post("/orders", json=order, headers=headers) for _ in range(2)]
        assert (taken.status_code, again.status_code) == (202, 202)
        await kit.drain()
        await kit.redeliver()
        answer = await client.get(taken.headers["location"], headers=headers)
        assert answer.status_code == 201
        placed = await client.get(answer.headers["location"])
    assert placed.json() == order | {"state": "confirmed"}
    assert await kit.rows("select sku, quantity from stock_moved") == [("pen", -2)]
    assert [each.json for each in await kit.published(f"kafka:{CONFIRMED}")] == [{"id": answer.json()["id"]}]
