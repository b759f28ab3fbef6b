"""A broker that the outbox is relayed to, and that takes or refuses what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from idemconsumer.brokers.sendable import one_after_another
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.ports.broker import Outgoing, Unsent


class Taking:
    """`sent`: what it has confirmed, by name. `refused`: bodies that it takes from nobody; `away`: names under which it
    is not there. While `held` is clear it confirms nothing; `calls` has the bodies of each."""

    hands_over = False

    def __init__(self) -> None:
        self.sent: list[tuple[str, Outgoing]] = []
        self.refused = set[bytes]()
        self.reason = "it is not to my taste"
        self.away = set[str]()
        self.held = asyncio.Event()
        self.held.set()
        self.calls: list[list[bytes]] = []

    @property
    def asked(self) -> int:
        return len(self.calls)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for _, message in self.sent]

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        self.calls.append([message.body for message in messages])
        if name in self.away:
            raise BrokerUnavailable(f"{name} is away")

        async def send(wave: Sequence[Outgoing]) -> list[Unsent | None]:
            await self.held.wait()
            answers: list[Unsent | None] = []
            for message in wave:
                if message.body in self.refused:
                    answers.append(Unsent(self.reason, final=True))
                else:
                    self.sent.append((name, message))
                    answers.append(None)
            return answers

        return await one_after_another(messages, [message.key for message in messages], send, 30.0)

    async def close(self) -> None:
        return
