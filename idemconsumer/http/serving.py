"""The answer to one request of ASGI goes to its client. What a route without Tx has begun goes on without one (H13)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Final

from idemconsumer.http.exchange import Exchange
from idemconsumer.http.modes import Answer, CutOff, Open
from idemconsumer.http.problems import GOES_ON
from idemconsumer.http.wire import respond
from idemconsumer.logs import log
from idemconsumer.user_code.cancellation import uninterrupted, until_done

_GOING_ON: Final[set[asyncio.Task[None]]] = set()  # else Python would close them


async def serve(exchange: Exchange, answering: Awaitable[Answer]) -> None:
    """Send the answer. An error, and a cancellation of this, end the application."""
    try:
        answer = await answering
    except BaseException:
        await exchange.discard()
        raise
    if answer.live and answer.open is not None:
        await _go_on_under_its_key(exchange, answer, answer.open)
    elif answer.live:
        await exchange.go_on(answer.marks)
    else:
        await exchange.discard()
        await respond(exchange.send, answer.response)


async def _go_on_under_its_key(exchange: Exchange, answer: Answer, held: Open) -> None:
    """Raises CutOff if the key is lost: the client gets no end of the response."""
    going = asyncio.ensure_future(exchange.go_on(answer.marks))
    try:
        await asyncio.wait([going, held.lost], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not going.done():
            going.cancel()
            await uninterrupted(asyncio.wait({going}))
        await uninterrupted(held.end())
    if going.cancelled():
        raise CutOff("the key of a request was lost in the middle of its response")
    going.result()


async def serve_to_its_end(exchange: Exchange, answering: Coroutine[Any, Any, Answer], route: str) -> None:
    """The same, but nothing cancels an application that has begun: whoever cancels it does not know whether it still
    runs, in a thread say, and its key would be given back too early. If its time is over, or this is cancelled, it goes
    on by itself, and its answer goes nowhere but on record.
    """
    task = asyncio.create_task(answering)
    either: list[asyncio.Future[Any]] = [task, exchange.begun]
    try:
        await until_done(*either)
        limit = exchange.begun.result() if exchange.begun.done() else None
        await (until_done(task) if limit is None else asyncio.wait([task], timeout=limit))
    except asyncio.CancelledError:
        try:
            if not exchange.begun.done():
                task.cancel()
                await uninterrupted(until_done(*either))
        finally:
            _leave(exchange, task, route)
        raise
    if task.done():
        await serve(exchange, task)
        return
    log.warning("a request exceeded its timeout and still runs", route=route, timeout=limit)
    send = exchange.send
    _leave(exchange, task, route)
    await respond(send, GOES_ON.response)


def _leave(exchange: Exchange, answering: asyncio.Task[Answer], route: str) -> None:
    exchange.leave()
    task = asyncio.create_task(_serve_nobody(exchange, answering, route))
    _GOING_ON.add(task)
    task.add_done_callback(_GOING_ON.discard)


async def _serve_nobody(exchange: Exchange, answering: asyncio.Task[Answer], route: str) -> None:
    try:
        await serve(exchange, answering)
    except Exception as error:  # noqa: BLE001 - no server is left that would log it
        log.error("a request failed after its client had left", route=route, exc_info=error)
