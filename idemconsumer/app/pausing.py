"""Pause and resume the handlers of an app in all its workers, wherever they run (O14)."""

from __future__ import annotations

from idemconsumer.admin.audit import user
from idemconsumer.admin.control import Controls
from idemconsumer.app.app_state import AppState
from idemconsumer.errors import ConfigurationError


class Pausing(AppState):
    """The calls of `App` that pause handlers."""

    async def pause(self, handler: str, *, reason: str | None = None, by: str | None = None) -> bool:
        """Stop all workers of this app from fetching or beginning anything for a handler, until `resume`. Workers that
        start later obey too.

        Returns once the pause is stored: True unless the handler was paused already. Workers obey within about a
        second, or within 15 s if they get no notifications (behind a pooler). Runs in progress finish, sagas too. A
        message that is fetched but not begun goes back to its queue if that costs it nothing; otherwise it waits in the
        worker. `by` defaults to this process's account and machine. `process` is not paused. Raises StoreUnavailable,
        and ConfigurationError for a name that is not a handler of this app.
        """
        return await self._controls(handler).pause(self.name, handler, by=by or user(), reason=reason)

    async def resume(self, handler: str, *, reason: str | None = None, by: str | None = None) -> bool:
        """Let workers run a paused handler again. Returns whether it was paused. Raises as `pause`."""
        return await self._controls(handler).resume(self.name, handler, by=by or user(), reason=reason)

    def _controls(self, handler: str) -> Controls:
        if handler not in self._handlers:
            known = ", ".join(self._handlers) or "none"
            raise ConfigurationError(f"app {self.name!r} has no handler {handler!r}; it has {known}")
        return Controls(*self._database())
