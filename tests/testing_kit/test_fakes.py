"""Functions of handlers and steps run without a database."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from idemconsumer import First, Reject, Saga, SignalTimeout, Step, Tx
from idemconsumer.errors import SagaMisused
from idemconsumer.testing import FakeSaga, FakeTx


@dataclass
class Stock:
    sku: str
    qty: int


async def reserve(sku: str, tx: Tx) -> int:
    row = await (await tx.execute("select sku, qty from stock where sku = %s", (sku,), into=Stock)).first()
    if row is None:
        raise Reject("unknown")
    await tx.send("update stock set qty = qty - 1")
    return row.qty


async def create(tx: Tx, ride: str) -> str:
    await tx.execute("insert into ride values (%s)", (ride,))
    return ride


async def forget(tx: Tx, created: str, ride: str) -> None:
    await tx.execute("delete from ride where id = %s", (created,))


async def charge(step: Step, ride: str) -> str:
    return f"{ride} {step.attempt}"


async def book(ride: str, saga: Saga) -> First:
    await saga.tx("created", create, ride, undo=forget)
    assert await saga.all([saga.call("charged", charge, ride), saga.call("again", charge, ride)]) == [f"{ride} 1"] * 2
    return await saga.first(late=saga.sleep("late", "1h"), paid=saga.wait("paid", into=int, timeout="2h"))


async def test_a_fake_tx_answers_what_the_test_says() -> None:
    tx = FakeTx()
    with pytest.raises(Reject, match="unknown"):
        await reserve("pen", tx)
    tx.returns("from stock", [("pen", 3)])
    assert await reserve("pen", tx) == 3
    tx.returns("from stock", [{"sku": "pen", "qty": 4}])
    assert await reserve("pen", tx) == 4
    assert tx.executed[-1] == ("update stock set qty = qty - 1", ())
    tx.raises("update", ConnectionError())
    with pytest.raises(ConnectionError):
        await reserve("pen", tx)


async def test_a_fake_saga_runs_each_step_once_and_undoes_in_reverse() -> None:
    saga = FakeSaga(signals={"paid": 5})
    assert await book("r", saga) == ("paid", 5)
    assert saga.steps == ["created", "charged", "again", "paid"]
    await saga.undo()
    await saga.undo()
    assert saga.tx_given.executed[1:] == [("delete from ride where id = %s", ("r",))]


async def test_without_its_signal_a_wait_is_over_late() -> None:
    saga = FakeSaga()
    assert await book("r", saga) == ("late", None)
    with pytest.raises(SignalTimeout):
        await saga.wait("another")
    with pytest.raises(SagaMisused, match="two steps"):
        await saga.sleep("another", 1)
