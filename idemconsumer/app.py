"""App: the handlers of one service, under one name that is part of every key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ParamSpec, TypeVar, Unpack

from idemconsumer import codecs
from idemconsumer._engine import Engine, Work
from idemconsumer._model import Message, Outcome
from idemconsumer.brokers import connect
from idemconsumer.brokers import destination as parse_destination
from idemconsumer.brokers.postgres import enqueue
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers import BoundHandler, Decorate, Handler, Options, asks_for_key, idempotent_handler
from idemconsumer.keys import KeySpec
from idemconsumer.ports import Broker, Observer, Outgoing, Tx
from idemconsumer.settings import Settings, load
from idemconsumer.stores.postgres import PostgresStore
from idemconsumer.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class App:
    """Collects handlers, and makes the workers that run them.

    The name is part of every stored key and, unless `consumer_group=` says otherwise, the Kafka consumer group. So
    renaming an app makes every message new.
    """

    def __init__(self, name: str) -> None:
        given: object = name
        if not isinstance(given, str) or not name.isprintable() or name != name.strip() or name[:1] in ("", "~"):
            raise ConfigurationError(f"app name {name!r}: write a printable text such as App('shop')")
        self.name = name
        self._handlers: dict[str, Handler[..., Any]] = {}
        self._opening = asyncio.Lock()
        self._engine: Engine | None = None
        self._store: PostgresStore | None = None
        self._max_message_bytes = 0
        self._brokers: dict[str, Broker] = {}

    @property
    def handlers(self) -> Mapping[str, Handler[..., Any]]:
        return dict(self._handlers)

    @asks_for_key
    def idempotent_handler(self, source: str, *sources: str, key: KeySpec, **options: Unpack[Options]) -> Decorate:
        """`idemconsumer.idempotent_handler`, and `include` what it makes."""
        decorate = idempotent_handler(source, *sources, key=key, **options)

        def included(fn: Any, /) -> Any:
            handler = decorate(fn)
            self.include(handler)
            return handler

        return included

    def include(self, *handlers: Handler[..., Any]) -> None:
        """Add decorated functions. ConfigurationError for a second handler of a name, or on a source."""
        for handler in handlers:
            given: object = handler
            if not isinstance(given, Handler):
                raise ConfigurationError(
                    f"app {self.name!r}: include({getattr(given, '__name__', repr(given))}) is given no handler; "
                    'decorate the function with @idempotent_handler("scheme:name", key="…") first'
                )
            if handler.name in self._handlers:
                raise ConfigurationError(
                    f"app {self.name!r}: two handlers are named {handler.name!r}, so their keys would be the same; "
                    'give one of them another name, name="…"'
                )
            for other in self._handlers.values():
                if common := set(handler.plan.sources) & set(other.plan.sources):
                    raise ConfigurationError(
                        f"app {self.name!r}: {handler.name!r} and {other.name!r} both consume {min(common)!r}, and "
                        "each message would reach only one of them; use one handler, or two apps"
                    )
            self._handlers[handler.name] = handler

    def plans(self, settings: Settings) -> list[BoundHandler]:
        """The handlers chosen by `settings.handlers`, or all. ConfigurationError for a name that is not there."""
        names = [n.strip() for n in (settings.handlers or "").split(",") if n.strip()] or list(self._handlers)
        if unknown := [name for name in names if name not in self._handlers]:
            raise ConfigurationError(
                f"app {self.name!r} has no handler {unknown[0]!r}; it has {', '.join(self._handlers) or 'none'}"
            )
        limit = settings.max_message_bytes
        return [self._handlers[name].plan.bind(self.name, max_message_bytes=limit) for name in names]

    def worker(self, settings: Settings, observer: Observer | None = None) -> Worker:
        """A worker for this process; `await worker.run()`."""
        plans = self.plans(settings)
        if not plans:
            raise ConfigurationError(f"app {self.name!r} has no handlers; decorate one with @app.idempotent_handler(…)")
        return Worker(plans, settings, observer)

    async def process(self, message: Message, *, handler: Handler[..., Any] | None = None) -> Outcome:
        """Run one message through the same engine, for those who own their consumer loop.

        The handler is the one on `message.source` unless given. Settle the message yourself, by the outcome, and only
        after this returns; `retrying` and `busy` mean that it is not done. One attempt a call; the first call opens
        the database named by the settings, `close` closes it. Raises StoreUnavailable when nothing could be decided.
        """
        engine = self._engine or await self._open_engine()
        chosen = handler or next((h for h in self._handlers.values() if message.source in h.plan.sources), None)
        if chosen is None:
            raise ConfigurationError(f"app {self.name!r}: no handler on {message.source!r}; give handler=")
        bound = chosen.plan.bind(self.name, max_message_bytes=self._max_message_bytes)
        return await engine.process(Work.of(bound, message))

    async def _open_engine(self) -> Engine:
        async with self._opening:  # the first messages often come together
            if self._engine is None:
                settings = load()
                if settings.dsn is None:
                    raise ConfigurationError("no database is given; set IDEMCONSUMER_DSN")
                longest = max((h.plan.options.timeout for h in self._handlers.values()), default=30.0)
                self._store = await PostgresStore.open(
                    settings.dsn, settings.schema, connections=settings.concurrency, longest_run=longest
                )
                self._max_message_bytes = settings.max_message_bytes
                self._engine = Engine(self._store)
            return self._engine

    async def publish(
        self,
        destination: str,
        payload: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tx: Tx | None = None,
    ) -> None:
        """Publish to `scheme:name`; returns when the broker has confirmed.

        With `tx` (Postgres queue only) the message is enqueued in that transaction: it exists if and only if the
        transaction commits. `key` is the message id (Kafka: the record key). bytes go out as they are, anything else
        as JSON.
        """
        scheme, name = parse_destination(destination)
        encoded = codecs.encode(payload)
        message = Outgoing(b"null" if encoded is None else encoded.body, dict(headers or {}), key)
        settings = load()
        if tx is not None:
            if scheme != "postgres":
                raise ConfigurationError(
                    f"publish to {destination!r} with tx=: only a postgres: queue shares the handler's transaction"
                )
            await enqueue(tx.connection, settings.schema, name, [message])
            return
        if scheme not in self._brokers:
            self._brokers[scheme] = connect(scheme, settings)
        await self._brokers[scheme].publish(name, [message])

    async def close(self) -> None:
        """Close what `process` and `publish` opened."""
        for broker in self._brokers.values():
            await broker.close()
        self._brokers.clear()
        if self._store is not None:
            await self._store.close()
        self._store = self._engine = None
