"""What an app may want of its workers, wherever they run (O14)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from idemconsumer.admin.control import Controls
from idemconsumer.admin.who import user
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.decorator import Handler
from idemconsumer.settings import Settings


class Pausing(ABC):
    """The calls of `App` that pause handlers. What they need of the app comes by what it has."""

    name: str

    @property
    @abstractmethod
    def handlers(self) -> Mapping[str, Handler[..., Any]]:
        """By name."""

    @abstractmethod
    def _configured(self) -> Settings: ...

    async def pause(self, handler: str, *, reason: str | None = None, by: str | None = None) -> bool:
        """Let no worker of this app fetch or begin anything for a handler, until `resume`; also none that starts later.

        Returns once that is stored, and whether the handler was not paused already; workers obey within about a second,
        and within 15 s where they are told of nothing (behind a pooler). What runs is finished, also a saga that runs.
        What is fetched and not begun goes back where that costs nothing, and waits otherwise. `by` is this process's
        account and machine, unless given. Not paused is what `process` runs. Raises StoreUnavailable, and
        ConfigurationError for a name that is no handler of this app.
        """
        return await self._controls(handler).pause(self.name, handler, by=by or user(), reason=reason)

    async def resume(self, handler: str, *, reason: str | None = None, by: str | None = None) -> bool:
        """Let workers go on with a handler. Returns whether it was paused. Raises as `pause`."""
        return await self._controls(handler).resume(self.name, handler, by=by or user(), reason=reason)

    def _controls(self, handler: str) -> Controls:
        if handler not in self.handlers:
            known = ", ".join(self.handlers) or "none"
            raise ConfigurationError(f"app {self.name!r} has no handler {handler!r}; it has {known}")
        settings = self._configured()
        if settings.dsn is None:
            raise ConfigurationError(f"app {self.name!r}: no database is given; set IDEMCONSUMER_DSN")
        return Controls(settings.dsn, settings.schema)
