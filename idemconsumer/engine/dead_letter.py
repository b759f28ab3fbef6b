"""Builds dead letters, and decides which arrivals of a message share one (R24)."""

from __future__ import annotations

import hashlib

from idemconsumer.engine.work import Work
from idemconsumer.message.delivered import beginning, content_of, encode_delivered, whole_body
from idemconsumer.rules.redriven import LEFT_OUT
from idemconsumer.stores.columns import NewDeadLetter


def dead_letter(work: Work, reason: str, error: str, attempts: int, traceback: str | None = None) -> NewDeadLetter:
    """The dead letter with all that the broker gave; of a message above the size limit only the beginning. `traceback`:
    of the exception."""
    message, handler = work.message, work.handler
    stored = work.leased or work.known_claim
    scope = handler.identity.scope() if stored is None else stored.scope
    kept, whole = beginning(message, handler.max_message_bytes), whole_body(message)
    left_out = len(message.all_headers) - len(kept.all_headers)
    if left_out:
        error += f"; {left_out} of its {len(message.all_headers)} headers {LEFT_OUT}"
    identity, content = _identity(work, reason)
    return NewDeadLetter(
        identity=identity,
        handler=handler.name,
        scope=scope,
        source=message.source,
        position=message.position,
        reason=reason,
        error=error,
        body=kept.body,
        headers=kept.headers,
        attempts=attempts,
        delivered=encode_delivered(kept),
        body_size=whole.size,
        body_sha256=whole.sha256,
        content=content,
        again=None if work.first else content,
        letter=work.letter,
        traceback=traceback,
        forward=handler.options.dead_letter_to,
        app=handler.app,
    )


def _identity(work: Work, reason: str) -> tuple[bytes, bytes | None]:
    """The identity, and the content of a message that has no id of its own.

    All arrivals of a key share one dead letter, unless they are conflicts. Otherwise each message has its own,
    identified by what was sent, and by its position.
    """
    scope = work.key or work.handler.identity.scope().encode()
    subject = _hash(work.message.source.encode(), reason.encode(), scope)
    if work.key and reason != "conflict":
        return subject, None
    content = _hash(subject, content_of(work.message))
    if work.own_id is not None:
        return _hash(content, work.own_id.encode("utf-8", "surrogatepass")), None
    return _hash(content, work.nonce), content


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
