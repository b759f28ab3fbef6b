"""The app of the golden outputs: what an order or a trip meets is written in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from idemconsumer import App, Reject, Retry, Saga, Step, Tx

app = App("shop")


@dataclass
class Order:
    id: str
    fate: str = "applied"


@dataclass
class Trip:
    id: str
    fate: str = "booked"


@app.idempotent_handler("postgres:orders", key="id", retain="3d", max_attempts=1)
async def take_order(order: Order, tx: Tx) -> dict[str, str]:
    match order.fate:
        case "failed":
            raise ValueError(f"no price for {order.id}")
        case "rejected":
            raise Reject("sold_out", {"article": "lamp"})
        case "billed":
            await app.publish("kafka:bills", {"order": order.id}, key=order.id, tx=tx, delay="300d")
    return {"order": order.id}


@app.idempotent_handler("postgres:mails", key="id", max_attempts=2, backoff="300d, 300d")
async def send_mail(order: Order, tx: Tx) -> None:
    raise Retry("the gateway is away")


@app.idempotent_handler("postgres:trips", key="id", version="1", max_attempts=1, lease="30s")
async def book_trip(trip: Trip, saga: Saga) -> str:
    await saga.tx("reserved", reserve, trip.id, undo=give_back)
    charge = await saga.call("charged", charge_card, trip)
    if trip.fate == "approved by hand":
        await saga.wait("approved", timeout="300d")
    return charge


async def reserve(tx: Tx, trip: str) -> int:
    return 7


async def give_back(tx: Tx, seats: int, trip: str) -> None:
    return


async def charge_card(step: Step, trip: Trip) -> str:
    await asyncio.sleep(0)
    match trip.fate:
        case "declined":
            raise Reject("declined")
        case "unknown":
            raise ConnectionError("the gateway hung up")
    return f"charge of {trip.id}"
