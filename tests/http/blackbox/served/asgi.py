"""The service on FastAPI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse

from idemconsumer.http import IdempotencyMiddleware
from idemconsumer.http.asgi_wire import Asgi, Message, Receive, Scope, Send
from idemconsumer.http.fastapi import RequestTx, document
from tests.http.blackbox.served import behaviour
from tests.http.blackbox.served.behaviour import Gate
from tests.http.blackbox.served.config import Config
from tests.http.blackbox.served.policies import ROUTES, idempotency


def make(config: Config) -> Asgi:
    api = FastAPI()

    async def leased(request: Request) -> Response:
        async def add(name: str) -> None:
            await asyncio.to_thread(behaviour.add, config.effects, name)

        return await _behave(request, config, add)

    async def joined(request: Request, tx: RequestTx) -> Response:
        async def add(name: str) -> None:
            await tx.execute(behaviour.ADD, (name,))

        async def send(statement: str) -> None:
            await tx.connection.execute(statement)  # what Tx itself would refuse

        return await _behave(request, config, add, send)

    @api.get("/effects/{name}")
    async def effects(name: str) -> int:
        return await asyncio.to_thread(behaviour.count, config.effects, name)

    for name in (*ROUTES, "unnamed"):
        api.add_api_route(f"/leased/{name}", leased, methods=["POST", "PATCH", "PUT", "HEAD"])
        if config.store != "redis":
            api.add_api_route(f"/joined/{name}", joined, methods=["POST"])
    door = idempotency(config)
    document(api, door)
    return Dying(CORSMiddleware(IdempotencyMiddleware(api, door), allow_origin_regex=".*"))


async def _behave(
    request: Request,
    config: Config,
    add: Callable[[str], Awaitable[None]],
    send: Callable[[str], Awaitable[None]] | None = None,
) -> Response:
    query, body = request.query_params, await request.body()
    await add(request.headers["x-effect"])
    if "events" in query:
        return StreamingResponse(_events(query["events"], config, query["gate"]), media_type="text/event-stream")
    if "gate" in query:
        await _pass(Gate(config.folder, query["gate"]))
    if request.headers.get("x-die") == "running":
        behaviour.die()
    if "fail" in query:
        raise RuntimeError("the endpoint was asked to fail")
    if "sql" in query and send is not None:
        with contextlib.suppress(Exception):
            await send(query["sql"])
    reply = behaviour.reply(query, body)
    response = Response(reply.body, reply.status)
    for name, value in reply.headers:
        response.headers.append(name, value)
    return response


async def _events(number: str, config: Config, gate: str) -> AsyncIterator[bytes]:
    for event in range(int(number)):
        yield f"data: {event}\n\n".encode()
        if event == 0:
            await _pass(Gate(config.folder, gate))


async def _pass(gate: Gate) -> None:
    gate.arrive()
    for _ in range(behaviour.MOST_GLANCES):
        if gate.is_open:
            return
        await asyncio.sleep(behaviour.GLANCE)


class Dying:
    """Kills the process in front of an answer, if its request says so."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def dying(message: Message) -> None:
            behaviour.die()

        dies = scope["type"] == "http" and (b"x-die", b"answering") in scope["headers"]
        await self._app(scope, receive, dying if dies else send)
