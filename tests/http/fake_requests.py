"""A RequestStore in this process, for what does not depend on where the keys are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from idemconsumer.errors import CommitUnknown, StoreUnavailable
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Held, LostRequest, Running
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State


class FakeRequests:
    """`down`: nothing can be decided. `unknown`: so many completions get no answer, and are stored."""

    def __init__(self) -> None:
        self.records: dict[bytes, Record] = {}
        self.held: dict[bytes, tuple[Held, Callable[[], None]]] = {}
        self.released = self.ran = 0
        self.down = False
        self.unknown = 0
        self.fails_open = False
        self.closed = False
        self._tokens = count(1)

    async def claim(self, claim: Claim, lost: Callable[[], None], *, again: bool = True) -> Held | Running | Record:
        self._check()
        if self.fails_open:
            return Held(claim, 0, unclaimed=True)
        if (record := self.records.get(claim.key)) is not None:
            return record
        if (holder := self.held.get(claim.key)) is not None:
            return Running(Record(State.PROCESSING, holder[0].claim.fingerprint))
        held = Held(claim, next(self._tokens))
        self.held[claim.key] = held, lost
        return held

    async def complete(self, held: Held, result: StoredResult, *, failed: bool = False) -> bool:
        self._check()
        record = Record(State.FAILED if failed else State.COMPLETED, held.claim.fingerprint, result)
        if self.records.get(held.claim.key) == record:
            return True
        if self.held.get(held.claim.key, (None,))[0] != held:
            return False
        del self.held[held.claim.key]
        self.records[held.claim.key] = record
        if self.unknown:
            self.unknown -= 1
            raise CommitUnknown("no answer")
        return True

    async def release(self, held: Held, *, ran: bool = False) -> None:
        self.released += 1
        self.ran += ran
        if self.held.get(held.claim.key, (None,))[0] == held:
            del self.held[held.claim.key]

    async def lost(self) -> list[LostRequest]:
        return []

    async def settle_lost(self, lost: LostRequest, result: StoredResult, *, by: str, failed: bool = False) -> bool:
        return False

    async def release_lost(self, lost: LostRequest, *, by: str) -> bool:
        return False

    async def peek(self, key: bytes) -> Record | None:
        return self.records.get(key)

    async def close(self) -> None:
        self.closed = True

    def lose(self) -> None:
        """The lease of this process is over."""
        held, self.held = self.held, {}
        for _, lost in held.values():
            lost()

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailable("down")
