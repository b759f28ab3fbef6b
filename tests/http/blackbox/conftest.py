"""Servers for the tests: one for each store and interface, started when the first test asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest

from idemconsumer.testing import migrate
from tests.http.blackbox.client import Service
from tests.http.blackbox.places import OWN, Place, Running, places
from tests.http.blackbox.served.behaviour import SCHEMA
from tests.http.blackbox.served.config import Config, Interface, Store
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database
from tests.support.servers.redis import RedisServer


@pytest.fixture(scope="session")
def folder_of_servers() -> Iterator[Path]:
    with TemporaryDirectory(prefix="blackbox.") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def configs(
    postgres18: PostgresServer, redis_server: RedisServer, folder_of_servers: Path
) -> Iterator[Callable[[Store], Config]]:
    """All of one database: no two tests have a key in common."""
    with fresh_database(postgres18.dsn) as dsn:
        migrate(dsn, "idemconsumer")
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute(SCHEMA)

        def config(store: Store) -> Config:
            redis = None if store == "postgres" else redis_server.address
            return Config(store, dsn, dsn, redis, folder_of_servers)

        yield config


@pytest.fixture(scope="session")
def servers(configs: Callable[[Store], Config]) -> Iterator[Callable[[Store, Interface], Running]]:
    """Shared: nobody kills these."""
    made: dict[tuple[Store, Interface], Running] = {}

    def server(store: Store, interface: Interface) -> Running:
        if (store, interface) not in made:
            running = made[store, interface] = Running(interface, configs(store))
            running.start()
        return made[store, interface]

    yield server
    for running in made.values():
        running.kill()


# Each store, each mode under each interface; and besides, each mode of each store.
_THREE = {"postgres-joined-asgi", "redis-leased-wsgi", "hybrid-leased-asgi"}
_FIVE = _THREE | {"postgres-leased-asgi", "hybrid-joined-wsgi"}
_OF_THREE = {"test_blackbox_answers.py", "test_blackbox_keys.py", "test_blackbox_openapi.py"}  # of no store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What does not depend on the store is tried in three places, all else in five; `make test-long` has the others."""
    for item in items:
        call = getattr(item, "callspec", None)
        if item.path.parent == Path(__file__).parent and call is not None and not OWN and "place" in call.params:
            chosen = _THREE if item.path.name in _OF_THREE else _FIVE
            if str(call.params["place"]) not in chosen:
                item.add_marker(pytest.mark.long)


def _everywhere() -> list[Place]:
    if OWN:
        return [Place("postgres", os.environ.get("IDEMCONSUMER_BLACKBOX_MODE", "leased"), "asgi")]
    return places("postgres", "redis", "hybrid")


@pytest.fixture(params=_everywhere(), ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    """Each store, mode and interface, on the shared servers."""
    return _on_shared(request)


@pytest.fixture(params=[Place("postgres", mode, "django") for mode in ("leased", "joined")], ids=str)
def django_place(request: pytest.FixtureRequest) -> Place:
    return _on_shared(request)


def _on_shared(request: pytest.FixtureRequest) -> Place:
    place: Place = request.param
    if OWN:
        return place
    servers: Callable[[Store, Interface], Running] = request.getfixturevalue("servers")
    return replace(place, running=servers(place.store, place.interface))


@pytest.fixture
def service(place: Place) -> Service:
    return place.service()


@pytest.fixture
def start(configs: Callable[[Store], Config]) -> Iterator[Callable[..., Running]]:
    """Starts a server of the test's own: `start(place)`, or with a config that is changed: `start(place, dsn=…)`."""
    made: list[Running] = []

    def started(place: Place, **changes: object) -> Running:
        running = Running(place.interface, replace(configs(place.store), **changes))  # type: ignore[arg-type]
        made.append(running)
        running.start()
        return running

    yield started
    for running in made:
        running.kill()
