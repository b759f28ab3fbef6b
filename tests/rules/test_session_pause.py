"""How long a source waits for its next session (D6)."""

from __future__ import annotations

import pytest

from idemconsumer.rules.session_pause import session_pause


@pytest.mark.parametrize(
    ("failures", "counted", "seconds"),
    [
        # It got something done, or is the first one that did not.
        (0, False, 0.2),
        (0, True, 0.2),
        (1, False, 0.2),
        (1, True, 0.2),
        # More and more in a row. What works again is found within two seconds, whatever it was that was away.
        (2, False, 0.4),
        (4, False, 1.6),
        (5, False, 2.0),
        (1_000, False, 2.0),
        # Each of these costs all messages of the session a delivery, of which their queue allows them only so many.
        (5, True, 3.2),
        (9, True, 51.2),
        (10, True, 60.0),
        (1_000, True, 60.0),
    ],
)
def test_the_pause_before_the_next_session(failures: int, counted: bool, seconds: float) -> None:
    assert session_pause(failures, counted=counted, jitter=0.0) == pytest.approx(seconds)
    assert session_pause(failures, counted=counted, jitter=1.0) == pytest.approx(0.75 * seconds)
