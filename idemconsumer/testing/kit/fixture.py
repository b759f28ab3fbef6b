"""What the fixture `idem` is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from idemconsumer.app.app import App
from idemconsumer.errors import ConfigurationError
from idemconsumer.testing.kit.databases import Databases, Setup
from idemconsumer.testing.kit.idem import Kit
from idemconsumer.testing.kit.marked import MarkedTest


class Idem:
    """Makes the kits of one test, and closes them afterwards."""

    def __init__(self, databases: Databases, setup: Setup, marked: MarkedTest | None) -> None:
        self._databases, self._setup, self._marked = databases, setup, marked
        self._kits: list[Kit] = []
        self._loop = asyncio.get_running_loop()

    async def __call__(self, *apps: App, resources: Mapping[type, object] | None = None) -> Kit:
        """Start these apps. `resources` replace, by type, those that `@app.resource` would make.

        Raises ConfigurationError for an app that no worker could run, and EmbeddedUnavailable without a Postgres.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigurationError(
                "the test runs in another event loop than its fixture `idem`; set asyncio_default_fixture_loop_scope "
                "to the loop_scope of the test"
            )
        if not apps:
            raise ConfigurationError("idem() was given no app; write kit = await idem(app)")
        for app in apps:
            if not isinstance(app, App):
                given = app.__name__ if isinstance(app, type) else type(app).__name__
                raise ConfigurationError(f"idem() was given {given}, which is not an app; give an App, as in idem(app)")
        kit = Kit(self._databases, self._setup, apps, resources or {}, self._marked)
        self._kits.append(kit)
        return await kit.begin()

    async def close(self) -> None:
        """Close the kits, the last one first."""
        while self._kits:
            await self._kits.pop().close()
        if self._marked is not None:
            self._marked.check()
