"""The mark `crash_matrix`: the test's message survives every crash point, or the test fails and says which one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from idemconsumer import App, Tx
from idemconsumer.testing import Idem
from tests.testing_kit.projects import run

shop = App("shop")


@dataclass
class Discount:
    percent: int


@shop.resource
async def discount() -> AsyncIterator[Discount]:
    raise AssertionError("the test gives one")
    yield Discount(0)


@shop.idempotent_handler("kafka:orders", key="id")
async def pay(order: dict[str, str], tx: Tx, discount: Discount) -> None:
    await tx.execute("insert into effect (id) values (%s)", (f"{order['id']} for {100 - discount.percent}",))


@pytest.mark.crash_matrix(tables=["effect"])
async def test_its_first_message_survives_each_point_and_then_the_kit_goes_on(idem: Idem) -> None:
    kit = await idem(shop, resources={Discount: Discount(30)})
    await kit.rows("insert into effect (id) values ('before')")
    await kit.send("kafka:orders", {"id": "1"})
    await kit.send("kafka:orders", {"id": "2"})
    await kit.drain()
    assert [each.handler for each in kit.handled] == [pay.name, pay.name]
    assert await kit.rows("select id from effect order by place") == [("before",), ("1 for 70",), ("2 for 70",)]


WRONG = """
import psycopg
import pytest
from idemconsumer import App, Tx
from psycopg.conninfo import make_conninfo

app = App("a")

@pytest.fixture(scope="session")
def idem_setup():
    return "create table effect (id text)"

@app.idempotent_handler("kafka:orders", key="id")
async def handle(order: dict[str, str], tx: Tx) -> None:
    info = tx.connection.info
    dsn = make_conninfo(host=info.host, port=info.port, dbname=info.dbname, user=info.user, password=info.password)
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.execute("insert into effect (id) values (%s)", (order["id"],))

@pytest.mark.asyncio
@pytest.mark.crash_matrix(tables=["effect"])
async def test_outside_of_its_transaction(idem):
    kit = await idem(app)
    await kit.send("kafka:orders", {"id": "1"})

@pytest.mark.asyncio
@pytest.mark.crash_matrix(tables=["effect"])
async def test_no_message(idem):
    await idem(app)

@pytest.mark.asyncio
@pytest.mark.crash_matrix()
async def test_no_tables(idem):
    await idem(app)

@pytest.mark.asyncio
@pytest.mark.crash_matrix(table=["effect"])
async def test_a_typing_error(idem):
    await idem(app)

@pytest.mark.crash_matrix(tables=["effect"])
def test_no_fixture():
    pass

@pytest.mark.asyncio
@pytest.mark.crash_matrix(tables=["nothing"])
async def test_other_tables(idem):
    kit = await idem(app)
    await kit.send("kafka:orders", {"id": "1"})
"""


def test_what_is_wrong_fails_the_test_and_so_does_a_mark_that_shows_nothing(folder: Path) -> None:
    (folder / "test_it.py").write_text(WRONG)
    done = run(folder, "--strict-markers", "-W", "error")
    assert "2 failed, 1 passed, 4 errors" in done.stdout, done.stdout + done.stderr
    assert "app 'a': " in done.stdout
    assert ": twice\n" in done.stdout
    assert "no kit of it has sent a message" in done.stdout
    assert "tables and ignore are lists of names; write tables=['stock']" in done.stdout
    assert "not table=; write @pytest.mark.crash_matrix(tables=['stock'])" in done.stdout
    assert "but has no fixture `idem`" in done.stdout
    assert "has no table 'nothing'" in done.stdout
