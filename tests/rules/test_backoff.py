"""Which pauses between attempts a message makes unsettled, and for which it is stored (D7)."""

from __future__ import annotations

import pytest

from idemconsumer import Backoff


@pytest.mark.parametrize(
    ("backoff", "first_stored"),
    [
        (Backoff(), 35),  # 15 minutes in all
        (Backoff(30.0, cap=30.0), 30),
        (Backoff(10.0, cap=31.0), 3),
        (Backoff(31.0, cap=31.0), 1),
        (Backoff(1.0, 2.0, 3_600.0), 6),  # 32 s
        (Backoff(1.0, 3_600.0, 3_600.0), 2),
    ],
    ids=str,
)
def test_a_pause_of_half_a_minute_or_a_quarter_of_an_hour_in_all_is_too_long(
    backoff: Backoff, first_stored: int
) -> None:
    stores = [backoff.stores(attempt) for attempt in range(1, 100)]
    assert stores == [attempt >= first_stored for attempt in range(1, 100)]


def test_by_default_none_is_stored() -> None:
    assert not any(Backoff().stores(attempt) for attempt in range(1, 6))
