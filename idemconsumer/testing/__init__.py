"""What the project's users test with: a throwaway Postgres, crashes, replays of sagas, contract suites for adapters.

Public: the names in `__all__`; docs/testing.md shows them at work. Not imported by anything that runs in production.
The suites need pytest and pytest-asyncio; they are imported when one is used, so a worker that is to crash needs
neither.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from idemconsumer.admin.histories import SagaHistory
from idemconsumer.embedded.binaries import EmbeddedUnavailable
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.stores.migrations import migrate
from idemconsumer.testing.crash import CrashAt
from idemconsumer.testing.replays import Replay, read_histories, replay

if TYPE_CHECKING:
    from idemconsumer.testing.broker_contract import BrokerContract, BrokerHarness
    from idemconsumer.testing.lease_contract import LeaseStoreContract
    from idemconsumer.testing.lease_harness import LeaseHarness, LeaseWorker
    from idemconsumer.testing.request_contract import RequestHarness, RequestProcess, RequestStoreContract
    from idemconsumer.testing.store_contract import JoinedStoreContract, StoreHarness

__all__ = [
    "BrokerContract",
    "BrokerHarness",
    "CrashAt",
    "EmbeddedPostgres",
    "EmbeddedUnavailable",
    "JoinedStoreContract",
    "LeaseHarness",
    "LeaseStoreContract",
    "LeaseWorker",
    "Point",
    "Replay",
    "RequestHarness",
    "RequestProcess",
    "RequestStoreContract",
    "SagaHistory",
    "SagaPoint",
    "StoreHarness",
    "migrate",
    "read_histories",
    "replay",
]

_SUITES: Final = {
    "BrokerContract": "broker_contract",
    "BrokerHarness": "broker_contract",
    "JoinedStoreContract": "store_contract",
    "LeaseHarness": "lease_harness",
    "LeaseStoreContract": "lease_contract",
    "LeaseWorker": "lease_harness",
    "RequestHarness": "request_contract",
    "RequestProcess": "request_contract",
    "RequestStoreContract": "request_contract",
    "StoreHarness": "store_contract",
}
_ASSERTING: Final = (*_SUITES.values(), "fence_contract", "step_contract")


def __getattr__(name: str) -> object:
    if (module := _SUITES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    suites = {f"{__name__}.{each}" for each in _ASSERTING}
    pytest.register_assert_rewrite(*suites.difference(sys.modules))
    return getattr(import_module(f"{__name__}.{module}"), name)
