"""Messages that lose their connection each time they run, kept for one process (B13).

A message can do that: it closes the connection, asks the server to end its session, or crashes it. So can a server that
is restarted. What it was is judged when the message comes again, since only a server that answers can tell. When one
session crashes, the server ends all the others too, and says so: their losses are nobody's. Nor are those of which a
connection that did nothing has ended as well: somebody has cut them all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from idemconsumer.errors import ConnectionLost, CrashedBeside

_IN_A_ROW: Final = 3
_CUTS: Final = 20  # in a row that are nobody's: there might be a message of which a proxy or a pooler ends
_LATELY: Final = 60.0  # seconds; a function may notice late that its connection has ended
_MOST: Final = 10_000  # keys; those of more are forgotten, oldest first


@dataclass(slots=True)
class _Losses:
    """`count` in a row, all with the server that was `started` then; `last` is not judged yet."""

    count: int = 0
    cuts: int = 0
    started: datetime | None = None
    last: ConnectionLost | None = None


class LostConnections:
    """By key, since the broker may deliver it anew. `server_started` and `cut_within`: see `Pool`."""

    def __init__(
        self,
        server_started: Callable[[], Awaitable[datetime]],
        cut_within: Callable[[float], bool] = lambda _: False,
    ) -> None:
        self._server_started = server_started
        self._cut_within = cut_within
        self._losses: dict[bytes, _Losses] = {}

    def __bool__(self) -> bool:
        return bool(self._losses)

    def lost(self, key: bytes, error: ConnectionLost) -> None:
        """The connection broke while the function of `key` ran. That another session crashed neither counts nor starts
        the count anew: a message that crashes its own may run beside another that does."""
        if isinstance(error, CrashedBeside):
            return
        if key not in self._losses and len(self._losses) >= _MOST:
            self._losses.pop(next(iter(self._losses)))
        self._losses.setdefault(key, _Losses()).last = error

    async def judge(self, key: bytes) -> ConnectionLost | None:
        """Its last loss, if that is news, and so many in a row were its own that it costs an attempt.

        A server that was started since the last time, or is another one, begins the count anew. Raises StoreUnavailable
        while it does not answer.
        """
        losses = self._losses.get(key)
        if losses is None or losses.last is None:
            return None
        started = await self._server_started()
        error, losses.last = losses.last, None
        if losses.cuts < _CUTS and self._cut_within(_LATELY):
            losses.cuts += 1
            return None
        losses.count = losses.count + 1 if losses.started in (None, started) else 0
        losses.started = started
        return error if losses.count >= _IN_A_ROW else None

    def suspected(self, key: bytes) -> bool:
        """Whether it has lost so many in a row that it is to be counted before it runs."""
        losses = self._losses.get(key)
        return losses is not None and losses.count >= _IN_A_ROW

    def ended(self, *keys: bytes) -> None:
        """A run of these ended in another way."""
        if self._losses:
            for key in keys:
                self._losses.pop(key, None)
