"""A dead letter as it is sent to the destination in `dead_letter_to` (O19)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from idemconsumer.message.delivered import with_delivered
from idemconsumer.message.headers import decode_headers
from idemconsumer.message.message import Message
from idemconsumer.message.reply_address import MESSAGE_ID
from idemconsumer.ports.broker import Outgoing

_GROUP: Final = "MessageGroupId"


@dataclass(frozen=True, slots=True)
class ForwardedLetter:
    """A stored dead letter. `body` may be only the beginning; `size` and `sha256` are of the whole body. `error` is the
    type of the exception, if one was the cause."""

    id: int
    handler: str
    source: str
    position: str
    reason: str
    error: str | None
    body: bytes
    headers: bytes
    delivered: bytes | None
    size: int
    sha256: bytes

    def outgoing(self, number: str, destination: str, *, whole: bool) -> Outgoing:
        """The message as it arrived, under the message id `number`, with headers that describe the dead letter. Of a
        repeated header, the last value is sent. Without `whole`, neither the body nor the message's own headers are."""
        message = Message(self.source, self.body, decode_headers(self.headers))
        message = with_delivered(message, self.delivered)
        body = message.body if whole else b""
        headers: dict[str, str | bytes] = {
            **(message.headers if whole else {}),
            MESSAGE_ID: number,
            "idemconsumer-dead-letter": str(self.id),
            "idemconsumer-dead-handler": self.handler,
            "idemconsumer-dead-reason": self.reason,
            "idemconsumer-dead-source": self.source,
            "idemconsumer-dead-position": self.position,
        }
        if self.error is not None:
            headers["idemconsumer-dead-error"] = self.error
        if len(body) < self.size:
            headers["idemconsumer-dead-truncated"] = str(self.size)
            headers["idemconsumer-dead-sha256"] = self.sha256.hex()
        if message.message_id is not None:
            headers["idemconsumer-dead-message-id"] = message.message_id
        if message.record_key is not None and not destination.startswith("kafka:"):
            headers["idemconsumer-dead-record-key"] = message.record_key
        if destination.startswith("sqs:") and destination.endswith(".fifo"):
            headers[_GROUP] = message.headers.get(_GROUP, number) if whole else number
        return Outgoing(body, headers, number, record_key=message.record_key)
