"""How the delivery log names an outcome (O22)."""

from __future__ import annotations

from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.rules.verdicts import Settlement, settle


def became(outcome: Outcome) -> str | None:
    """The outcome in a few words that quote neither the message nor the error. None: nothing was decided and the
    delivery is judged again soon, or it was not ours."""
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
