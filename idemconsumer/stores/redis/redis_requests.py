"""RequestStore on Redis, for effects that are not in Postgres.

A claim is one value: state, fence token, until when it is held, fingerprints, and in the end the response. A thread
renews it once a third of its lease is over (`keeping`), so an event loop that is blocked does not lose it. If it cannot
be renewed in time, `lost` is called; another owner may have the key by then, and a late response is refused (H26, H34).

A key that Redis loses is new, and its handler runs again. That happens to a key that was evicted or flushed, or that
was lost with a server that keeps no log or fails over to a replica without the key.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from idemconsumer.errors import CannotKeep, ConfigurationError, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.message.keys import parts_of
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Held, LostRequest, Running
from idemconsumer.redaction import error_text
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State
from idemconsumer.stores.redis.keeping import Keeper, now
from idemconsumer.stores.redis.redis_checks import Fitness
from idemconsumer.stores.redis.redis_client import Redises
from idemconsumer.stores.redis.redis_records import encode_response, read_record
from idemconsumer.stores.redis.scripts import CLAIM, COMPLETE, LEAVE, LOST, READ, RELEASE, RELEASE_LOST, Scripts
from idemconsumer.stores.unfinished import Unfinished

LEASE: Final = 30.0  # seconds
KEEP: Final = 86_400.0  # seconds that a response is kept if its handler does not say
LONGEST_STILL: Final = 30.0  # seconds
_ATTEMPTS: Final = 2
_PIECE: Final = 1_000  # keys
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class RedisRequests:
    """See `ports.RequestStore`, and the module. `outage`: "closed" raises StoreUnavailable while Redis is down; "open"
    returns a key that is `unclaimed` instead (H27).

    With `replicas` a claim counts, and a response is stored, once that many replicas have it. Otherwise
    StoreUnavailable is raised, and the claim is released, or the response is sent again until they have it (H29).

    Claims are renewed while the event loop is not blocked for longer than `longest_still` seconds; after that they end
    within `lease` seconds, and `lost` is called once the loop runs again.
    """

    def __init__(
        self,
        address: str,
        *,
        lease: float = LEASE,
        keep: float = KEEP,
        outage: Literal["closed", "open"] = "closed",
        replicas: int = 0,
        longest_still: float = LONGEST_STILL,
    ) -> None:
        """Connects at the first use. Raises ConfigurationError for an invalid address."""
        self._redises = Redises(address)
        if replicas and self._redises.cluster:
            raise ConfigurationError("redis: a cluster cannot wait for replicas; leave redis_replicas at 0")
        self._scripts = Scripts(self._redises, replicas=replicas)
        self._lease = lease
        self._keep = keep
        self._open = outage == "open"
        self._keeper = Keeper(address, lease=lease, patience=longest_still)
        self._unfinished = Unfinished()
        self._fitness = Fitness(self._redises)
        self._failing = False

    async def close(self) -> None:
        await self._unfinished.close()
        left = await self._keeper.stop()
        with suppress(StoreUnavailable):
            for held in left:
                await self._scripts.run(LEAVE, held.claim.key, held.token)
        await self._redises.close()

    # ---------------------------------------------------------------------------------------------------------- claims
    async def claim(self, claim: Claim, lost: Callable[[], None], *, again: bool = True) -> Held | Running | Record:
        if (mine := self._keeper.record(claim.key)) is not None:
            return Running(mine)
        try:
            await self._fitness.ask()
            found = await self._claim(claim, lost, again)
        except StoreUnavailable as error:
            if not self._open:
                raise
            if not self._failing:
                log.warning("requests run without a claim", error=error_text(error))
            self._failing = True
            return Held(claim, 0, unclaimed=True)
        self._failing = False
        return found

    async def _claim(self, claim: Claim, lost: Callable[[], None], again: bool) -> Held | Running | Record:
        call = secrets.token_hex(8)
        given: tuple[object, ...] = (call, int(self._lease * 1000), self._kept_running(claim), claim.fingerprint or b"")
        given += (claim.canonical or b"", int(again), claim.scope)
        for attempt in range(1, _ATTEMPTS + 1):
            good = now()
            try:
                answer = await self._scripts.run(CLAIM, claim.key, *given, writes=True)
                break
            except StoreUnavailable:
                if attempt == _ATTEMPTS:
                    self._take_back(claim.key, call)
                    raise
            except BaseException:
                self._take_back(claim.key, call)
                raise
        match answer:
            case [b"held", int(token), int(before), int(since)]:
                held = Held(claim, token, again=bool(before), since=_time(since) if before else None)
                try:
                    await self._fitness.ask()  # H28: it may have been claimed on a new connection
                except BaseException:
                    self._take_back(claim.key, call)
                    raise
                if not self._keeper.hold(held, self._kept_running(claim), lost, good):
                    self._take_back(claim.key, call)
                    raise StoreUnavailable("Redis: the lease of a claim ended before the claim was confirmed")
                return held
            case [b"running", fingerprint, canonical, int(is_lost)]:
                return Running(read_record(b"1", fingerprint, canonical, None), lost=bool(is_lost))
            case [b"final", state, fingerprint, canonical, response]:
                return read_record(state, fingerprint, canonical, response)
        raise StoreUnavailable("Redis: the value of a key was not written by idemconsumer")

    def _take_back(self, key: bytes, call: str) -> None:
        """Release a claim that may be ours without our knowledge (H23). It is tried under a key of its own, since the
        end of an earlier claim may still be due."""
        self._unfinished.add(key + call.encode(), lambda: self._scripts.run(RELEASE, key, call, ""))

    def _kept(self, claim: Claim) -> int:
        """Milliseconds for which a response is kept."""
        return max(1, int(1000 * (self._keep if claim.expires is None else claim.expires)))

    def _kept_running(self, claim: Claim) -> int:
        """Milliseconds from the last renewal on: a running request does not expire, and a lost one stays known."""
        return max(self._kept(claim), int(3000 * self._lease))

    # ------------------------------------------------------------------------------------------------------------ ends
    async def complete(self, held: Held, result: StoredResult, *, failed: bool = False) -> bool:
        if held.unclaimed:
            return False
        state = State.FAILED if failed else State.COMPLETED
        try:
            given = (held.token, int(state), encode_response(result), self._kept(held.claim), 0)
        except CannotKeep:
            await self.release(held)
            raise

        async def complete() -> bool:
            stored = bool(await self._scripts.run(COMPLETE, held.claim.key, *given, writes=True))
            self._keeper.drop(held)
            self._unfinished.drop(held.claim.key)
            return stored

        return await self._unfinished.do(held.claim.key, complete)

    async def release(self, held: Held, *, ran: bool = False) -> None:
        if held.unclaimed:
            return
        since = "" if held.since is None else (held.since - _EPOCH) // _MICROSECOND

        async def release() -> None:
            if ran:
                await self._scripts.run(LEAVE, held.claim.key, held.token)
            else:
                await self._scripts.run(RELEASE, held.claim.key, held.token, since)
            self._keeper.drop(held)
            self._unfinished.drop(held.claim.key)

        with suppress(StoreUnavailable):  # the release is done later
            await self._unfinished.do(held.claim.key, release)

    # -------------------------------------------------------------------------------------------------------- the lost
    async def lost(self) -> list[LostRequest]:
        """Reads all keys that Redis has, a thousand at a time."""
        keys = list(await self._scripts.keys())
        found = list[LostRequest]()
        for piece in (keys[at : at + _PIECE] for at in range(0, len(keys), _PIECE)):
            answers = await asyncio.gather(*(self._scripts.run(LOST, key) for key in piece))
            for key, answer in zip(piece, answers, strict=True):
                if answer is not None:
                    token, since, scope = answer
                    found.append(LostRequest(key.hex(), *parts_of(scope.decode()), _time(since), token))
        return sorted(found, key=lambda each: each.since)

    async def settle_lost(self, lost: LostRequest, result: StoredResult, *, by: str, failed: bool = False) -> bool:
        """As the port's. The response is kept for as long as one whose handler does not say."""
        state = State.FAILED if failed else State.COMPLETED
        given = (lost.token, int(state), encode_response(result), max(1, int(1000 * self._keep)), 1)
        return bool(await self._scripts.run(COMPLETE, bytes.fromhex(lost.key), *given, writes=True))

    async def release_lost(self, lost: LostRequest, *, by: str) -> bool:
        return bool(await self._scripts.run(RELEASE_LOST, bytes.fromhex(lost.key), lost.token, writes=True))

    async def peek(self, key: bytes) -> Record | None:
        state, *fields = await self._scripts.run(READ, key)
        return None if state is None else read_record(state, *fields)


def _time(micros: int) -> datetime:
    return _EPOCH + micros * _MICROSECOND
