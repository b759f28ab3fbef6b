"""Under what lease a step may begin (L38, L59)."""

from __future__ import annotations

import pytest

from idemconsumer.rules.lease import may_begin

LEASE = 30.0


@pytest.mark.parametrize(
    ("timeout", "left", "renewed", "may"),
    [
        (1.0, 12.0, False, True),
        (1.0, 11.9, True, False),  # a renewal is late
        (15.0, 15.0, False, True),
        (15.0, 14.9, False, False),
        (15.0, 14.9, True, False),  # the renewal was slow, and does not cover it
        (21.0, 20.9, True, False),
        (21.1, 20.9, True, True),  # no lease that can be asked for covers it
        (21.1, 20.9, False, False),
        (3600.0, 21.0, False, True),  # just renewed
        (3600.0, 11.9, True, False),
    ],
)
def test_a_step_begins_under_a_lease_that_covers_it_or_just_after_a_renewal(
    timeout: float, left: float, renewed: bool, may: bool
) -> None:
    assert may_begin(timeout, left=left, lease=LEASE, renewed=renewed) is may
