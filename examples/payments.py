"""Payments from three brokers, each applied once. Copy what you need; `README.md` beside this says how to run it.

A handler is what keys are unique within. The three below are three handlers, so a payment that arrives through two
brokers is booked by each. Where it is the same payment, name the sources in one decorator instead:

    @app.idempotent_handler("kafka:payments", "rabbitmq:payments", key="id")
"""

from dataclasses import dataclass

from idemconsumer import App, Reject, Tx

app = App("shop")  # part of every key, and the Kafka consumer group


@dataclass
class Payment:
    id: str
    account: str
    amount: int


async def book(payment: Payment, tx: Tx) -> dict[str, int]:
    """An ordinary function: call it from a test with a `tx` of your own."""
    row = await tx.execute(
        "update account set balance = balance + %s where name = %s returning balance",
        (payment.amount, payment.account),
    )
    booked = await row.first()
    if booked is None:
        raise Reject("no_such_account", {"account": payment.account})  # final; stored, and what a duplicate gets
    return {"balance": booked[0]}  # stored with the key, and what a duplicate gets


# Everything through `tx` is committed together with the key, or not at all.
@app.idempotent_handler("postgres:payments", key="id")
async def from_postgres(payment: Payment, tx: Tx) -> dict[str, int]:
    return await book(payment, tx)


# Payments of one account stay in order. The topic has to exist; needs pip install 'idemconsumer[kafka]'.
@app.idempotent_handler("kafka:payments", key="id", order_by="account", retain="14d")
async def from_kafka(payment: Payment, tx: Tx) -> dict[str, int]:
    return await book(payment, tx)


# The queue has to exist; needs pip install 'idemconsumer[rabbitmq]'.
@app.idempotent_handler("rabbitmq:payments", key="id", max_attempts=3)
async def from_rabbitmq(payment: Payment, tx: Tx) -> dict[str, int]:
    return await book(payment, tx)
