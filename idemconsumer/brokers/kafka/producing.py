"""A producer that is started when it is needed, and replaced after a batch of its was refused.

Batches of an idempotent producer are numbered for each partition. One that is refused leaves a gap, and behind that
Kafka takes nothing more of this producer there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from idemconsumer.errors import BrokerUnavailable
from idemconsumer.opening import Opening

STOP_TIMEOUT: Final = 10.0


class Producing:
    """acks=all and idempotent; `options` are more of the client's."""

    def __init__(self, connection: dict[str, Any], most_bytes: int, **options: Any) -> None:
        self._options = {**connection, **options, "max_request_size": most_bytes}
        self._producer: AIOKafkaProducer | None = None
        self._starting = Opening(BrokerUnavailable)
        self._leaving = set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def using(self) -> AsyncIterator[AIOKafkaProducer]:
        """Replaced if the block raises what the servers have answered."""
        producer = await self.get()
        try:
            yield producer
        except KafkaError:
            self.discard(producer)
            raise

    async def get(self) -> AIOKafkaProducer:
        async with self._starting.turn():
            if self._producer is None:
                producer = AIOKafkaProducer(**self._options, acks="all", enable_idempotence=True)
                try:
                    await producer.start()
                except BaseException:
                    await producer.stop()
                    raise
                self._producer = producer
            return self._producer

    def discard(self, producer: AIOKafkaProducer) -> None:
        """The next one is another. What others have on their way with this one is confirmed to them first."""
        if self._producer is producer:
            self._producer = None
            leaving = asyncio.create_task(_stop(producer))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """What is not confirmed yet may still get there."""
        await self._starting.close()
        if self._producer is not None:
            self.discard(self._producer)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=STOP_TIMEOUT)
        for leaving in list(self._leaving):
            leaving.cancel()


async def _stop(producer: AIOKafkaProducer) -> None:
    with contextlib.suppress(KafkaError, OSError):
        await producer.stop()
