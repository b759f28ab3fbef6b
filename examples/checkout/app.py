"""A checkout in three steps: reserve stock, charge a card, dispatch. Copy what you need; `README.md` says more.

Stock and parcels are in the database that also holds the keys, so those steps are one transaction each (`saga.tx`).
The card is charged by somebody else, so that step is a call with a key under which it may be repeated (`saga.call`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from examples.checkout.gateway import Declined, Gateway
from idemconsumer import App, Done, NotDone, Reject, Saga, Step, Tx

app = App("checkout")

TABLES = """
create table stock (sku text primary key, quantity integer not null check (quantity >= 0));
create table stock_moved (order_id text, sku text, quantity integer);
create table parcel (order_id text, address text);
"""


@dataclass
class Order:
    id: str
    sku: str
    quantity: int
    card: str
    amount: int
    address: str
    pause: float = 0.0  # seconds after each step, so that a demonstration can kill the worker there


@app.resource
async def gateway() -> AsyncIterator[Gateway]:
    """One connection a worker process."""
    client = Gateway(Path(os.environ["CHECKOUT_GATEWAY"]))
    yield client
    client.close()


@app.idempotent_handler("postgres:orders", key="id", lease="1s", backoff="100ms, 2s")
async def checkout(order: Order, saga: Saga, gateway: Gateway) -> str:
    await saga.tx("stock_reserved", reserve_stock, order, undo=return_stock)
    await asyncio.sleep(order.pause)
    charge = await saga.call("card_charged", charge_card, gateway, order, undo=refund_card, reconcile=find_charge)
    await asyncio.sleep(order.pause)
    await saga.tx("dispatched", dispatch, order)
    await asyncio.sleep(order.pause)
    return charge


async def reserve_stock(tx: Tx, order: Order) -> None:
    left = await tx.execute(
        "update stock set quantity = quantity - %s where sku = %s and quantity >= %s",
        (order.quantity, order.sku, order.quantity),
    )
    if left.rowcount == 0:
        raise Reject("sold_out", {"sku": order.sku})
    await _move(tx, order, -order.quantity)


async def return_stock(tx: Tx, reserved: None, order: Order) -> None:
    await tx.execute("update stock set quantity = quantity + %s where sku = %s", (order.quantity, order.sku))
    await _move(tx, order, order.quantity)


async def _move(tx: Tx, order: Order, quantity: int) -> None:
    await tx.execute("insert into stock_moved values (%s, %s, %s)", (order.id, order.sku, quantity))


async def charge_card(step: Step, gateway: Gateway, order: Order) -> str:
    try:
        return await gateway.charge(str(step.key), order.card, order.amount)
    except Declined:
        raise Reject("declined") from None  # a known failure: the saga undoes what it has done
    # Anything else, a timeout above all, leaves open whether the card was charged. It is asked again, with this key.


async def find_charge(step: Step, gateway: Gateway, order: Order) -> Done[str] | NotDone:
    """Asked before the call is repeated. NotDone, for what was declined too: the repeated call then says so again."""
    answer = await gateway.find(str(step.key))
    return NotDone() if answer in (None, "declined") else Done(str(answer))


async def refund_card(step: Step, charge: str, gateway: Gateway, order: Order) -> None:
    await gateway.refund(str(step.key), order.card, order.amount)
    await asyncio.sleep(order.pause)


async def dispatch(tx: Tx, order: Order) -> None:
    if order.address == "nowhere":
        raise Reject("no_such_address")  # after the charge: it is refunded, and the stock goes back
    await tx.execute("insert into parcel values (%s, %s)", (order.id, order.address))
