"""Which of the sessions with the same queues are told of messages (P11).

Theory of operation. Before version 19, Postgres wakes each session of a database that listens, whatever the channel:
each of them is a transaction of the server's, and each that is told asks for the message. So where there are many, and
one has room for all that comes, it alone listens: the one with an advisory lock that is the same for all of them. It
takes no more than its lanes begin at once, so that nothing waits in it that others could run. What it leaves is found
by the looks that the others make anyway. From then on there is work for several: whoever has seen what had waited
listens for ten minutes and, once the others have looked too, takes as much as it may. Where they are few, or have few
lanes, which a message or two would fill, all of them listen.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import psycopg

from idemconsumer.brokers.listening import Connection, Listening
from idemconsumer.duty import Duty
from idemconsumer.errors import BrokerUnavailable, ConfigurationError, SessionEnded
from idemconsumer.rules.backoff import backoff

FEW_LANES: Final = 4  # of a queue; with fewer the next message may find all of them taken
WAITED: Final = 0.1  # seconds; who is told takes a message sooner, if it has room
_FEW: Final = 3  # sessions that may all listen; that others look soon is the less likely the fewer they are
_ALL: Final = 1.25  # seconds until each of the others has looked as well
_BUSY: Final = 600.0  # seconds that one listens that has seen a message that had waited
_FIRST, _LEAD = 2.0, 60.0  # seconds, about, until the second try to be the one that listens; between two later on


class Waking:
    """Of one session. `heard` and `missed` as of `Listening`; `lead` says whether this session is the one that listens
    in any case, which it then is for as long as it lasts, and how many others there are with the same queues."""

    def __init__(
        self,
        lead: Callable[[], Awaitable[tuple[bool, int]]],
        connect: Callable[[], Awaitable[Connection]],
        heard: Callable[[str], None],
        missed: Callable[[], None],
    ) -> None:
        self._lead = lead
        self._missed = missed
        self._connect = connect
        self._heard = heard
        self._others = 0
        self._busy_until = self._all_looked = 0.0
        self._listening: Listening | None = None
        self._tries = 0
        self._duty = Duty(self._look, first=self._pause())

    @property
    def one_is_enough(self) -> bool:
        """It listens for all, and has had room for all of late."""
        return self._others >= _FEW and asyncio.get_running_loop().time() >= self._busy_until

    @property
    def sparing(self) -> bool:
        """Whether others may begin now what its lanes cannot begin at once."""
        return self.one_is_enough or asyncio.get_running_loop().time() < self._all_looked

    @property
    def told(self) -> bool:
        """Whether this session listens."""
        return self._listening is not None

    def saw(self, falls: Mapping[str, float]) -> Mapping[str, float]:
        """A look has: in how many seconds the first message of each queue can be taken. Returns what of it is for this
        session: if another one is told, only what that one has left."""
        waited = {queue: seconds for queue, seconds in falls.items() if seconds <= -WAITED}
        if waited:
            now = asyncio.get_running_loop().time()
            if self.one_is_enough:
                self._duty.wake()
                self._all_looked = now + _ALL
            self._busy_until = now + _BUSY
        return falls if self.told else waited

    async def start(self) -> None:
        """Raises ConfigurationError, and SessionEnded."""
        await self._turn()
        self._duty.start()

    async def close(self) -> None:
        await self._duty.close()
        await self._cease()

    async def _look(self) -> float | None:
        told = self.told
        try:
            await self._turn()
        except SessionEnded:
            return None
        except (BrokerUnavailable, ConfigurationError, psycopg.Error):
            pass
        if self.told and not told:
            self._missed()
        return self._pause()

    def _pause(self) -> float:
        self._tries += 1
        return backoff(self._tries, first=_FIRST, cap=_LEAD) * random.uniform(0.5, 1.5)

    async def _turn(self) -> None:
        """Begin to listen, or cease to."""
        leads, self._others = await self._lead()
        if self.one_is_enough and not leads:
            await self._cease()
        elif self._listening is None:
            listening = Listening(self._connect, self._heard, self._missed)
            await listening.start()
            self._listening = listening

    async def _cease(self) -> None:
        if self._listening is not None:
            await self._listening.close()
            self._listening = None
