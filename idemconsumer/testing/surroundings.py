"""An app with the resources and brokers of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from idemconsumer.app.app import App
from idemconsumer.brokers.adapters import connect
from idemconsumer.ports.broker import Broker
from idemconsumer.settings import Settings
from idemconsumer.user_code.resources import Resource
from idemconsumer.worker.worker import Surroundings

# A worker relays only to brokers that have an address. No connection is made to these addresses.
NOWHERE: Final[Mapping[str, Any]] = {
    "kafka": "127.0.0.1:1",
    "rabbitmq": "amqp://127.0.0.1:1/",
    "sqs": "http://127.0.0.1:1",
}


@contextmanager
def lent(app: App, resources: Mapping[type, object], around: Surroundings) -> Iterator[None]:
    """Give the app `resources` in place of its own of the same types. `around` makes the broker of each scheme except
    Postgres, which is real."""

    def connected(scheme: str, settings: Settings) -> Broker:
        return connect(scheme, settings) if scheme == "postgres" else around.connect(scheme, settings)

    before = app._settings, app._resources, app._around
    ours = {
        each: Resource(each.__name__, each, _given(resources[each])) for each in app._resources if each in resources
    }
    app._settings, app._resources = None, app._resources | ours
    app._around = replace(around, connect=connected)
    try:
        yield
    finally:
        app._settings, app._resources, app._around = before


def _given(value: object) -> Callable[[], AsyncIterator[Any]]:
    async def give() -> AsyncIterator[Any]:
        yield value

    return give
