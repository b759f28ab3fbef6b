"""App: the handlers of one service, under one name that is part of every key."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any, ParamSpec, Self, TypeVar, Unpack

from idemconsumer.app.accepting import Accepting
from idemconsumer.app.app_state import Opened, named_settings
from idemconsumer.app.enqueuing import enqueue_in, store_in
from idemconsumer.app.following import tracing_of
from idemconsumer.app.pausing import Pausing
from idemconsumer.app.saga_calls import NAMED, SagaCalls
from idemconsumer.brokers.adapters import check_delay
from idemconsumer.brokers.adapters import destination as parse_destination
from idemconsumer.brokers.sendable import check_sendable
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.arguments import Duration, Tx
from idemconsumer.handlers.decorator import Decorate, Handler, asks_for_key, idempotent_handler
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.handlers.handler import BoundHandler, given_key
from idemconsumer.handlers.options import Options, UnnamedOptions
from idemconsumer.handlers.scheduling import check_slots
from idemconsumer.handlers.signalling import signalling
from idemconsumer.hashing import HASHING
from idemconsumer.message import codecs
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message
from idemconsumer.message.sources import consumes
from idemconsumer.ports.broker import Outgoing
from idemconsumer.ports.observer import Observer
from idemconsumer.process.child import WORKER
from idemconsumer.rules.saga import wrong_name
from idemconsumer.rules.schedules import CatchUp, Schedule, checked_schedule
from idemconsumer.rules.values import Outcome
from idemconsumer.settings import Settings
from idemconsumer.user_code.resources import Resources, read_resource
from idemconsumer.worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class App(SagaCalls, Accepting, Pausing):
    """Collects handlers, and makes the workers that run them.

    The name is part of every stored key, so renaming an app makes every message new. It is also the Kafka consumer
    group, unless `consumer_group=` gives another. `publishes` names destinations for `idemconsumer check` to verify; it
    allows and forbids nothing. Raises ConfigurationError for an invalid name or destination.
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
        super().__init__(name)
        self.fronted = False  # set by an Idempotency of this process; an app may serve only that, and have no handlers
        self._publishes = tuple(publishes)
        self._schedules: list[Schedule] = []

    @property
    def handlers(self) -> Mapping[str, Handler[..., Any]]:
        """A copy of the handlers included so far, by name."""
        return dict(self._handlers)

    @property
    def publishes(self) -> tuple[str, ...]:
        """The destinations that `idemconsumer check` verifies."""
        return self._publishes

    @property
    def settings(self) -> Settings:
        """The settings of this process: its worker's if it has one, else the environment's. Raises ConfigurationError
        if one of them is wrong."""
        return self._configured()

    @property
    def sagas(self) -> dict[tuple[str, str], str | None]:
        """The versions of this app's sagas, by app and handler."""
        plans = [handler.plan for handler in self._handlers.values() if handler.plan.signature.needs_saga]
        return {plan.identity(self.name): plan.options.version for plan in plans}

    @asks_for_key
    def idempotent_handler(self, source: str, *sources: str, key: KeySpec, **options: Unpack[Options]) -> Decorate:
        """Like `idemconsumer.idempotent_handler`, and the handler is included in this app."""
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
        """Make a handler whose messages are signals named `name` to sagas of this app, each sent exactly once.

            @app.signal_handler("kafka:payments.settled", saga=book_ride, name="settled", key="ride_id")
            async def settled(payment: Settled) -> Settled:
                return payment

        The signal's payload is the function's return value. The signal, the effects through Tx and the message's record
        are one commit. `key` identifies the message, as for any handler. `saga_key` gives the key of the saga; by
        default it is the same as `key`. The saga's tenant is the message's tenant. The handler's stored result is what
        `signal` returned: a message for a saga that has ended counts as handled and has no effect on the saga. Raises
        HandlerError for a wrong definition, when the function is decorated.
        """
        decorate = idempotent_handler(source, *sources, key=key, **options)

        async def send_it(tx: Tx, tenant: str | None, its_key: str, payload: object) -> str:
            return await self.signal(saga, key=its_key, name=name, payload=payload, tenant=tenant, tx=tx)

        def included(fn: Any, /) -> Any:
            self._check_saga(saga, NAMED, "signal_handler(saga=…): ")
            if (wrong := wrong_name(name)) is not None:
                raise ConfigurationError(f"app {self.name!r}: signal_handler: the signal's name is {wrong}")
            handler: Handler[..., Any] = Handler(fn, signalling(decorate(fn).plan, saga.plan, saga_key or key, send_it))
            self.include(handler)
            return handler

        return included

    def include(self, *handlers: Handler[..., Any]) -> None:
        """Add decorated functions. Raises ConfigurationError for a second handler with the same name or the same
        source. Two handlers may share a Kafka topic if their `consumer_group` differs."""
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
        """A source that both handlers consume, where each message would reach only one of them."""
        groups = {each.plan.consumer_group(self.name) for each in (handler, other)}
        pairs = product(handler.plan.sources, other.plan.sources)
        common = [min(one, two) for one, two in pairs if consumes(one, two) or consumes(two, one)]
        return min((source for source in common if len(groups) == 1 or not source.startswith("kafka:")), default=None)

    def every(
        self, expression: str, *, name: str | None = None, timezone: str = "UTC", catch_up: CatchUp = "last"
    ) -> Callable[[Handler[P, R]], Handler[P, R]]:
        """Start a saga at each slot of a cron expression: exactly one saga per slot, however many workers run.

            @app.every("0 3 * * *", timezone="Europe/Berlin")
            @app.idempotent_handler("postgres:reports", key="slot")
            async def nightly(slot: dict[str, str], saga: Saga) -> None: ...

        The payload is `{"schedule": name, "slot": "2026-11-22T02:00:00Z"}`, and the saga's key is
        `name@2026-11-22T02:00Z`. The name is the handler's unless given. `catch_up` decides about slots that were
        missed while no worker ran: "all" starts each of them, "last" starts the last one, and "skip" starts none that
        is more than a minute late. Times are those of the database's clock. Another expression or time zone under the
        same name is another schedule, which begins with its next slot. Raises ConfigurationError for an expression, a
        time zone or a handler that cannot be scheduled. A worker refuses to start if the saga cannot take that payload.
        """

        def scheduled(handler: Handler[P, R], /) -> Handler[P, R]:
            if not self._has(handler) or not handler.plan.signature.needs_saga:
                raise ConfigurationError(
                    f"app {self.name!r}: @app.every does not decorate a saga of this app; write it above "
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
        """Return the schedules that start these handlers."""
        names = {handler.name for handler in handlers}
        return [schedule for schedule in self._schedules if schedule.handler in names]

    def resource(self, fn: Callable[[], AsyncIterator[T]], /) -> Callable[[], AsyncIterator[T]]:
        """Decorate an async generator function that makes one object per process, such as an HTTP client.

            @app.resource
            async def gateway() -> AsyncIterator[Gateway]:
                async with Gateway(…) as client:
                    yield client

        Handlers and the functions of steps get the object by its type, exactly as written in the annotation. A worker
        process makes all resources before its first message, in the order of their definition. It closes them in
        reverse order when it has drained. `process` makes them at its first call. A resource that cannot be made stops
        the start with a ConfigurationError. Not guaranteed: that resources are closed when the process is killed.
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
        """Return the handlers chosen by `settings.handlers`, or all. Raises ConfigurationError for an unknown name, and
        for a parameter that no resource of the app can fill."""
        names = [n.strip() for n in (settings.handlers or "").split(",") if n.strip()] or list(self._handlers)
        if unknown := [name for name in names if name not in self._handlers]:
            raise ConfigurationError(
                f"app {self.name!r} has no handler {unknown[0]!r}; it has {', '.join(self._handlers) or 'none'}"
            )
        return [self._bind(self._handlers[name], settings, resources or Resources(())) for name in names]

    def worker(self, settings: Settings, observer: Observer | None = None) -> Worker:
        """Return a worker for this process; run it with `await worker.run()`. Its settings also apply to `publish` and
        `start`."""
        HASHING.obey(settings.key_secrets)
        settings = self._with_build(named_settings(settings, self.name, os.environ.get(WORKER, "0")))
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
            sagas=self.sagas, schedules=schedules, tracing=tracing, publishes=self._publishes, around=self._around,
        )  # fmt: skip

    async def process(self, message: Message, *, handler: Handler[..., Any] | None = None) -> Outcome:
        """Run one message through the same engine, inside a consumer loop of your own.

        The handler is the one that consumes `message.source` unless given; if several handlers consume that source, it
        must be given. Settle the message yourself, by the outcome, and only after this returns; `retrying` and `busy`
        mean that the message is not done. One call is one attempt. The first call opens the database that the settings
        name, and makes the resources; `close` closes them. A saga runs within this call, under a lease of this process.
        If another process runs the saga, this call waits as long as the handler's `wait` says.

        Not guaranteed: that work which this process leaves unfinished is resumed; that needs a worker, or another call.
        Raises StoreUnavailable if nothing could be decided. Raises ConfigurationError, with no attempt counted, if the
        handler itself calls this while its transaction is open.
        """
        chosen = self._decorated(handler or self._handler_of(message.source))
        inline = await self._running()
        if (bound := inline.bound.get(chosen)) is None:
            bound = inline.bound[chosen] = self._bind(chosen, inline.settings, inline.resources)
        return await inline.process(bound, message)

    async def result(
        self, handler: Handler[..., Any], *, key: str, tenant: str | None = None, wait: Duration = 0.0
    ) -> Outcome:
        """Return the outcome of a key, waiting up to `wait` for its end. Runs nothing.

        `duplicate` carries the stored result (state COMPLETED) or the rejection (FAILED). `dead` is a dead letter.
        `busy` has begun and not ended. `absent` has no record: the message was never sent, still waits in its queue, or
        is pruned, or its key is another one. One statement at a time polls for all waiting callers of a process, so a
        caller learns of the end at most about a second late. Raises StoreUnavailable, BadMessage for an invalid key,
        and ConfigurationError for another app's handler.
        """
        self._check_own(handler)
        seconds, key = parse_duration(wait), given_key(key)
        inline = await self._running("front-door")
        return await inline.result(handler.plan.identity(self.name).digest(tenant, key), seconds)

    def _handler_of(self, source: str) -> Handler[..., Any]:
        handlers = self._handlers.values()
        its = [handler for handler in handlers if any(consumes(its, source) for its in handler.plan.sources)]
        if len(its) != 1:
            names = " and ".join(repr(handler.name) for handler in its)
            found = f"{names} consume {source!r}" if its else f"no handler for {source!r}"
            raise ConfigurationError(f"app {self.name!r}: {found}; pass handler=")
        return its[0]

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

        With `tx` the message is stored in that transaction: it exists if and only if the transaction commits. In a
        Postgres queue, workers take the message from there. For any other broker, a worker relays it afterwards: at
        least once, each time with the same message id, and in order with other messages of its key. `key` is the
        message id (Kafka: the record key). Bytes are sent unchanged, anything else as JSON. With `delay` the message
        arrives that much later at the earliest. Without `tx`, only a Postgres queue or a standard queue of SQS (up to
        15 minutes) can delay. Raises ConfigurationError if the broker cannot do this.

        With `tracing` on, headers that carry the current trace are added, unless `headers` contains such headers
        already.
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
                raise ConfigurationError(f"publish to {destination!r} with tx=: memory: has no transactions")
            if scheme == "postgres":
                await enqueue_in(tx, settings.schema, name, message)
            else:
                await store_in(tx, settings.schema, destination, message)
            return
        await self._broker(scheme, settings).publish(name, [message])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close everything that calls in this event loop opened; the end of `async with app:` does the same.

        Call it after those calls have returned. A call that is still opening something raises StoreUnavailable
        (BrokerUnavailable from `publish`), with nothing counted (O36). A call that is running may lose its connection
        and its resources. Sagas that still run are cut off; a worker or another call resumes them. The next call opens
        everything anew.
        """
        here = self._opened.forget() or Opened()
        self._settings = None
        await here.close()
