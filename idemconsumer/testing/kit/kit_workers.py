"""The apps of a kit at work: their own workers in the test's event loop, with the kit's brokers and its database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from idemconsumer.app.app import App
from idemconsumer.errors import ConfigurationError
from idemconsumer.logs import log
from idemconsumer.message.message import Message
from idemconsumer.message.sources import consumes
from idemconsumer.ports.broker import Broker
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.schedules import Schedule
from idemconsumer.rules.values import Outcome
from idemconsumer.settings import Settings
from idemconsumer.testing.kit.costs import passing
from idemconsumer.testing.kit.databases import SCHEMA
from idemconsumer.testing.kit.hub import Hub
from idemconsumer.testing.kit.kit_broker import KitBroker
from idemconsumer.testing.surroundings import NOWHERE, lent
from idemconsumer.worker.worker import Surroundings, Worker

if TYPE_CHECKING:
    from idemconsumer.testing.matrix import MarkedTest

_LANES: Final = 4
_NEVER: Final = 1e9  # seconds; the kit itself prunes after it has moved the time


class Seen:
    """An Observer that records each outcome, and counts events."""

    def __init__(self, ended: Callable[[str, Message, Outcome], None]) -> None:
        self.events = 0
        self._ended = ended

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        self.events += 1
        passing(point)

    def ended(self, handler: str, message: Message, outcome: Outcome) -> None:
        """See `ports.SeesOutcomes`."""
        self.events += 1
        self._ended(handler, message, outcome)


class KitWorkers:
    """The workers of the kit's apps. From `begin` to `end`, all calls of the apps, such as `app.start` and
    `app.publish`, also go to the kit's database and brokers."""

    def __init__(self, apps: Sequence[App], resources: Mapping[type, object], hub: Hub, seen: Seen) -> None:
        """`resources` replace those that the apps would make. Raises ConfigurationError for a resource that no app
        has."""
        known = {type for app in apps for type in app._resources}
        if unknown := [type.__name__ for type in resources if type not in known]:
            raise ConfigurationError(
                f"resources={{{unknown[0]}: …}}: no app of this kit has an @app.resource of that type; they have "
                f"{', '.join(sorted(each.__name__ for each in known)) or 'none'}"
            )
        if len({app.name for app in apps}) < len(apps):
            raise ConfigurationError("idem(…) was given two apps of one name; their keys would be the same")
        self.apps = apps
        self.workers: dict[str, Worker] = {}
        self.schedules: list[tuple[str, Schedule]] = []
        self._resources = resources
        self._hub = hub
        self._seen = seen
        self._stack = ExitStack()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def begin(self, dsn: str, locks: int) -> None:
        """Start the workers, which run concurrently, on a database whose server has `locks` locks. Raises
        ConfigurationError for an app that no worker can run."""
        settings = _settings(dsn)
        around = Surroundings(self._broker, _stuck, settings, locks)
        for app in self.apps:
            self._stack.enter_context(lent(app, self._resources, around))
            if app.handlers:
                self.workers[app.name] = worker = app.worker(settings, self._seen)
                for each in (each for handler in worker.handlers for each in handler.subscriptions):
                    self._hub.queue(each)  # before the first message, like a group that has consumed before
                self.schedules += [(app.name, each) for each in app.schedules(worker.handlers)]
                self._running[app.name] = asyncio.create_task(worker.run(), name=f"idem {app.name}")

    async def disturb(self, marked: MarkedTest, message: Message, dsn: str) -> None:
        """Run the app that consumes the message through the crash matrix. Only between `end` and `begin`."""
        consumer = next(
            app for app in self.apps for each in app.handlers.values()
            if any(consumes(source, message.source) for source in each.plan.sources)
        )  # fmt: skip
        await marked.run(consumer, message, _settings(dsn), self._resources, dsn)

    def check(self) -> None:
        """Raise the error of a worker that has ended before its time."""
        for app, task in self._running.items():
            if task.done():
                task.result()
                raise ConfigurationError(f"the worker of app {app!r} has ended too early")

    async def end(self) -> None:
        """Stop the workers and roll back what runs: the test is over. Raises the error of a worker that ended
        before."""
        for task in self._running.values():
            if not task.done():
                task.cancel()
        try:
            for ended in await asyncio.gather(*self._running.values(), return_exceptions=True):
                if ended is not None and not isinstance(ended, asyncio.CancelledError):
                    raise ended
        finally:
            self._running, self.workers, self.schedules = {}, {}, []
            for app in self.apps:
                await app.close()
            self._stack.close()

    def _broker(self, scheme: str, _: Settings) -> Broker:
        return KitBroker(scheme, self._hub)


def _settings(dsn: str) -> Settings:
    return Settings(dsn=dsn, schema=SCHEMA, concurrency=_LANES, prune_every=_NEVER, **NOWHERE)


def _stuck(place: str) -> None:
    """Does nothing, so that a test can stop in a debugger. A production worker would exit here, so that others go on;
    the test has only this process."""
    log.warning("event loop blocked", where=place)
