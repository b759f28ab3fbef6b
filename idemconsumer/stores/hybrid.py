"""RequestStore on Postgres, with copies in Redis of what is committed there.

Redis answers "wait" or returns a response; it never lets a request run. If Redis has nothing, Postgres is asked, and
decides. So if Redis was flushed, is down, or has an old copy, that costs time and nothing else (H33).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Held, RequestStore, Running
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State
from idemconsumer.stores.redis.copies import Copies, CopyLook


@dataclass(slots=True)
class _Mine:
    claim: Claim
    look: CopyLook
    asked_at: float | None = None  # when `complete` was first called


class HybridRequests:
    """See `ports.RequestStore`. After a person has forgotten or released a key, its copy may still be returned for
    `copies.KEPT` seconds. A handler in joined mode uses `copies` around its transaction in the same way."""

    def __init__(self, requests: RequestStore, copies: Copies) -> None:
        """Both are closed with this."""
        self.copies = copies
        self._requests = requests
        self._mine: dict[bytes, _Mine] = {}
        # These do not use Redis.
        self.peek, self.lost = requests.peek, requests.lost
        self.settle_lost, self.release_lost = requests.settle_lost, requests.release_lost

    async def claim(self, claim: Claim, lost: Callable[[], None], *, again: bool = True) -> Held | Running | Record:
        look = await self.copies.look(claim)
        if look.found is not None:
            return look.found
        held = False
        try:
            found = await self._requests.claim(claim, lost, again=again)
            held = isinstance(found, Held)
        finally:
            if not held:
                await self.copies.lift(claim, look)
        if held:
            self._mine[claim.key] = _Mine(claim, look)
        return found

    async def complete(self, held: Held, result: StoredResult, *, failed: bool = False) -> bool:
        mine = self._mine.get(held.claim.key)
        if mine is not None and mine.asked_at is None:
            mine.asked_at = time.monotonic()
        stored = await self._requests.complete(held, result, failed=failed)
        if self._mine.pop(held.claim.key, None) is None or mine is None or mine.asked_at is None:
            return stored
        if stored:
            state = State.FAILED if failed else State.COMPLETED
            record = held.claim.record(state, result)
            await self.copies.keep(held.claim, record, mine.asked_at)
        else:
            await self.copies.lift(held.claim, mine.look)
        return stored

    async def release(self, held: Held, *, ran: bool = False) -> None:
        await self._requests.release(held, ran=ran)
        if (mine := self._mine.pop(held.claim.key, None)) is not None:
            await self.copies.lift(held.claim, mine.look)

    async def close(self) -> None:
        await self._requests.close()
        for mine in self._mine.values():
            await self.copies.lift(mine.claim, mine.look)
        await self.copies.close()
