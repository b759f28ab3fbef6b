"""Which of the sessions with the same queues listen for notifications (P11).

Theory of operation. Before version 19, Postgres wakes every session of a database that listens, whatever the channel.
Each wake-up is a transaction of the server, and each session that is notified then queries for the message. So where
there are many sessions and one of them has room for all that arrives, only that one listens: the holder of an advisory
lock that all of them share. It takes no more than its lanes can start at once, so that no message waits in it that
another session could run. The others find what it leaves by the checks that they make anyway. Once that happens, there
is work for several: a session that has seen a message which had waited listens for ten minutes and, once the others
have checked too, takes as much as it may. Where there are few sessions, or sessions with so few lanes that a message or
two would fill them, all of them listen.
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

FEW_LANES: Final = 4  # lanes of a queue; with fewer the next message may find all of them busy
WAITED: Final = 0.1  # seconds; a session that listens takes a message sooner if it has room
_FEW: Final = 3  # sessions that may all listen; the fewer there are, the less likely is an early check by another one
_ALL: Final = 1.25  # seconds within which each of the other sessions has checked too
_BUSY: Final = 600.0  # seconds for which a session listens after it has seen a message that had waited
# Seconds, about, until the second try to become the one that listens; then between two later tries.
_FIRST, _LEAD = 2.0, 60.0


class Waking:
    """Decides for one session whether it listens. `heard` and `missed`: see `Listening`.

    `lead` returns whether this session is the one that always listens, which it then stays until it ends, and how many
    other sessions have the same queues.
    """

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
        """Whether one session listens for all, and has had room for all messages lately."""
        return self._others >= _FEW and asyncio.get_running_loop().time() >= self._busy_until

    @property
    def sparing(self) -> bool:
        """Whether messages that its lanes cannot start at once are left to other sessions."""
        return self.one_is_enough or asyncio.get_running_loop().time() < self._all_looked

    @property
    def told(self) -> bool:
        """Whether this session listens."""
        return self._listening is not None

    def saw(self, falls: Mapping[str, float]) -> Mapping[str, float]:
        """Record a check: in how many seconds the first message of each queue can be taken. Returns those that concern
        this session: if another one listens, only the messages that it has left waiting."""
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
        """Start to listen, or stop."""
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
