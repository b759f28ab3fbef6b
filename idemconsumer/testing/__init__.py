"""The library's tools for its users' tests: a kit with a real Postgres, crashes, replays of sagas, contract suites.

Public: the names in `__all__`; docs/testing.md shows how to use them. Nothing that runs in production imports this.
Each name is imported at its first use: the suites need pytest and pytest-asyncio, which a worker that is to crash does
not need; and pytest loads `plugin` in each run, even if no test requests the kit.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from idemconsumer.admin.histories import SagaHistory
    from idemconsumer.embedded.binaries import EmbeddedUnavailable
    from idemconsumer.embedded.postgres import EmbeddedPostgres
    from idemconsumer.ports.observer import Point, SagaPoint
    from idemconsumer.stores.migrations import migrate
    from idemconsumer.testing.broker_contract import BrokerContract, BrokerHarness
    from idemconsumer.testing.crash import CrashAt
    from idemconsumer.testing.fake_saga import FakeSaga
    from idemconsumer.testing.fakes import FakeTx
    from idemconsumer.testing.kit.hub import Published
    from idemconsumer.testing.kit.idem import Handled, Idem, Kit, NotQuiet
    from idemconsumer.testing.kit.kit_sagas import SagaSeen
    from idemconsumer.testing.kit.left import Left
    from idemconsumer.testing.matrix import crash_matrix
    from idemconsumer.testing.matrix_process import MatrixDelivery
    from idemconsumer.testing.matrix_report import MatrixReport, WrongRun
    from idemconsumer.testing.replays import Replay, read_histories, replay
    from idemconsumer.testing.request_contract import RequestHarness, RequestProcess, RequestStoreContract

__all__ = [
    "BrokerContract",
    "BrokerHarness",
    "CrashAt",
    "EmbeddedPostgres",
    "EmbeddedUnavailable",
    "FakeSaga",
    "FakeTx",
    "Handled",
    "Idem",
    "Kit",
    "Left",
    "MatrixDelivery",
    "MatrixReport",
    "NotQuiet",
    "Point",
    "Published",
    "Replay",
    "RequestHarness",
    "RequestProcess",
    "RequestStoreContract",
    "SagaHistory",
    "SagaPoint",
    "SagaSeen",
    "WrongRun",
    "crash_matrix",
    "migrate",
    "read_histories",
    "replay",
]

_HOMES: Final = {
    "admin.histories": ["SagaHistory"],
    "embedded.binaries": ["EmbeddedUnavailable"],
    "embedded.postgres": ["EmbeddedPostgres"],
    "ports.observer": ["Point", "SagaPoint"],
    "stores.migrations": ["migrate"],
    "testing.broker_contract": ["BrokerContract", "BrokerHarness"],
    "testing.crash": ["CrashAt"],
    "testing.fake_saga": ["FakeSaga"],
    "testing.fakes": ["FakeTx"],
    "testing.kit.hub": ["Published"],
    "testing.kit.idem": ["Handled", "Idem", "Kit", "NotQuiet"],
    "testing.kit.left": ["Left"],
    "testing.kit.kit_sagas": ["SagaSeen"],
    "testing.matrix": ["crash_matrix"],
    "testing.matrix_process": ["MatrixDelivery"],
    "testing.matrix_report": ["MatrixReport", "WrongRun"],
    "testing.replays": ["Replay", "read_histories", "replay"],
    "testing.request_contract": ["RequestHarness", "RequestProcess", "RequestStoreContract"],
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            module = f"idemconsumer.{home}"
            if home.endswith("_contract") and module not in sys.modules:
                import pytest

                pytest.register_assert_rewrite(module)
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
