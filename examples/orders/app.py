"""Orders that are taken over HTTP, placed by a worker, and confirmed by another service over Kafka.

`shop` and `stock` are two services, each with workers of its own. They share a database here; two would do as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from idemconsumer import App, Key, Message, Result, Tx
from idemconsumer.http import AcceptLater, Request

# No unique constraints: what is done twice is seen.
TABLES = """
create table placed (
    id uuid not null default gen_random_uuid(), ref text not null, sku text not null, quantity integer not null,
    state text not null default 'placed'
);
create table stock_moved (
    message_id text not null, order_id uuid not null, sku text not null, quantity integer not null
);
create table confirmation (order_id uuid not null);
"""
PLACED, CONFIRMED = "orders.placed", "orders.confirmed"  # topics

shop = App("shop")
stock = App("stock")


@dataclass
class Order:
    ref: str  # the customer's
    sku: str
    quantity: int


@dataclass
class Placed:
    id: str
    sku: str
    quantity: int


@dataclass
class Confirmed:
    id: str


@shop.idempotent_handler("postgres:orders", key="ref", max_age="15m")
async def place(order: Order, tx: Tx) -> Result:
    """The order, the message about it and the answer to the client are one commit."""
    rows = await tx.execute(
        "insert into placed (ref, sku, quantity) values (%s, %s, %s) returning id::text",
        (order.ref, order.sku, order.quantity),
    )
    (number,) = await rows.one()
    placed = Placed(number, order.sku, order.quantity)
    await shop.publish(f"kafka:{PLACED}", placed, key=number, tx=tx)
    return Result({"id": number}, 201, [("Location", f"/placed/{number}")])


# A message may come again, and has the same id then.
@stock.idempotent_handler(f"kafka:{PLACED}", key=Key.header("idemconsumer-message-id"))
async def reserve(placed: Placed, tx: Tx, message: Message) -> None:
    values = (message.key, placed.id, placed.sku, -placed.quantity)
    await tx.execute("insert into stock_moved values (%s, %s, %s, %s)", values)
    await stock.publish(f"kafka:{CONFIRMED}", Confirmed(placed.id), key=placed.id, tx=tx)


@shop.idempotent_handler(f"kafka:{CONFIRMED}", key=Key.header("idemconsumer-message-id"))
async def confirm(confirmed: Confirmed, tx: Tx) -> None:
    await tx.execute("update placed set state = 'confirmed' where id = %s", (confirmed.id,))
    await tx.execute("insert into confirmation values (%s)", (confirmed.id,))


async def customer(request: Request) -> str | None:
    """Whose a key is. A real service looks into a token here; None is answered with 401."""
    return request.header("x-customer")


later = AcceptLater(shop, place, tenant=customer, path="/orders")
"""POST /orders is answered with 202 and a Location, where the answer is once the order is placed."""
