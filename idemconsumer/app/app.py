"""App: the handlers of one service, under one name that is part of every key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Concatenate, TypeVar, Unpack

from psycopg import AsyncConnection

from idemconsumer.app.inline import InlineRunner
from idemconsumer.brokers.connecting import connect
from idemconsumer.brokers.connecting import destination as parse_destination
from idemconsumer.brokers.postgres import enqueue
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.decorator import Decorate, Handler, asks_for_key, idempotent_handler
from idemconsumer.handlers.durations import Duration, parse_duration
from idemconsumer.handlers.handler import TENANT, BoundHandler, given_key
from idemconsumer.handlers.options import Options
from idemconsumer.handlers.signature import not_injectable
from idemconsumer.message import codecs
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Broker, Outgoing
from idemconsumer.ports.handler import Tx
from idemconsumer.ports.observer import Observer
from idemconsumer.rules.values import Outcome
from idemconsumer.settings import Settings, load
from idemconsumer.user_code.resources import Resource, Resources, read_resource
from idemconsumer.worker.worker import Worker

T = TypeVar("T")


class App:
    """Collects handlers, and makes the workers that run them.

    The name is part of every stored key and, unless `consumer_group=` says otherwise, the Kafka consumer group. So
    renaming an app makes every message new.
    """

    def __init__(self, name: str) -> None:
        given: object = name
        if not isinstance(given, str) or not name.isprintable() or name != name.strip() or name[:1] in ("", "~"):
            raise ConfigurationError(f"app name {name!r}: write a printable string such as App('shop')")
        self.name = name
        self._handlers: dict[str, Handler[..., Any]] = {}
        self._opening = asyncio.Lock()
        self._resources: dict[type, Resource] = {}
        self._open_resources = Resources(())
        self._inline: InlineRunner | None = None
        self._bound: dict[Handler[..., Any], BoundHandler] = {}
        self._settings: Settings | None = None
        self._brokers: dict[str, Broker] = {}

    @property
    def handlers(self) -> Mapping[str, Handler[..., Any]]:
        """What was included so far, by name; a copy."""
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
        """Add decorated functions. ConfigurationError for a second one with the same name or source."""
        for handler in handlers:
            given: object = handler
            if not isinstance(given, Handler):
                raise ConfigurationError(
                    f"app {self.name!r}: include({getattr(given, '__name__', repr(given))}) is not given a handler; "
                    'decorate the function with @idempotent_handler("scheme:name", key="…") first'
                )
            if handler.name in self._handlers:
                raise ConfigurationError(
                    f"app {self.name!r}: two handlers are named {handler.name!r}, so their keys would be the same; "
                    'give one of them another name with name="…"'
                )
            for other in self._handlers.values():
                if common := set(handler.plan.sources) & set(other.plan.sources):
                    raise ConfigurationError(
                        f"app {self.name!r}: {handler.name!r} and {other.name!r} both consume {min(common)!r}, and "
                        "each message would reach only one of them; use one handler, or two apps"
                    )
            self._handlers[handler.name] = handler

    def resource(self, fn: Callable[[], AsyncIterator[T]], /) -> Callable[[], AsyncIterator[T]]:
        """Decorate an async generator function that makes one object per process, such as an HTTP client.

            @app.resource
            async def gateway() -> AsyncIterator[Gateway]:
                async with Gateway(…) as client:
                    yield client

        Handlers and the functions of steps get it by its type, exactly as written in the annotation. A worker process
        makes all of them before its first message, in the order of their definition, and closes them in reverse when
        it has drained; `process` makes them at its first call. One that cannot be made stops the start with a
        ConfigurationError. Not guaranteed: that they are closed when the process is killed.
        """
        resource = read_resource(fn)
        if (other := self._resources.get(resource.type)) is not None:
            raise ConfigurationError(
                f"app {self.name!r}: resources {other.name!r} and {resource.name!r} both make "
                f"{resource.type.__name__}, so a handler could not choose; give one of them its own class"
            )
        self._resources[resource.type] = resource
        return fn

    def bound_handlers(self, settings: Settings, resources: Resources | None = None) -> list[BoundHandler]:
        """The handlers chosen by `settings.handlers`, or all. ConfigurationError for a name that is not there, and for
        a parameter that no resource of the app can fill."""
        names = [n.strip() for n in (settings.handlers or "").split(",") if n.strip()] or list(self._handlers)
        if unknown := [name for name in names if name not in self._handlers]:
            raise ConfigurationError(
                f"app {self.name!r} has no handler {unknown[0]!r}; it has {', '.join(self._handlers) or 'none'}"
            )
        return [self._bind(self._handlers[name], settings, resources or Resources(())) for name in names]

    def worker(self, settings: Settings, observer: Observer | None = None) -> Worker:
        """A worker for this process; `await worker.run()`. What `publish` and `start` need is in its settings too."""
        resources = Resources(list(self._resources.values()))
        handlers = self.bound_handlers(settings, resources)
        if not handlers:
            raise ConfigurationError(f"app {self.name!r} has no handlers; use @app.idempotent_handler(…)")
        self._settings = settings
        return Worker(handlers, settings, observer, resources)

    async def process(self, message: Message, *, handler: Handler[..., Any] | None = None) -> Outcome:
        """Run one message through the same engine, for those who own their consumer loop.

        The handler is the one on `message.source` unless given. Settle the message yourself, by the outcome, and only
        after this returns; `retrying` and `busy` mean that it is not done. One attempt per call; the first call opens
        the database named by the settings, and makes the resources; `close` closes them. A saga runs in this call,
        under a lease of this process; one that another process runs is waited for as its handler says (`on_busy`,
        `wait`). Not guaranteed: that what this process leaves unfinished is resumed; that takes a worker, or another
        call. Raises StoreUnavailable when nothing could be decided.
        """
        chosen = handler or next((h for h in self._handlers.values() if message.source in h.plan.sources), None)
        if chosen is None:
            raise ConfigurationError(f"app {self.name!r}: no handler for {message.source!r}; pass handler=")
        self._decorated(chosen)
        inline = self._inline or await self._open_inline()
        if (bound := self._bound.get(chosen)) is None:
            bound = self._bound[chosen] = self._bind(chosen, inline.settings, self._open_resources)
        return await inline.process(bound, message)

    async def start(
        self,
        handler: Handler[Concatenate[T, ...], Any],
        payload: T,
        *,
        key: str,
        tenant: str | None = None,
        tx: Tx | AsyncConnection[Any] | None = None,
    ) -> None:
        """Begin a saga from code; a worker of this app runs it.

        With `tx` (of a handler, or a psycopg connection of your own) it begins if and only if that transaction
        commits; without, it is committed on return. A second start under the same key is a duplicate, or a conflict
        when its payload differs. `key` stands in for the handler's key rule, and `tenant` for its tenant rule.
        Raises BadMessage when the handler could not take the payload or the key, TypeError when the payload is not
        JSON, and ConfigurationError when it is not a saga of this app.
        """
        if not self._has(handler) or not handler.plan.signature.needs_saga:
            raise ConfigurationError(
                f"app {self.name!r}: {handler.name!r} is not a saga of this app; start a handler that takes Saga; "
                "for any other, publish to its source"
            )
        settings = self._configured()
        bound = self._bind(handler, settings, Resources(()))
        key, encoded = given_key(key), codecs.encode(payload, "payload", "give")
        headers = {} if tenant is None else {TENANT: tenant}
        outgoing = Outgoing(b"null" if encoded is None else encoded.body, headers, key)
        bound.call_for(Message(bound.own_source, outgoing.body, headers, message_id=key))
        queue = bound.own_source.partition(":")[2]
        if tx is not None:
            await enqueue(_connection(tx), settings.schema, queue, [outgoing])
        else:
            await self._broker("postgres", settings).publish(queue, [outgoing])

    async def result(
        self, handler: Handler[..., Any], *, key: str, tenant: str | None = None, wait: Duration = 0.0
    ) -> Outcome:
        """The outcome of a key, waiting up to `wait` for its end. Runs nothing.

        `duplicate` carries the stored result (state COMPLETED) or the rejection (FAILED); `dead` was put aside for a
        person; `busy` has not ended: its state is None when it has not begun, as far as is known. One statement at a
        time looks for all waiting callers of a process, which learn of the end at most a second later. Raises
        StoreUnavailable, BadMessage for an invalid key, and ConfigurationError for another app's handler.
        """
        if not self._has(handler):
            raise ConfigurationError(
                f"app {self.name!r}: {handler.name!r} is not a handler of this app; call the app that has it, or "
                "include it"
            )
        seconds, key = parse_duration(wait), given_key(key)
        inline = self._inline or await self._open_inline()
        return await inline.result(self.name, handler.name, tenant, key, seconds)

    def _has(self, handler: Handler[..., Any]) -> bool:
        return self._handlers.get(self._decorated(handler).name) is handler

    def _decorated(self, handler: Handler[..., Any]) -> Handler[..., Any]:
        given: object = handler
        if not isinstance(given, Handler):
            raise ConfigurationError(
                f"app {self.name!r}: {getattr(given, '__name__', repr(given))} is not a handler; "
                "decorate the function with @app.idempotent_handler(…)"
            )
        return handler

    async def _open_inline(self) -> InlineRunner:
        async with self._opening:  # the first messages often arrive together
            if self._inline is None:
                plans = [handler.plan for handler in self._handlers.values()]
                self._open_resources, self._bound = Resources(list(self._resources.values())), {}
                self._inline = await InlineRunner.open(self._configured(), plans, self._open_resources)
            return self._inline

    def _configured(self) -> Settings:
        """The settings of this process's worker; without one those of the environment, which is read once."""
        if self._settings is None:
            self._settings = load()
        return self._settings

    def _bind(self, handler: Handler[..., Any], settings: Settings, resources: Resources) -> BoundHandler:
        for parameter, wanted in handler.plan.resource_parameters:
            if wanted not in self._resources:
                known = ", ".join(each.__name__ for each in self._resources) or "no resources so far"
                raise not_injectable(handler.name, parameter, wanted, f"the resources of app {self.name!r}: {known}")
        limit = settings.max_message_bytes
        return handler.plan.bind(self.name, max_message_bytes=limit, resources=resources.values)

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
        encoded = codecs.encode(payload, "payload", "give")
        message = Outgoing(b"null" if encoded is None else encoded.body, dict(headers or {}), key)
        settings = self._configured()
        if tx is not None:
            if scheme != "postgres":
                raise ConfigurationError(
                    f"publish to {destination!r} with tx=: only a postgres: queue can share the handler's transaction"
                )
            await enqueue(_connection(tx), settings.schema, name, [message])
            return
        await self._broker(scheme, settings).publish(name, [message])

    def _broker(self, scheme: str, settings: Settings) -> Broker:
        if scheme not in self._brokers:
            self._brokers[scheme] = connect(scheme, settings)
        return self._brokers[scheme]

    async def close(self) -> None:
        """Close what `process`, `publish`, `start` and `result` opened, once all of their calls have returned."""
        for broker in self._brokers.values():
            await broker.close()
        self._brokers.clear()
        self._settings = None
        inline, self._inline = self._inline, None
        if inline is not None:
            await inline.close()


def _connection(tx: Tx | AsyncConnection[Any]) -> AsyncConnection[Any]:
    connection = tx if isinstance(tx, AsyncConnection) else getattr(tx, "connection", None)
    if not isinstance(connection, AsyncConnection):
        raise ConfigurationError(
            f"tx= is of type {type(tx).__name__}; pass the Tx of a handler or of a step, or a "
            "psycopg.AsyncConnection that is in a transaction"
        )
    return connection
