"""Copies of what Postgres has committed, and marks of requests that are querying it now (H33).

Any of it may be late or missing; then Postgres is asked. A copy or mark never decides that a request runs.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from idemconsumer.errors import StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.ports.requests import Running
from idemconsumer.redaction import error_text
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State
from idemconsumer.rules.verdicts import Verdict
from idemconsumer.stores.redis.redis_client import Redises
from idemconsumer.stores.redis.redis_records import encode_copy, read_copy
from idemconsumer.stores.redis.scripts import FORGET, KEEP, LOOK, UNMARK, Script, Scripts

SECONDS: Final = 0.25  # for an answer: it only saves time
KEPT: Final = 60.0  # seconds for which a copy may outlive a record that a person has forgotten or released
MARKED: Final = 5.0  # seconds
_LARGEST: Final = 256 * 1024  # bytes
_PAUSE: Final = 1.0  # seconds in which Redis is not asked after it has failed
_COPY, _MARK = b"c", b"m"
_NONCE: Final = 8  # bytes


@dataclass(frozen=True, slots=True)
class CopyLook:
    """`found`: a copy, or the mark of another request with the same key. None: there was nothing, and our own `mark` is
    there now, so that others wait until it is lifted."""

    found: Record | Running | None
    mark: bytes = b""


class Copies:
    """Raises nothing; while Redis is down, nothing is found. No method takes longer than a quarter of a second."""

    def __init__(self, address: str, born: str, *, kept: float = KEPT, marked: float = MARKED) -> None:
        """`born`: identifies the database. Raises ConfigurationError for an invalid address."""
        self._born = born.encode()
        self._redises = Redises(address, seconds=SECONDS)
        self._scripts = Scripts(self._redises)
        self._kept = kept
        self._marked = marked
        self._down_until = 0.0

    async def close(self) -> None:
        await self._redises.close()

    async def look(self, claim: Claim) -> CopyLook:
        """To be called before Postgres is asked about this claim. The copy may have another fingerprint."""
        running = claim.record(State.PROCESSING)
        mark = _MARK + secrets.token_bytes(_NONCE) + encode_copy(running)
        try:
            found = await self._run(LOOK, claim.key, mark, max(1, int(self._marked * 1000)))
        except asyncio.CancelledError:  # the mark may be there nevertheless
            await self._run(UNMARK, claim.key, mark)
            raise
        if not isinstance(found, bytes):
            return CopyLook(None, mark)
        if found.startswith(_COPY):
            return CopyLook(read_copy(found[1:]))
        record = read_copy(found[1 + _NONCE :])
        if record is None or claim.judge(record) is Verdict.CONFLICT:
            return CopyLook(None)  # only Postgres knows which of the two has a record
        return CopyLook(Running(record))

    async def lift(self, claim: Claim, look: CopyLook) -> None:
        """Remove our mark, so that others do not wait for it any more."""
        if look.mark:
            await self._run(UNMARK, claim.key, look.mark)

    async def keep(self, claim: Claim, record: Record, asked_at: float) -> None:
        """Store a copy in place of the mark. Only after the COMMIT of a final record. `asked_at`: the monotonic time
        before that was sent, so that the copy expires before the record."""
        left = self._kept
        if claim.expires is not None:
            left = min(left, claim.expires - (time.monotonic() - asked_at))
        value = _COPY + encode_copy(record)
        if left > 0 and len(value) <= _LARGEST:
            await self._run(KEEP, claim.key, value, max(1, int(left * 1000)))
        else:
            await self.forget(claim.key)

    async def forget(self, key: bytes) -> None:
        """Remove the copy, since the record has changed."""
        await self._run(FORGET, key)

    async def _run(self, script: Script, key: bytes, *args: object) -> Any:
        """The script's answer; None also if Redis does not answer."""
        if time.monotonic() < self._down_until:
            return None
        try:
            answer = await self._scripts.run(script, self._copied(key), *args)
        except StoreUnavailable as error:
            if not self._down_until:
                log.warning("Redis cannot be used, using only Postgres", error=error_text(error))
            self._down_until = time.monotonic() + _PAUSE
            return None
        if self._down_until:
            log.info("Redis is used again")
        self._down_until = 0.0
        return answer

    def _copied(self, key: bytes) -> bytes:
        """The copy's own key: the same Redis may hold requests, and copies of another database."""
        return sha256(b"copy" + key + self._born).digest()
