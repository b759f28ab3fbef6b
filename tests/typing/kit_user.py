"""How the kit and the crash matrix look to type checkers, as in a project of users; never run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from idemconsumer import App, Message, OutcomeKind, Saga, Tx
from idemconsumer.testing import (
    CrashAt,
    EmbeddedPostgres,
    FakeSaga,
    FakeTx,
    Idem,
    Kit,
    MatrixDelivery,
    crash_matrix,
    migrate,
)

app = App("shop")


@dataclass
class Order:
    id: str
    qty: int


@dataclass
class Gateway:
    charged: list[str] = field(default_factory=list[str])


@app.resource
async def gateway() -> AsyncIterator[Gateway]:
    yield Gateway()


@app.idempotent_handler("kafka:orders", key="id")
async def pay(order: Order, tx: Tx, gateway: Gateway) -> dict[str, int]:
    rows = await tx.execute("select qty from stock where id = %s", (order.id,), into=int)
    left = await rows.first()
    await app.publish("rabbitmq:mail", {"id": order.id}, key=order.id, tx=tx)
    return {"left": left or 0}


async def put(tx: Tx, n: int) -> str:
    return str(n)


@app.idempotent_handler("postgres:rides", key="id")
async def ride(ride: dict[str, str], saga: Saga) -> str:
    out = await saga.tx("a", put, 3)
    await saga.sleep("b", "1d")
    return out + "x"


@pytest.mark.crash_matrix(tables=["stock"])
async def test_paid(idem: Idem) -> None:
    kit: Kit = await idem(app, resources={Gateway: Gateway()})
    await kit.send("kafka:orders", Order("1", 2), key=b"1", headers={"a": "b"})
    await kit.redeliver(2)
    left = await kit.drain()
    assert not left
    first, *_ = kit.outcomes
    assert first.kind is OutcomeKind.APPLIED
    for each in await kit.published("rabbitmq:mail"):
        print(each.json, each.headers, each.key, each.body)
    await kit.advance("3d")
    assert (await kit.saga("1")).state == "completed"
    assert not await kit.dead_letters()
    async with kit.assert_commits(1), kit.assert_statements(6), kit.assert_round_trips(2):
        await kit.send("kafka:orders", b"{}")
    await kit.reset()


async def consume(delivery: MatrixDelivery, dsn: str) -> None:
    print(delivery.body)
    await delivery.ack()


async def test_matrix(dsn: str) -> None:
    report = await crash_matrix(consume, {"id": 1}, dsn=dsn, tables=["stock"])
    assert not report.wrong, str(report)
    for run in report.wrong:
        print(run.what, run.point, run.effect, run.found)


async def test_fake() -> None:
    tx = FakeTx()
    tx.returns("select qty", [(3,)])
    result = await pay(Order("1", 2), tx, Gateway())
    print(result["left"])
    saga = FakeSaga(signals={"paid": 5})
    text = await ride({"id": "1"}, saga)
    print(text.upper(), saga.steps)


async def test_embedded() -> None:
    with EmbeddedPostgres() as server:
        migrate(server.dsn, "idemconsumer")
    print(Message("kafka:orders", b"x"), CrashAt)
