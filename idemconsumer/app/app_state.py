"""State that all calls of an app share: its handlers and resources, its settings, and what this process has opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.app.builds import build_of
from idemconsumer.app.following import tracing_of
from idemconsumer.app.inline import InlineRunner
from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.forks import PerLoop
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.handlers.handler import BoundHandler, Starter
from idemconsumer.handlers.signature import not_injectable
from idemconsumer.opening import Opening
from idemconsumer.ports.broker import Broker
from idemconsumer.settings import Settings, load
from idemconsumer.sql.connecting import named
from idemconsumer.stores.grants import Kind
from idemconsumer.user_code.resources import Resource, Resources
from idemconsumer.worker.worker import Surroundings


@dataclass(slots=True)
class Opened:
    """Everything that calls in one event loop have opened, each part by the first call that needs it (O26)."""

    opening: Opening = field(default_factory=lambda: Opening(StoreUnavailable))
    inline: InlineRunner | None = None
    brokers: dict[str, Broker] = field(default_factory=dict)
    sagas_admin: SagaAdmin | None = None

    async def close(self) -> None:
        """Close all parts, even if closing one raises, as it does where a part waits for a task that was cancelled with
        its loop."""
        await self.opening.close()
        async with AsyncExitStack() as stack:
            if self.inline is not None:
                stack.push_async_callback(self.inline.close)
            for broker in self.brokers.values():
                stack.push_async_callback(broker.close)


class AppState(ABC):
    """The state of one app; its subclasses add the calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._handlers: dict[str, Handler[..., Any]] = {}
        self._resources: dict[type, Resource] = {}
        self._settings: Settings | None = None
        self._around = Surroundings()
        self._opened = PerLoop(Opened, Opened.close)

    @property
    @abstractmethod
    def _starter(self) -> Starter: ...

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

    def _check_own(self, handler: Handler[..., Any]) -> None:
        if not self._has(handler):
            raise ConfigurationError(
                f"app {self.name!r}: {handler.name!r} is not a handler of this app; call the app that has it, or "
                "include it"
            )

    def _check_saga(self, handler: Handler[..., Any], instead: str, what: str = "") -> None:
        if not self._has(handler) or not handler.plan.signature.needs_saga:
            raise ConfigurationError(f"app {self.name!r}: {what}{handler.name!r} is not a saga of this app; {instead}")

    async def _running(self, kind: Kind = "worker") -> InlineRunner:
        here = self._opened.here()
        if (inline := here.inline) is None:
            async with here.opening.turn():  # the first messages often arrive together
                if (inline := here.inline) is None:
                    plans = [handler.plan for handler in self._handlers.values()]
                    resources = Resources(list(self._resources.values()))
                    settings = self._with_build(self._configured())
                    inline = await InlineRunner.open(
                        settings, plans, resources, tracing_of(settings), kind, self._around.locks
                    )
                    here.inline = inline
        await inline.allow(kind)
        return inline

    def _configured(self) -> Settings:
        """The settings of this process's worker. Without a worker: those of the environment, which is read once."""
        if self._settings is None:
            self._settings = named_settings(self._around.settings or load(), self.name)
        return self._settings

    def _database(self) -> tuple[str, str]:
        """The address of the database, and the schema."""
        settings = self._configured()
        if settings.dsn is None:
            raise ConfigurationError(f"app {self.name!r}: no database is given; set IDEMCONSUMER_DSN")
        return settings.dsn, settings.schema

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
            starter=self._starter,
            delivery_log=_delivery_log(settings),
        )

    def _broker(self, scheme: str, settings: Settings) -> Broker:
        brokers = self._opened.here().brokers
        if scheme not in brokers:
            brokers[scheme] = self._around.connect(scheme, settings)
        return brokers[scheme]


def _delivery_log(settings: Settings) -> float:
    """For how many seconds deliveries are logged; 0 for no log. Raises ConfigurationError."""
    try:
        return 0.0 if settings.delivery_log is None else parse_duration(settings.delivery_log)
    except ConfigurationError as error:
        raise ConfigurationError(f"settings: `delivery_log`: {error}") from None


def named_settings(settings: Settings, app: str, worker: str | None = None) -> Settings:
    """The settings with database addresses whose connections name the app and the worker."""
    addresses = {name: getattr(settings, name) for name in ("dsn", "listen_dsn")}
    return replace(settings, **{name: named(dsn, app, worker) for name, dsn in addresses.items() if dsn is not None})
