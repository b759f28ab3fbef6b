"""What an SQS queue's own settings would do to messages."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

from idemconsumer.brokers.sqs.client import LEAST_VISIBILITY, Queue
from idemconsumer.ports.broker import Finding

LONGEST: Final = 1_209_600.0  # seconds that any queue keeps a message at most
LONG_VISIBILITY: Final = 900  # seconds that messages of a dead worker wait for another


def limits(subject: str, queue: Queue) -> list[Finding]:
    """Findings on one queue, from its attributes."""
    found = [_visibility(subject, queue)]
    if queue.content_based:
        text = "SQS drops a message if an equal body arrived in the last five minutes, unless the producer sets an id"
        found.append(Finding("warning", subject, text))
    return found


def max_receives(queue: Queue) -> int | None:
    """After how many receives SQS moves a message to its dead-letter queue; None: never."""
    try:
        return int(_redrive(queue)["maxReceiveCount"])
    except (ValueError, KeyError, TypeError):
        return None


def dead_letters(queue: Queue) -> str | None:
    """The ARN of the queue that it moves them to, if there is one."""
    arn = _redrive(queue).get("deadLetterTargetArn")
    return arn if isinstance(arn, str) else None


def _redrive(queue: Queue) -> dict[str, Any]:
    with suppress(ValueError):
        policy = json.loads(queue.attributes.get("RedrivePolicy") or "{}")
        return policy if isinstance(policy, dict) else {}
    return {}


def retention(queue: Queue) -> float | None:
    """Seconds that SQS keeps a message; None: it does not say."""
    kept = queue.attributes.get("MessageRetentionPeriod", "")
    return float(kept) if kept.isdecimal() else None


def _visibility(subject: str, queue: Queue) -> Finding:
    seconds = queue.number("VisibilityTimeout")
    said = f"visibility timeout {seconds} s"
    if seconds < LEAST_VISIBILITY:
        return Finding("ok", subject, f"{said}; workers request {LEAST_VISIBILITY} s and extend that")
    if seconds > LONG_VISIBILITY:
        return Finding(
            "warning",
            subject,
            f"{said}: the messages of a killed worker, and their FIFO groups, wait that long; workers extend it "
            "while they work, so 30 s is enough",
        )
    return Finding("ok", subject, f"{said}, extended while a message is processed")
