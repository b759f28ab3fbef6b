"""App: the handlers of one service, under one name that is part of every key."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any, ParamSpec, Self, TypeVar, Unpack

from msgspec.structs import replace

from idemconsumer.app.accepting import Accepting
from idemconsumer.app.builds import build_of
from idemconsumer.app.enqueuing import enqueue_in, store_in
from idemconsumer.app.following import tracing_of
from idemconsumer.app.inline import InlineRunner
from idemconsumer.app.opened import Opened
from idemconsumer.app.pausing import Pausing
from idemconsumer.app.sagas import AppStarter, SagaCalls
from idemconsumer.brokers.connecting import check_delay, connect
from idemconsumer.brokers.connecting import destination as parse_destination
from idemconsumer.brokers.sendable import check_sendable
from idemconsumer.errors import ConfigurationError
from idemconsumer.forks import PerLoop
from idemconsumer.handlers.decorator import Decorate, Handler, asks_for_key, idempotent_handler
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.handlers.handler import BoundHandler, given_key
from idemconsumer.handlers.options import Options, UnnamedOptions
from idemconsumer.handlers.scheduling import check_slots
from idemconsumer.handlers.signalling import signalling
from idemconsumer.handlers.signature import not_injectable
from idemconsumer.hashing import HASHING
from idemconsumer.message import codecs
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message
from idemconsumer.message.sources import consumes
from idemconsumer.ports.broker import Broker, Outgoing
from idemconsumer.ports.handler import Duration, Tx
from idemconsumer.ports.observer import Observer
from idemconsumer.process.child import WORKER
from idemconsumer.rules.schedules import CatchUp, Schedule, checked_schedule
from idemconsumer.rules.signals import wrong_name
from idemconsumer.rules.values import Outcome
from idemconsumer.settings import Settings, load
from idemconsumer.sql.connecting import named
from idemconsumer.user_code.resources import Resource, Resources, read_resource
from idemconsumer.worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class App(SagaCalls, Accepting, Pausing):
    """Collects handlers, and makes the workers that run them.

    The name is part of every stored key and, unless `consumer_group=` says otherwise, the Kafka consumer group. So
    renaming an app makes every message new. `publishes` names destinations for
    `idemconsumer check` to look at; it allows and forbids nothing. ConfigurationError for one that cannot be.
    """

    def __init__(self, name: str, *, publishes: Sequence[str] = ()) -> None:
        given: object = name
        if not isinstance(given, str) or not name.isprintable() or name != name.strip() or name[:1] in ("", "~"):
            raise ConfigurationError(f"app name {name!r}: write a printable string such as App('shop')")
        if isinstance(publishes, str):
            raise ConfigurationError(
                f"app {name!r}: publishes={publishes!r} is one text; write a list, [{publishes!r}]"
            )
        for each in publishes:
            parse_destination(each)
        self.name = name
        self.fronted = False  # by an Idempotency of this process: it may be for nothing else, and have no handlers
        self._publishes = tuple(publishes)
        self._handlers: dict[str, Handler[..., Any]] = {}
        self._schedules: list[Schedule] = []
        self._resources: dict[type, Resource] = {}
        self._settings: Settings | None = None
        self._opened = PerLoop(Opened, Opened.close)

    @property
    def handlers(self) -> Mapping[str, Handler[..., Any]]:
        """What was included so far, by name; a copy."""
        return dict(self._handlers)

    @property
    def publishes(self) -> tuple[str, ...]:
        """The destinations that were named for `idemconsumer check`."""
        return self._publishes

    @property
    def settings(self) -> Settings:
        """Those of this process: its worker's, or else what the environment says. ConfigurationError for what is
        wrong there."""
        return self._configured()

    @property
    def sagas(self) -> dict[tuple[str, str], str | None]:
        """The versions of its handlers of sagas, by app and handler."""
        plans = [handler.plan for handler in self._handlers.values() if handler.plan.signature.needs_saga]
        return {plan.identity(self.name): plan.options.version for plan in plans}

    @asks_for_key
    def idempotent_handler(self, source: str, *sources: str, key: KeySpec, **options: Unpack[Options]) -> Decorate:
        """`idemconsumer.idempotent_handler`, and `include` what it makes."""
        decorate = idempotent_handler(source, *sources, key=key, **options)

        def included(fn: Any, /) -> Any:
            handler = decorate(fn)
            self.include(handler)
            return handler

        return included

    def signal_handler(
        self,
        source: str,
        *sources: str,
        saga: Handler[..., Any],
        name: str,
        key: KeySpec,
        saga_key: KeySpec | None = None,
        **options: Unpack[UnnamedOptions],
    ) -> Decorate:
        """A handler whose messages are signals named `name` to sagas of this app, each exactly once.

            @app.signal_handler("kafka:payments.settled", saga=book_ride, name="settled", key="ride_id")
            async def settled(payment: Settled) -> Settled:
                return payment

        What the function returns is the payload. Signal, effects through Tx and record are one commit. `key` says what
        identifies the message, as for any handler; `saga_key` the key of its saga, the same unless given. The saga's
        tenant is the message's. Its result is what `signal` would answer: a message for a saga that has ended is
        handled, and nothing comes of it. Raises HandlerError, when the function is decorated, for what cannot be.
        """
        decorate = idempotent_handler(source, *sources, key=key, **options)

        async def send_it(tx: Tx, tenant: str | None, its_key: str, payload: object) -> str:
            return await self.signal(saga, key=its_key, name=name, payload=payload, tenant=tenant, tx=tx)

        def included(fn: Any, /) -> Any:
            self._check_saga(saga, "signal_handler(saga=…)")
            if (wrong := wrong_name(name)) is not None:
                raise ConfigurationError(f"app {self.name!r}: signal_handler: the signal's name is {wrong}")
            handler: Handler[..., Any] = Handler(fn, signalling(decorate(fn).plan, saga.plan, saga_key or key, send_it))
            self.include(handler)
            return handler

        return included

    def include(self, *handlers: Handler[..., Any]) -> None:
        """Add decorated functions. ConfigurationError for a second one with the same name, or the same
        source unless that is a Kafka topic and their `consumer_group` differs."""
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
                if common := self._common(handler, other):
                    instead = "use one handler, or two apps"
                    if common.startswith("kafka:"):
                        instead = 'give one of them a consumer_group="…" of its own, or use one handler'
                    raise ConfigurationError(
                        f"app {self.name!r}: {handler.name!r} and {other.name!r} both consume {common!r}, and "
                        f"each message would reach only one of them; {instead}"
                    )
            self._handlers[handler.name] = handler

    def _common(self, handler: Handler[..., Any], other: Handler[..., Any]) -> str | None:
        """A source that both consume, of which each message would reach one of them."""
        groups = {each.plan.consumer_group(self.name) for each in (handler, other)}
        pairs = product(handler.plan.sources, other.plan.sources)
        common = [min(one, two) for one, two in pairs if consumes(one, two) or consumes(two, one)]
        return min((source for source in common if len(groups) == 1 or not source.startswith("kafka:")), default=None)

    def every(
        self, expression: str, *, name: str | None = None, timezone: str = "UTC", catch_up: CatchUp = "last"
    ) -> Callable[[Handler[P, R]], Handler[P, R]]:
        """Start a saga at each slot of a cron expression; exactly one for each slot, whichever worker comes first.

            @app.every("0 3 * * *", timezone="Europe/Berlin")
            @app.idempotent_handler("postgres:reports", key="slot")
            async def nightly(slot: dict[str, str], saga: Saga) -> None: ...

        The payload is `{"schedule": name, "slot": "2026-11-22T02:00:00Z"}`, the saga's key `name@2026-11-22T02:00Z`;
        the name is the handler's unless given. `catch_up`: of slots that were missed while no worker ran, start "all",
        the "last" one, or none that is more than a minute late ("skip"). The database's clock decides. Another
        expression or time zone under the same name is another schedule, which begins with its next slot. Raises
        ConfigurationError for an expression, a time zone or a handler that cannot be scheduled; a saga that does not
        take that payload is refused when a worker starts.
        """

        def scheduled(handler: Handler[P, R], /) -> Handler[P, R]:
            if not self._has(handler) or not handler.plan.signature.needs_saga:
                raise ConfigurationError(
                    f"app {self.name!r}: @app.every is not above a saga of this app; write it above "
                    "@app.idempotent_handler(…) of a function that takes Saga"
                )
            schedule = checked_schedule(Schedule(name or handler.name, expression, timezone, catch_up, handler.name))
            if any(each.name == schedule.name for each in self._schedules):
                raise ConfigurationError(
                    f"app {self.name!r}: two schedules are named {schedule.name!r}, so their slots would have the same "
                    'keys; give one of them another name with name="…"'
                )
            self._schedules.append(schedule)
            return handler

        return scheduled

    def schedules(self, handlers: Sequence[BoundHandler]) -> list[Schedule]:
        """The schedules that start these handlers."""
        names = {handler.name for handler in handlers}
        return [schedule for schedule in self._schedules if schedule.handler in names]

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
        HASHING.obey(settings.key_secrets)
        settings = self._with_build(_named(settings, self.name, os.environ.get(WORKER, "0")))
        resources = Resources(list(self._resources.values()))
        handlers = self.bound_handlers(settings, resources)
        if not handlers:
            raise ConfigurationError(f"app {self.name!r} has no handlers; use @app.idempotent_handler(…)")
        self._settings = settings
        schedules, tracing = self.schedules(handlers), tracing_of(settings)
        for schedule in schedules:
            check_slots(schedule, handlers, datetime.now(UTC))
        return Worker(
            handlers, settings, observer, resources,
            sagas=self.sagas, schedules=schedules, tracing=tracing, publishes=self._publishes,
        )  # fmt: skip

    async def process(self, message: Message, *, handler: Handler[..., Any] | None = None) -> Outcome:
        """Run one message through the same engine, for those who own their consumer loop.

        The handler is the one on `message.source` unless given; of several it must be given. Settle the message
        yourself, by the outcome, and only after this returns; `retrying` and `busy` mean that it is not done. One
        attempt per call; the first call opens the database named by the settings, and makes the resources; `close`
        closes them. A saga runs in this call, under a lease of this process; one that another process runs is waited
        for as its handler says (`wait`). Not guaranteed: that what this process leaves unfinished is
        resumed; that takes a worker, or another call. Raises StoreUnavailable when nothing could be decided, and
        ConfigurationError, with nothing counted, if the handler itself calls this with its transaction open.
        """
        chosen = self._decorated(handler or self._handler_of(message.source))
        inline, here = await self._running(), self._opened.here()
        if (bound := here.bound.get(chosen)) is None:
            bound = here.bound[chosen] = self._bind(chosen, inline.settings, here.resources)
        return await inline.process(bound, message)

    async def result(
        self, handler: Handler[..., Any], *, key: str, tenant: str | None = None, wait: Duration = 0.0
    ) -> Outcome:
        """The outcome of a key, waiting up to `wait` for its end. Runs nothing.

        `duplicate` carries the stored result (state COMPLETED) or the rejection (FAILED); `dead` was put aside for a
        person; `busy` has begun, and not ended; `absent` has no record: it was never started, or still waits in its
        queue, or is pruned, or the key is another one. One statement at a
        time looks for all waiting callers of a process, which learn of the end at most a second later. Raises
        StoreUnavailable, BadMessage for an invalid key, and ConfigurationError for another app's handler.
        """
        if not self._has(handler):
            raise ConfigurationError(
                f"app {self.name!r}: {handler.name!r} is not a handler of this app; call the app that has it, or "
                "include it"
            )
        seconds, key = parse_duration(wait), given_key(key)
        inline = await self._running()
        return await inline.result(handler.plan.identity(self.name).digest(tenant, key), seconds)

    def _handler_of(self, source: str) -> Handler[..., Any]:
        handlers = self._handlers.values()
        its = [handler for handler in handlers if any(consumes(its, source) for its in handler.plan.sources)]
        if len(its) != 1:
            names = " and ".join(repr(handler.name) for handler in its)
            found = f"{names} consume {source!r}" if its else f"no handler for {source!r}"
            raise ConfigurationError(f"app {self.name!r}: {found}; pass handler=")
        return its[0]

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

    async def _running(self) -> InlineRunner:
        here = self._opened.here()
        if here.inline is not None:
            return here.inline
        async with here.opening:  # the first messages often arrive together
            if here.inline is None:
                plans = [handler.plan for handler in self._handlers.values()]
                here.resources, here.bound = Resources(list(self._resources.values())), {}
                settings = self._with_build(self._configured())
                here.inline = await InlineRunner.open(settings, plans, here.resources, tracing_of(settings))
            return here.inline

    def _configured(self) -> Settings:
        """The settings of this process's worker; without one those of the environment, which is read once."""
        if self._settings is None:
            self._settings = _named(load(), self.name)
        return self._settings

    def _with_build(self, settings: Settings) -> Settings:
        return replace(settings, build=settings.build or build_of(self._handlers.values()))

    def _bind(self, handler: Handler[..., Any], settings: Settings, resources: Resources) -> BoundHandler:
        for parameter, wanted in handler.plan.resource_parameters:
            if wanted not in self._resources:
                known = ", ".join(each.__name__ for each in self._resources) or "no resources so far"
                raise not_injectable(handler.name, parameter, wanted, f"the resources of app {self.name!r}: {known}")
        return handler.plan.bind(
            self.name,
            max_message_bytes=settings.max_message_bytes,
            resources=resources.values,
            starter=AppStarter(self),
            delivery_log=_delivery_log(settings),
        )

    async def publish(
        self,
        destination: str,
        payload: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: Duration = 0.0,
        tx: Tx | None = None,
    ) -> None:
        """Publish to `scheme:name`, or `rabbitmq:exchange/routing.key`; returns when the broker has confirmed.

        With `tx` the message is stored in that transaction: it exists if and only if the transaction commits. From a
        Postgres queue it is taken; to another broker a worker relays it then, at least once and each time with the same
        message id, in order with others of its key. `key` is the message id (Kafka: the record key). bytes go out as
        they are, anything else as JSON. With `delay` it arrives that much later at the earliest; without `tx` only from
        a Postgres queue or, up to 15 minutes, from a standard queue of SQS. ConfigurationError where its broker cannot
        do that.

        With `tracing` on, headers are added that carry the current trace on, unless there are such among `headers`.
        """
        scheme, name = parse_destination(destination)
        seconds = parse_duration(delay)
        if tx is None:
            check_delay(scheme, name, seconds)
        encoded = codecs.encode(payload, "payload", "give")
        settings = self._configured()
        sent = tracing_of(settings).carried(headers or {})
        message = Outgoing(b"null" if encoded is None else encoded.body, sent, key, seconds)
        check_sendable(scheme, name, message, settings.max_message_bytes)
        if tx is not None:
            if scheme == "memory":
                raise ConfigurationError(f"publish to {destination!r} with tx=: what is in memory is in no transaction")
            if scheme == "postgres":
                await enqueue_in(tx, settings.schema, name, message)
            else:
                await store_in(tx, settings.schema, destination, message)
            return
        await self._broker(scheme, settings).publish(name, [message])

    def _broker(self, scheme: str, settings: Settings) -> Broker:
        brokers = self._opened.here().brokers
        if scheme not in brokers:
            brokers[scheme] = connect(scheme, settings)
        return brokers[scheme]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close what calls in this event loop opened, once all of them have returned; so does the end of `async with
        app:`. Sagas that still run are cut off, and resumed by a worker or another call."""
        here = self._opened.forget() or Opened()
        self._settings = None
        await here.close()


def _delivery_log(settings: Settings) -> float:
    """For how many seconds deliveries are logged, 0 for none. Raises ConfigurationError."""
    try:
        return 0.0 if settings.delivery_log is None else parse_duration(settings.delivery_log)
    except ConfigurationError as error:
        raise ConfigurationError(f"settings: `delivery_log`: {error}") from None


def _named(settings: Settings, app: str, worker: str | None = None) -> Settings:
    """With addresses whose connections say what they are of."""
    addresses = {name: getattr(settings, name) for name in ("dsn", "listen_dsn")}
    return replace(settings, **{name: named(dsn, app, worker) for name, dsn in addresses.items() if dsn is not None})
