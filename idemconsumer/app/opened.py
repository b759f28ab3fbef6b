"""What an app has opened without a worker, for the calls of one event loop (O26)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from idemconsumer.admin.sagas import SagaAdmin
from idemconsumer.app.inline import InlineRunner
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.ports.broker import Broker
from idemconsumer.user_code.resources import Resources


@dataclass(slots=True)
class Opened:
    """Each by the first call that needs it."""

    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    inline: InlineRunner | None = None
    resources: Resources = field(default_factory=lambda: Resources(()))
    bound: dict[Handler[..., Any], BoundHandler] = field(default_factory=dict)
    brokers: dict[str, Broker] = field(default_factory=dict)
    sagas_admin: SagaAdmin | None = None

    async def close(self) -> None:
        """All of it, whatever one of them raises, as what waits for a task does that was cancelled with its loop."""
        async with AsyncExitStack() as stack:
            if self.inline is not None:
                stack.push_async_callback(self.inline.close)
            for broker in self.brokers.values():
                stack.push_async_callback(broker.close)
