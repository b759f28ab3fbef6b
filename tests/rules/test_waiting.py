"""When a run ends because only its waits are left of it."""

from __future__ import annotations

import math

import pytest

from idemconsumer.rules.saga import GRACE, stays


@pytest.mark.parametrize(
    ("steps", "branches", "main", "quiet", "expected"),
    [
        (False, False, False, 0.0, 0.0),
        (False, False, True, 0.0, GRACE),
        (False, False, True, 2 * GRACE, 0.0),
        (False, True, False, 10.0, 20.0),
        (False, True, True, 40.0, 0.0),
        (True, False, False, 40.0, math.inf),
        (True, True, True, 40.0, math.inf),
    ],
)
def test_for_how_long_a_run_with_open_waits_goes_on(
    steps: bool, branches: bool, main: bool, quiet: float, expected: float
) -> None:
    assert stays(steps=steps, branches=branches, main=main, quiet=quiet, patience=30.0) == expected
