"""An app's own worker as the consumer of a crash matrix, with the library's points instead of statements.

Each of its brokers is a queue in the copy of the database. So, as at a real broker, messages that were published or in
flight survive the worker that is killed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from msgspec.structs import replace

from idemconsumer.app.app import App
from idemconsumer.brokers.postgres_broker import PostgresBroker, enqueuing
from idemconsumer.errors import ConfigurationError
from idemconsumer.message.message import Message, Subscription
from idemconsumer.ports.broker import Bounds, Broker, Delivery, Finding, Outgoing, Unsent
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.settings import Settings
from idemconsumer.testing.matrix_database import MatrixDatabase
from idemconsumer.testing.matrix_process import MatrixDelivery
from idemconsumer.testing.matrix_running import LONG, Ending, Process
from idemconsumer.testing.surroundings import NOWHERE, lent
from idemconsumer.worker.worker import Surroundings

import_module("idemconsumer.worker.saga_lease")  # imported once here, and not in each forked process

_SHORT: Final = 0.15  # seconds; a worker that makes progress reaches its next point sooner


class RunsWorker:
    """Used as `consume`: runs a worker of the app until no work is left. `__qualname__` is the app's name."""

    def __init__(self, app: App, settings: Settings, resources: Mapping[type, object]) -> None:
        """`resources` replace the app's own."""
        modules = [(module, vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
        found = [(module.__name__, name) for module, its in modules for name, each in its.items() if each is app]
        # Prefer any other module to __main__: the program that imported the app would run again.
        self.__module__, self._name = min(found, key=lambda place: place[0] == "__main__", default=("", ""))
        self.__qualname__ = f"app {app.name!r}"
        self._settings = replace(settings, until_empty=True, workers=1, ops_port=None, **NOWHERE)
        self._resources = resources
        self.locks: int | None = None  # the number of locks of the copy, once it was checked
        if not self._name:
            raise ConfigurationError(
                f"crash_matrix: {self.__qualname__} is not an attribute of a module, so another process cannot find "
                "it; write it at the top level of a module"
            )

    async def __call__(self, delivery: MatrixDelivery, dsn: str) -> None:
        app: App = getattr(import_module(self.__module__), self._name)
        settings = replace(self._settings, dsn=dsn)

        def stand_in(scheme: str, settings: Settings) -> Broker:
            return _StandIn(scheme, settings, delivery.message)

        around = Surroundings(stand_in, settings=settings, locks=self.locks)
        with lent(app, self._resources, around):
            await app.worker(settings, _Telling(delivery)).run()


def check_sent(app: App, message: object) -> Message:
    """The message, if a handler of the app consumes it; else ConfigurationError."""
    sources = sorted({source for handler in app.handlers.values() for source in handler.plan.sources})
    if not isinstance(message, Message) or message.source not in sources:
        raise ConfigurationError(
            f"crash_matrix: app {app.name!r} has no handler of this message; write Message(source, body) with one of "
            f"its sources, which are {', '.join(sources) or 'none'}"
        )
    return message


class Queued:
    """Like `Delivered`: the messages are in queues of the copy, and a worker runs until the queues are empty."""

    def __init__(self, database: MatrixDatabase, schema: str, message: Message) -> None:
        self._database, self._schema = database, schema
        outgoing = Outgoing(message.body, message.headers, message.message_id)
        self._enqueue = enqueuing(schema, queue_of(message.source), outgoing)

    async def send(self) -> None:
        """Send the same message once more."""
        await self._database.execute(*self._enqueue)

    async def notice(self) -> None:
        """A worker was killed. Make its messages and its lease available at once, instead of in some seconds."""
        await self._database.execute(f"update {self._schema}.queue set visible_at = clock_timestamp()")
        await self._database.execute(f"update {self._schema}.worker set until = clock_timestamp()")

    def is_done(self, process: Process, ending: Ending) -> bool:
        """Whether no work is left."""
        return ending == "done"

    def quiet(self, rival: Process) -> float:
        """Like `Delivered.quiet`. A worker exits only when the queues are empty, and waits for a key in flight."""
        settled = any(each.startswith(Point.SETTLED) for each in rival.points)
        return _SHORT if settled or rival.repeats else LONG


class _Telling:
    """An Observer that reports each point to the test before the worker goes on."""

    def __init__(self, delivery: MatrixDelivery) -> None:
        self._delivery = delivery

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        """The method of every Observer."""
        self._delivery._at(f"{point} {handler}")


def queue_of(source: str) -> str:
    """The queue that stands for a source."""
    scheme, _, name = source.partition(":")
    return name if scheme == "postgres" else f"{scheme}.{name}"


def _source_of(queue: str) -> str:
    """The source for which `postgres:scheme.name` stands."""
    return queue.removeprefix("postgres:").replace(".", ":", 1)


class _StandIn:
    """Replaces the broker of one scheme. A message that equals the matrix's own, `given`, gets its properties."""

    hands_over = False

    def __init__(self, scheme: str, settings: Settings, given: Message) -> None:
        self._scheme, self._given = scheme, given
        self._queues = PostgresBroker(settings)

    def feed(self, subscription: Subscription) -> str:
        return self._scheme

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> Any:
        queues = [Subscription(f"postgres:{queue_of(each.source)}", each.handler, each.group) for each in subscriptions]
        share, paused = bounds.share, bounds.paused
        bounds = dataclasses.replace(
            bounds,
            share=None if share is None else lambda queue: share(_source_of(queue)),
            paused=lambda queue: paused(_source_of(queue)),
        )
        session = await self._queues.open(queues, bounds)
        fetch = session.fetch

        async def fetched() -> Sequence[Delivery]:
            return [replace(each, message=self._as_sent(each.message)) for each in await fetch()]

        session.fetch = fetched  # type: ignore[method-assign]
        return session

    def _as_sent(self, message: Message) -> Message:
        source = _source_of(message.source)
        if source == self._given.source and message.body == self._given.body:
            return replace(self._given, position=message.position, attempt=message.attempt)
        return replace(message, source=source)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        await self._queues.publish(f"{self._scheme}.{name}", messages)

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        await self.publish(name, messages)
        return [None] * len(messages)

    async def check_destination(self, name: str) -> None:
        return

    async def check(self, subscription: Subscription) -> list[Finding]:
        return [Finding("ok", subscription.source, "a queue of the crash matrix")]

    async def close(self) -> None:
        await self._queues.close()
