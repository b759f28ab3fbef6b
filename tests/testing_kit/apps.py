"""Two services, as users write them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from idemconsumer import App, Reject, Saga, Step, Tx

shop, post = App("shop"), App("post")


@dataclass
class Gateway:
    charged: list[str] = field(default_factory=list)
    fails: int = 0

    async def charge(self, order: str) -> None:
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the gateway is away")
        self.charged.append(order)


@dataclass
class Order:
    id: str
    bad: bool = False


@shop.resource
async def gateway() -> AsyncIterator[Gateway]:
    raise AssertionError("the test gives one")
    yield Gateway()


@shop.idempotent_handler("kafka:orders", key="id", backoff=("10s", "20s"))  # longer than a drain takes
async def pay(order: Order, tx: Tx, gateway: Gateway) -> str:
    if order.bad:
        raise Reject("bad")
    await gateway.charge(order.id)
    await tx.execute("insert into effect (id) values (%s)", (order.id,))
    await shop.publish("rabbitmq:paid", {"id": order.id}, key=order.id, headers={"by": "shop"}, tx=tx)
    return order.id


@post.idempotent_handler("rabbitmq:paid", key="id")
async def pack(paid: dict[str, str], tx: Tx) -> None:
    await post.publish("postgres:packed", paid, key=paid["id"], tx=tx)


@post.idempotent_handler("postgres:packed", key="id")
async def ship(packed: dict[str, str], tx: Tx) -> None:
    await tx.execute("insert into effect (id) values (%s)", ("shipped " + packed["id"],))
    await post.publish("sqs:mail", packed, tx=tx)


@shop.idempotent_handler("postgres:rides", key="id", backoff=("1h", "10h"))
async def ride(ride: dict[str, str], saga: Saga, gateway: Gateway) -> str:
    async def charge(step: Step, gateway: Gateway) -> None:
        await gateway.charge(ride["id"])

    await saga.call("charged", charge, gateway)
    await saga.sleep("rests", "1d")
    await saga.sleep("rests again", "1d")
    return "done"


@post.idempotent_handler("sqs:notes", key="id")
async def note(given: dict[str, str], tx: Tx) -> None:
    await tx.execute("insert into effect (id) values (%s)", (given["id"],))


@post.idempotent_handler("sqs:walks", key="id")
async def walk(given: dict[str, str], saga: Saga) -> None:
    async def step(tx: Tx, place: str) -> None:
        await tx.execute("insert into effect (id) values (%s)", (place,))

    await saga.tx("out", step, "out")
    await saga.tx("home", step, "home")
