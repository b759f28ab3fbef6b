"""What a person can do about a dead letter, or about a saga that is parked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_HINTS: Final[Mapping[str, str]] = {
    "undecodable": "Fix the producer, or widen the annotation and `dead redrive`.",
    "tombstone": "A Kafka record without a value says that its key is deleted. To handle it, annotate the payload as "
    "`X | None`, and use a key that is not in the payload.",
    "unreadable": "Kafka's client cannot read it. `body` is the rest of the record, or of its whole batch; it is "
    "complete if only a header's name is not UTF-8. Have the producer send it again.",
    "key_missing": "Fix the producer, or change `key=` and `dead redrive`.",
    "key_invalid": "Fix the producer, or change `key=` and `dead redrive`.",
    "oversized": "Only the beginning of its body and headers is kept. Send a reference instead, or raise "
    "IDEMCONSUMER_MAX_MESSAGE_BYTES.",
    "conflict": "The first payload counts. If different payloads under one key are intended, set `fingerprint=`.",
    "attempts_exhausted": "Fix what `error` names, then `dead redrive`.",
    "killed_worker": "Workers died while decoding or running it (memory, a crash in C code). Fix the cause, then "
    "`dead redrive`. Resetting Kafka's offsets does not run it again, because this copy is recorded as one that kills "
    "workers.",
    "lost_connection": "Each run ended its own connection: the handler closes it or ends its session, a timeout of "
    "the server ends it, or a statement crashes its server process (see the server's log). Fix the cause, then "
    "`dead redrive`.",
    "contended": "Other transactions held the rows or locks it needs, the whole time. Find them (pg_locks, "
    "pg_stat_activity), then `dead redrive`.",
    "saga_changed": "`sagas show` lists the recorded steps; restore them and `sagas resume`, or continue with "
    "the present handler with --accept-version.",
    "unknown_effect": "Look up the step's key (`sagas show`) at the remote system, then `sagas decide`, `sagas resume` "
    "or `sagas abandon`.",
    "result_unencodable": "All steps are done. Correct the handler's result, then `sagas resume`: no finished step "
    "runs again.",
    "undo_failed": "A finished step could not be undone. Fix what `error` names, then `sagas resume`.",
    "max_duration": "Raise `max_duration` and `sagas resume`, or `sagas abandon`.",
}
_OTHER_HINT: Final = "See `error`."


def hint(reason: str) -> str:
    """What a person can do about a dead letter, or a parked saga, with this reason."""
    return _HINTS.get(reason, _OTHER_HINT)
