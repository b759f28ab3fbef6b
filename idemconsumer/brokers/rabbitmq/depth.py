"""For metrics: how many messages a queue has that nobody has taken."""

from __future__ import annotations

from aio_pika.abc import AbstractConnection

from idemconsumer.brokers.rabbitmq.link import answered, farewell


async def depth(connection: AbstractConnection, queue: str) -> int:
    """Asked on a channel of its own, since a question without an answer costs its channel. One of LOSS."""
    channel = connection.channel(publisher_confirms=False)
    try:
        await answered(channel.initialize())
        wire = await channel.get_underlay_channel()
        return (await answered(wire.queue_declare(queue, passive=True))).message_count or 0
    finally:
        await farewell(channel)
