"""What the delivery log says of an outcome (O22)."""

from __future__ import annotations

import pytest

from idemconsumer.rules.deliveries import became
from idemconsumer.rules.values import Outcome, OutcomeKind, State


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Outcome(OutcomeKind.APPLIED, state=State.COMPLETED), "applied"),
        (Outcome(OutcomeKind.DUPLICATE, state=State.COMPLETED), "duplicate"),
        (Outcome(OutcomeKind.DUPLICATE, state=State.FAILED), "duplicate of failed"),
        (Outcome(OutcomeKind.CONFLICT, reason="conflict", error="the same key…"), "conflict"),
        (Outcome(OutcomeKind.FAILED, state=State.FAILED, reason="no_funds"), "failed: no_funds"),
        (Outcome(OutcomeKind.DEAD, state=State.DEAD, reason="contended", error="Ann"), "dead: contended"),
        (Outcome(OutcomeKind.RETRYING, reason="retry", error="ValueError"), "retrying: ValueError"),
        (Outcome(OutcomeKind.RETRYING, reason="failing", error="ValueError"), "retrying: ValueError"),
        (Outcome(OutcomeKind.RETRYING, state=State.PENDING, reason="scheduled", error="Retry"), "retrying: Retry"),
        (Outcome(OutcomeKind.BUSY, state=State.PROCESSING), "duplicate of one that runs"),
        (Outcome(OutcomeKind.BUSY), None),
        (Outcome(OutcomeKind.RETRYING, reason="contention"), None),
        (Outcome(OutcomeKind.RETRYING, reason="reply"), None),
        (Outcome(OutcomeKind.CANCELLED), None),
        (Outcome(OutcomeKind.FENCED), None),
    ],
)  # fmt: skip
def test_what_is_told_of(outcome: Outcome, told: str | None) -> None:
    assert became(outcome) == told
