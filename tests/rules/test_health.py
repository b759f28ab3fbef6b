"""When a launcher says that it is not alive, and when that it is not ready (O12)."""

from __future__ import annotations

import math

import pytest

from idemconsumer.rules.health import Phase, WorkerHealth, against_life, against_readiness


def standing(phase: Phase = Phase.CONSUMING, silent: float = 1.0, **more: object) -> WorkerHealth:
    return WorkerHealth(0, phase, silent, patience=31.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.CONSUMING, Phase.DRAINING])
def test_a_worker_that_says_nothing_for_longer_than_it_may_is_against_life(phase: Phase) -> None:
    assert against_life([standing(phase, 31.0)]) == []
    assert against_life([standing(phase, 40.0)]) == ["worker 0: its event loop has been blocked for 40 s"]


def test_what_the_launcher_or_a_server_will_mend_is_not() -> None:
    begun = WorkerHealth(1, Phase.STARTING, silent=0.0, patience=math.inf)
    assert against_life([]) == []
    assert against_life([begun, standing(lacking=["the database"]), standing(Phase.LEAVING, 90.0)]) == []


def test_a_poll_that_does_not_come_back_is_and_so_is_a_launcher_that_gives_up() -> None:
    assert against_life([standing(stalled={"orders": 61.2})]) == ["worker 0: no poll of orders for 61 s"]
    assert against_life([], "worker 0 died 11 times") == ["worker 0 died 11 times"]


def test_ready_is_who_consumes_with_all_workers_and_does_not_stop() -> None:
    assert against_readiness([standing()], 1, stopping=False) == []
    assert against_readiness([standing()], 1, stopping=True) == ["the launcher is stopping"]
    assert against_readiness([standing()], 2, stopping=False) == ["worker 1 has not started"]
    assert against_readiness([standing(Phase.STARTING)], 1, stopping=False) == ["worker 0 is starting"]
    waits = [standing(lacking=["orders", "the database"])]
    assert against_readiness(waits, 1, stopping=False) == [
        "worker 0 waits for orders", "worker 0 waits for the database",
    ]  # fmt: skip
