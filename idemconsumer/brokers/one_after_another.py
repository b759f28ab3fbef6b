"""Messages of one order are sent one after the other, where a broker may refuse one and take the next (X5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from idemconsumer.ports.broker import BEHIND, Outgoing, Unsent
from idemconsumer.rules.outbox import waves

Send = Callable[[Sequence[Outgoing]], Awaitable[Sequence[Unsent | None]]]


async def one_after_another(
    messages: Sequence[Outgoing], orders: Sequence[str | None], send: Send, seconds: float
) -> list[Unsent | None]:
    """The answer to each. `send` gets no two messages of an order at once. What was not begun after `seconds` is
    BEHIND, and so is all that follows one that was not confirmed."""
    answers: list[Unsent | None] = [BEHIND] * len(messages)
    clock = asyncio.get_running_loop().time
    until, stopped = clock() + seconds, set[str | None]()
    for wave in waves(orders):
        if not (going := [index for index in wave if orders[index] not in stopped]) or clock() > until:
            break
        for index, answer in zip(going, await send([messages[index] for index in going]), strict=True):
            answers[index] = answer
            if answer is not None and orders[index] is not None:
                stopped.add(orders[index])
    return answers
