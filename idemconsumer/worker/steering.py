"""Keeps a worker on record (O13), and applies people's decisions about it and its handlers (O14, O15).

One statement runs every twelve seconds, on a connection that the Postgres queue has open anyway; a notification only
makes the next one come earlier. While the database does not answer, the last known decisions apply.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec

from idemconsumer.duty import Duty
from idemconsumer.errors import StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.ports.broker import Lag
from idemconsumer.redaction import error_text
from idemconsumer.worker.conditions import Conditions
from idemconsumer.worker.lanes import Lanes

EVERY: Final = 12.0  # seconds between two statements
_SOONEST: Final = 0.25  # the same, however many notifications arrive
_AGAIN: Final = 2.0  # the same after a failed statement
_FAREWELL: Final = 1.0

Ask = Callable[[str, dict[str, Any]], Awaitable[list[tuple[Any, ...]]]]  # runs a statement, given by its name


class Pause(msgspec.Struct, frozen=True):
    """Who has paused a handler, when and why."""

    app: str
    handler: str
    at: str
    by: str
    reason: str | None = None


_PAUSES: Final = msgspec.json.Decoder(list[Pause])


class Steering:
    """The record and the decisions of one worker. Call `begin` before anything is fetched, run `run` beside the lanes,
    and call `end` after them."""

    def __init__(
        self,
        handlers: Sequence[BoundHandler],
        place: int,
        drain: Callable[[], None],
        lag: Callable[[], Mapping[str, Lag]] = dict,
        relays: Sequence[str] = (),
    ) -> None:
        """`place`: the number of this worker within its launcher. `drain` is called once a person wants it to leave.
        `lag`: how far behind its sources it is, as far as that is known. `relays`: schemes to which it relays the
        outbox."""
        self._relays = list(relays)
        self._handlers = handlers
        self._drain = drain
        self._lag = lag
        self._duty = Duty(self._look, first=_AGAIN, again=lambda _: _AGAIN, failed=self._say_failed)
        self._state = "running"
        self._ask: Ask
        self._has_looked = False
        self._id: int | None = None
        self._lanes: Lanes | None = None
        self._conditions: Conditions | None = None
        self._pauses: Mapping[str, Pause] = {}
        self._given = {
            "app": handlers[0].app,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "place": place,
        }

    def told(self) -> None:
        """Somebody has made a decision: read it soon."""
        self._duty.wake()

    def leaving(self) -> None:
        """A drain has begun: record that soon."""
        self._state = "draining"
        self._duty.wake()

    async def begin(self, ask: Ask) -> bool:
        """Put this worker on record and read which handlers are paused. Returns True. Raises StoreUnavailable while
        that cannot be read; then nothing may start."""
        self._obey(await ask("register_process", self._said()))
        return True

    def steer(self, lanes: Lanes) -> None:
        """Apply the pauses to these lanes, now and from now on."""
        self._lanes = lanes
        lanes.pause(self._pauses.keys())

    def watch(self, conditions: Conditions) -> None:
        """Record the conditions of the handlers from now on."""
        self._conditions = conditions

    async def run(self, ask: Ask) -> None:
        """Run until cancelled."""
        self._ask = ask
        await self._duty.run()

    async def _look(self) -> float:
        self._obey(await self._ask("refresh_process", self._said()))
        self._has_looked = True
        await asyncio.sleep(_SOONEST)
        return EVERY

    def _say_failed(self, error: BaseException) -> None:
        # At the start no session may be open yet, and in a drain its connection may already be closed.
        if self._has_looked and self._state != "draining":
            log.info("paused handlers could not be read, using the last known ones", error=error_text(error))

    async def end(self, ask: Ask) -> None:
        """Remove the record, if the database answers soon. Otherwise the worker is later seen as lost, and pruned."""
        if self._id is not None:
            with suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(_FAREWELL):
                    await ask("forget_process", {"id": self._id})

    def _said(self) -> dict[str, Any]:
        more = {"id": self._id, "version": _version(), "state": self._state}
        return self._given | more | {"handlers": msgspec.json.encode(self._doings()).decode()}

    def _doings(self) -> dict[str, Any]:
        lanes, lag = self._lanes, self._lag()
        return {
            handler.name: {
                "sources": [each.source for each in handler.subscriptions],
                "queues": [handler.own_source, handler.retry_source],
                "lag": {each.source: lag[each.source] for each in handler.subscriptions if each.source in lag},
                "paused": handler.name in self._pauses,
                "lanes": 0 if lanes is None else lanes.of(handler.name).count,
                "relays": self._relays,
                "running": 0 if lanes is None else lanes.of(handler.name).running,
                "conditions": [] if self._conditions is None else self._conditions.of(handler),
                "outcomes": {} if lanes is None else lanes.in_hand.counts.of(handler.name).outcomes,
            }
            for handler in self._handlers
        }

    def _obey(self, rows: Sequence[tuple[Any, ...]]) -> None:
        ((self._id, leave, pauses),) = rows
        decided = {each.handler: each for each in _PAUSES.decode(pauses)}
        before = self._pauses
        self._pauses = {each.name: decided[each.name] for each in self._handlers if each.name in decided}
        for name in self._pauses.keys() - before.keys():
            each = self._pauses[name]
            log.warning("handler paused", handler=name, by=each.by, since=each.at, reason=each.reason)
        for name in before.keys() - self._pauses.keys():
            log.info("handler resumed", handler=name)
        if self._lanes is not None:
            self._lanes.pause(self._pauses.keys())
        if before != self._pauses:
            self._duty.wake()  # record soon that the decision is applied
        if leave and self._state == "running":
            self._state = "draining"
            self._drain()


@cache
def _version() -> str:
    try:
        return version("idemconsumer")
    except PackageNotFoundError:
        return "unknown"
