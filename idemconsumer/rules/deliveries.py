"""What the delivery log says of an outcome (O22)."""

from __future__ import annotations

from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.rules.verdicts import Settlement, settle


def became(outcome: Outcome) -> str | None:
    """In a few words, which quote neither message nor error. None: it is judged again soon, by no decision of its own,
    or was not ours."""
    told, reason = str(outcome.kind), outcome.reason
    match outcome.kind:
        case OutcomeKind.APPLIED:
            return told
        case OutcomeKind.DUPLICATE:
            of = outcome.state
            return told if of in (None, State.COMPLETED) else f"{told} of {of.name.lower()}"
        case OutcomeKind.CONFLICT | OutcomeKind.DEAD | OutcomeKind.FAILED:
            return told if reason in (None, told) else f"{told}: {reason}"
        case OutcomeKind.RETRYING if reason in ("retry", "failing") or settle(outcome) is Settlement.FINISH:
            return told if outcome.error is None else f"{told}: {outcome.error}"
        case OutcomeKind.BUSY if settle(outcome) is Settlement.FINISH:
            return "duplicate of one that runs"
        case _:
            return None
