"""What an app has opened without a worker, for the calls of one event loop (O26)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.app.inline import InlineRunner
from idemconsumer.errors import StoreUnavailable
from idemconsumer.opening import Opening
from idemconsumer.ports.broker import Broker


@dataclass(slots=True)
class Opened:
    """Each by the first call that needs it."""

    opening: Opening = field(default_factory=lambda: Opening(StoreUnavailable))
    inline: InlineRunner | None = None
    brokers: dict[str, Broker] = field(default_factory=dict)
    sagas_admin: SagaAdmin | None = None

    async def close(self) -> None:
        """All of it, whatever one of them raises, as what waits for a task does that was cancelled with its loop."""
        await self.opening.close()
        async with AsyncExitStack() as stack:
            if self.inline is not None:
                stack.push_async_callback(self.inline.close)
            for broker in self.brokers.values():
                stack.push_async_callback(broker.close)
