"""An app with what a test lends it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from idemconsumer.app.app import App
from idemconsumer.user_code.resources import Resource
from idemconsumer.worker.worker import Surroundings


@contextmanager
def lent(app: App, resources: Mapping[type, object], around: Surroundings) -> Iterator[None]:
    """The app with these surroundings, and `resources` in the places of those of its own that have their types."""
    before = app._settings, app._resources, app._around
    ours = {
        each: Resource(each.__name__, each, _given(resources[each])) for each in app._resources if each in resources
    }
    app._settings, app._resources, app._around = None, app._resources | ours, around
    try:
        yield
    finally:
        app._settings, app._resources, app._around = before


def _given(value: object) -> Callable[[], AsyncIterator[Any]]:
    async def give() -> AsyncIterator[Any]:
        yield value

    return give
