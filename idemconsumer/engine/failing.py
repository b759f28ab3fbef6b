"""Handlers whose messages all fail (D17), kept for one process. The rule is in `rules.failing`."""

from __future__ import annotations

import asyncio

from idemconsumer.engine.blame import said
from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import Retry
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.rules.failing import Health

_HEALTHY = Health()


class Failing:
    """One `Health` per handler, by name. Unless it is `watched`, no handler is ever probed: nobody would wait."""

    def __init__(self, *, watched: bool) -> None:
        self.watched = watched
        self._health: dict[str, Health] = {}

    def of(self, handler: BoundHandler) -> Health:
        return self._health.get(handler.name, _HEALTHY)

    def succeeded(self, handler: BoundHandler) -> None:
        if (before := self._health.pop(handler.name, _HEALTHY)).since is not None:
            seconds = asyncio.get_running_loop().time() - before.since
            log.info("handler works again", handler=handler.name, seconds=round(seconds, 1))

    def failed(self, work: Work, error: Exception) -> bool:
        """Whether this failure costs no attempt. One that the handler asked for (Retry) is no sign, and costs one."""
        if not self.watched or isinstance(error, Retry):
            return False
        handler, now = work.handler, asyncio.get_running_loop().time()
        before = self.of(handler)
        health = self._health[handler.name] = before.failed(now, first=not work.attempts and not work.spared)
        if health.probing and not before.probing:
            log.error(
                "all messages of a handler fail, trying one at a time",
                handler=handler.name,
                failed=health.failures,
                **said(error),
            )
        return handler.options.max_attempts > 1 and health.is_free(now) and work.suspicion is not Suspicion.COUNTED
