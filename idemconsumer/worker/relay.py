"""Relays the outbox of a schema; every worker that can reach the brokers does (X1 to X8). The rows are the truth."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

from idemconsumer.brokers.adapters import destination as parse_destination
from idemconsumer.brokers.queue_front import Line, LowWater
from idemconsumer.duty import Duty
from idemconsumer.errors import ConfigurationError, IdemConsumerError
from idemconsumer.logs import log
from idemconsumer.message.sources import REMOTE
from idemconsumer.observe.counts import Counts
from idemconsumer.ports.broker import Broker
from idemconsumer.ports.observer import Point
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings
from idemconsumer.sql.queries import load
from idemconsumer.stores.pool import Pool
from idemconsumer.user_code.cancellation import end
from idemconsumer.worker.outgoing import OutgoingLane
from idemconsumer.worker.relay_connections import Connections

_SOONEST: Final = 0.02  # seconds between two queries
_DESTINATIONS: Final = 1_000  # destinations with a due message that one query returns


def reachable(settings: Settings, used: Collection[str], forwarding: Collection[str]) -> list[str]:
    """The schemes that a worker relays to: those whose address it has; SQS, which needs no address, if it is `used`;
    and those to which its dead letters are forwarded, whatever the broker."""
    known = [each for each in REMOTE if getattr(settings, each) is not None or (each == "sqs" and each in used)]
    return [*known, *sorted({*forwarding} - {*known})]


class Relay:
    """The relay of one worker. `broker` creates a scheme's client; `at` is called for each batch (ports.Observer)."""

    def __init__(
        self,
        pool: Pool,
        dsn: str,
        schema: str,
        schemes: Sequence[str],
        broker: Callable[[str], Broker],
        counts: Counts,
        at: Callable[[Point, str, Sequence[bytes]], None],
    ) -> None:
        self._pool = pool
        self._connections = {scheme: Connections(dsn, schema) for scheme in schemes}
        self._queries = load(schema)
        self._schemes = list(schemes)
        self._broker = broker
        self._counts = counts
        self._low_water = LowWater(self._raise_low_water)  # not one per lane: a lane ends after a few messages (P9)
        self._at = at
        self._lanes: dict[str, tuple[OutgoingLane, asyncio.Task[None]]] = {}
        self._duty = Duty(self._look, math.inf)
        self._unusable = set[str]()  # schemes and destinations for which that has been logged

    def wake(self, destination: str = "") -> None:
        """Something can be sent to this destination or, if it is empty, to some destination."""
        if destination in self._lanes:
            self._lanes[destination][0].wake()
        elif destination and not self._duty.stopped:
            self._begin(destination)
        else:
            self._duty.wake()

    def stop(self) -> None:
        """Make `run` return once nothing is left that can be sent."""
        self._duty.stop()

    async def run(self) -> None:
        """Run until stopped or cancelled."""
        try:
            await self._duty.run()
            for lane, _ in self._lanes.values():
                lane.stop()
            await asyncio.gather(*(task for _, task in self._lanes.values()))
        finally:
            try:
                await end(*(task for _, task in self._lanes.values()))
            finally:
                for connections in self._connections.values():
                    await connections.close()

    async def _look(self) -> None:
        with suppress(IdemConsumerError):  # said by the lanes of handlers
            for (destination,) in await self._pool.read("outbox_destinations", {"limit": _DESTINATIONS}):
                if destination in self._lanes:
                    self._lanes[destination][0].wake()
                else:
                    self._begin(destination)
        if not self._duty.stopped:
            await asyncio.sleep(_SOONEST)

    def _begin(self, destination: str) -> None:
        scheme = destination.partition(":")[0]
        if scheme not in self._schemes or scheme in self._unusable:
            return  # other workers relay it; if none does, `doctor` reports that (X7)
        try:
            parse_destination(destination)
        except ConfigurationError as error:
            self._say_unusable(destination, error)
            return
        try:
            broker = self._broker(scheme)
        except ConfigurationError as error:
            self._say_unusable(scheme, error)
            return
        lane = OutgoingLane(
            destination, broker, self._connections[scheme], self._queries, self._counts, self._low_water, self._at
        )
        task = asyncio.create_task(lane.run())
        self._lanes[destination] = lane, task
        task.add_done_callback(lambda _: self._lanes.pop(destination))

    async def _raise_low_water(self, line: Line) -> int:
        given = {"line": line[0], "name": line[1]}
        async with next(iter(self._connections.values())).one() as connection, connection.transaction():
            ((behind,),) = await (await connection.execute(self._queries["raise_low_water"], given)).fetchall()
        return int(behind)

    def _say_unusable(self, what: str, error: ConfigurationError) -> None:
        if what not in self._unusable:
            self._unusable.add(what)
            log.error("outgoing messages cannot be relayed by this worker", destination=what, error=error_text(error))
