"""What waits for the clock, what is asked for an answer, and what comes over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI
from starlette.routing import Route

from idemconsumer import App, Result, Saga, Tx
from idemconsumer.http import AcceptLater, Idempotency, IdempotencyMiddleware, Request
from idemconsumer.http.fastapi import RequestTx

office = App("office")


@dataclass
class Letter:
    id: str


@office.every("0 3 * * *", timezone="Europe/Berlin")
@office.idempotent_handler("postgres:reports", key="slot")
async def nightly(slot: dict[str, str], saga: Saga) -> str:
    return slot["slot"]


@office.idempotent_handler("rabbitmq:letters", key="id", reply=True, dead_letter_to="kafka:dead")
async def answer(letter: Letter, tx: Tx) -> str:
    await office.publish("sqs:later", {"id": letter.id}, delay="10m", tx=tx)
    await office.publish("postgres:tomorrow", {"id": letter.id}, delay="1d", tx=tx)
    return "answered " + letter.id


@office.idempotent_handler("postgres:tomorrow", "sqs:later", key="id", fingerprint=None, retain="2d")
async def note(letter: Letter, tx: Tx) -> None:
    await tx.execute("insert into effect (id) values (%s)", (letter.id,))


@office.idempotent_handler("postgres:asked", key="id")
async def ask(letter: Letter, tx: Tx) -> Result:
    return Result({"id": letter.id}, 201)


async def who(request: Request) -> str | None:
    return request.header("x-customer")


idempotency = Idempotency(office, tenant=who)
later = AcceptLater(office, ask, tenant=who, path="/asked")
api = FastAPI(routes=[Route("/asked", later), Route("/asked/{id}", later)])
api.add_middleware(IdempotencyMiddleware, idempotency=idempotency)


@api.post("/notes")
async def noted(letter: Letter, tx: RequestTx) -> dict[str, str]:
    await tx.execute("insert into effect (id) values (%s)", (letter.id,))
    return {"id": letter.id}
