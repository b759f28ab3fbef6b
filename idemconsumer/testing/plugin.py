"""The pytest plugin (`pytest11`): the fixture `idem`, and the mark `crash_matrix` for tests that use it.

Everything else is imported when a test requests the fixture.

Not imported by tests: annotate with `idemconsumer.testing.Idem`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from idemconsumer.testing.kit.databases import Databases, Setup
    from idemconsumer.testing.kit.idem import Idem

_MARK = (
    "crash_matrix(tables, ignore=(), timeout=10.0): run the first message that the test sends with a crash and a rival "
    "at every point, and compare the tables"
)

_async_fixture: Any = pytest.fixture
with suppress(ImportError):  # without pytest-asyncio no async test runs
    from pytest_asyncio import fixture as _async_fixture


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", _MARK)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse the mark on a test whose messages cannot be seen: it would show nothing."""
    if item.get_closest_marker("crash_matrix") and "idem" not in getattr(item, "fixturenames", ()):
        pytest.fail("the test is marked crash_matrix, but has no fixture `idem`, whose messages are run", pytrace=False)


@pytest.fixture(scope="session")
def idem_setup() -> Setup:
    """Override this fixture to create tables of your own: SQL, or a function that gets the address of a database."""
    return None


@pytest.fixture(scope="session")
def idem_databases() -> Iterator[Databases]:
    """The Postgres server of this test run, and the object that copies its databases."""
    from idemconsumer.testing.kit.databases import Databases

    databases = Databases()
    try:
        yield databases
    finally:
        databases.close()


@_async_fixture  # type: ignore[untyped-decorator, unused-ignore]
async def idem(request: pytest.FixtureRequest, idem_databases: Databases, idem_setup: Setup) -> AsyncIterator[Idem]:
    """`kit = await idem(app, resources={Gateway: fake})`: see `idemconsumer.testing.Kit`."""
    from idemconsumer.testing.kit.idem import Idem

    marked = None
    if mark := request.node.get_closest_marker("crash_matrix"):
        from idemconsumer.testing.matrix import MarkedTest

        marked = MarkedTest(*mark.args, **mark.kwargs)
    made = Idem(idem_databases, idem_setup, marked)
    try:
        yield made
    finally:
        await made.close()
