"""Whether a name is that of a stream, which a consumer of a queue must not read (Q10)."""

from __future__ import annotations

from typing import Final

from aio_pika.abc import AbstractConnection
from aiormq.abc import FieldTable

from idemconsumer.brokers.rabbitmq.link import LOSS, answered, farewell, text_of

# Nothing can be declared so: an expiry of 0 is invalid. Where the queue exists, the broker says what differs, and of a
# stream that is its type.
_NEVER: Final[FieldTable] = {"x-queue-type": "classic", "x-expires": 0}


async def is_stream(connection: AbstractConnection, queue: str) -> bool:
    """False also where that cannot be told, as without the right to configure. AMQP has no question for it."""
    channel = connection.channel(publisher_confirms=False)
    try:
        await answered(channel.initialize())
        wire = await channel.get_underlay_channel()
        await answered(wire.queue_declare(queue, durable=True, arguments=_NEVER))
    except LOSS as error:
        return "'x-queue-type'" in text_of(error) and "'stream'" in text_of(error)
    finally:
        await farewell(channel)
    return False
