"""The reply to a request, as a pure function of the outcome."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from idemconsumer.message.reply_address import Address
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.values import Outcome, OutcomeKind, State

COMPLETED: Final = "completed"
REJECTED: Final = "rejected"
LONGEST_PAUSE: Final = 30.0  # seconds between two tries of a reply


@dataclass(frozen=True, slots=True)
class ReplyAnswer:
    """`outcome` is `completed`, with the handler's result as body (`null` where it returned None), or `rejected`, with
    the rejection (`{"code":…,"body":…}`)."""

    outcome: str
    body: bytes
    content_type: str


def answer_of(outcome: Outcome) -> ReplyAnswer | None:
    """The reply for an outcome: the same for the first delivery and for each duplicate, since it is built from what is
    stored (D21). None: nothing is decided, or it is a dead letter, which waits for a person (D22)."""
    if outcome.kind not in (OutcomeKind.APPLIED, OutcomeKind.DUPLICATE, OutcomeKind.FAILED):
        return None
    if outcome.state not in (State.COMPLETED, State.FAILED):
        return None
    body = b"null" if outcome.result is None else outcome.result
    return ReplyAnswer(
        COMPLETED if outcome.state is State.COMPLETED else REJECTED, body, outcome.content_type or "application/json"
    )


def reply_id(key: bytes, address: Address, answer: ReplyAnswer) -> str:
    """The message id of a reply: the same each time this request is answered, and different for any other one (D21)."""
    correlation = address.correlation or b""
    correlation = correlation.encode("utf-8", "surrogatepass") if isinstance(correlation, str) else correlation
    to = f"{address.scheme}:{address.to}:{address.partition}".encode("utf-8", "surrogatepass")
    parts = (key, to, correlation, answer.outcome.encode(), answer.body)
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
    return digest.hexdigest()[:32]


def pause_after(failures: int, chance: float) -> float:
    """Seconds until a reply is tried again, after `failures` failed tries. `chance` in [0, 1)."""
    return backoff(failures, first=0.5, cap=LONGEST_PAUSE, jitter=chance)
