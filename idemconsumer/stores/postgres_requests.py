"""RequestStore on Postgres: a claim is committed first, as a record that is PROCESSING and a row of `request`.

The row names the owner: a token, and the lease of a process, which a thread renews (`heartbeat`). The statement that
ends the request locks the row by its token, so a former owner's finds none. Claims here and claims in joined mode
exclude each other: both take the key's lock, and insert into the same index (J1, H20).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

import psycopg
from psycopg.pq.abc import PGresult

from idemconsumer.errors import CannotKeep, CommitUnknown, Contention, StoreUnavailable
from idemconsumer.message.keys import parts_of
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Held, LostRequest, Running
from idemconsumer.redaction import error_text, typed_text
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.doubt import Meaning, meaning
from idemconsumer.rules.recent import Recent
from idemconsumer.rules.values import ENDED, Record, State
from idemconsumer.rules.verdicts import Verdict
from idemconsumer.stores.answers import claimed_request, moment, taken_request
from idemconsumer.stores.claims import transaction
from idemconsumer.stores.columns import Statement, claimed, kept_row
from idemconsumer.stores.decided import contended, decided
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.shared_reads import Looks
from idemconsumer.stores.sharing import short
from idemconsumer.stores.unfinished import Unfinished
from idemconsumer.user_code.cancellation import ends_this_task, retrieve

LEASE: Final = 30.0  # seconds
_PATIENCE: Final = 2.0  # seconds for a lock that a claim has met
_PAUSE: Final = 1.0  # seconds without another attempt to get a lease, after one has failed
_NO_SUCH_TEXT: Final = ("22021", "22P05")  # in the encoding of the database
_OVER: Final = "the lease of this process has ended, and it has no new one yet"


class RequestLease(Protocol):
    """The lease of this process. After it was lost, `worker` is another one."""

    @property
    def worker(self) -> int: ...

    @property
    def over(self) -> bool:
        """Whether it was lost, as `lost` has reported, and there is no other one yet."""
        ...

    async def start(self, lost: Callable[[], None]) -> None:
        """Raises StoreUnavailable, and can then be called again."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Mine:
    token: int
    record: Record
    lost: Callable[[], None]


class PostgresRequests:
    """See `ports.RequestStore`. A claim is one round trip, or two if an owner was lost; so is its end.

    The lease is registered by the first claim. It is renewed while the event loop is not blocked for longer than
    `longest_run`; after that it ends within `lease` seconds, and `lost` is called once the loop runs again.
    """

    def __init__(self, pool: Pool, lease: RequestLease) -> None:
        """`pool` is closed by its owner, not here."""
        self._pool = pool
        self._lease = lease
        self._starting: asyncio.Task[None] | None = None  # or started
        self._failed_at = -_PAUSE
        self._losses = 0
        self._held: dict[bytes, _Mine] = {}
        self._in_doubt: set[bytes] = set()  # keys that are being claimed
        self._dropping: set[bytes] = set()  # keys for which a claim of this process, if there is one, is being deleted
        self._unfinished = Unfinished()
        self._recent = Recent()
        self.peek = Looks(pool).record

    @classmethod
    def on(
        cls, pool: Pool, dsn: str, schema: str, *, longest_run: float = 30.0, lease: float = LEASE
    ) -> PostgresRequests:
        return cls(pool, Heartbeat(dsn, schema, lease=lease, patience=longest_run))

    async def close(self) -> None:
        """The lease ends at once, and with it all claims that are still held."""
        await self._unfinished.close()
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._starting is not None:
            await self._lease.stop()

    # ---------------------------------------------------------------------------------------------------------- claims
    async def claim(self, claim: Claim, lost: Callable[[], None], *, again: bool = True) -> Held | Running | Record:
        if (running := self._runs(claim.key)) is not None:
            return running
        if claim.key in self._recent:  # most likely it has ended, and a read costs less than a claim
            record = await self.peek(claim.key)
            if record is not None and record.state in ENDED:
                return record
        # No await from here to `_in_doubt`: of two tasks of this process, both would get the key.
        if (running := self._runs(claim.key)) is not None:
            return running
        if claim.key in self._dropping:
            raise StoreUnavailable("the outcome of an earlier claim of this key is not known yet")
        self._in_doubt.add(claim.key)
        try:
            await self._leased()
            found = await self._claim(claim, lost, again)
        finally:
            self._in_doubt.discard(claim.key)
        self._recent.add(claim.key)
        return found

    def _runs(self, key: bytes) -> Running | None:
        """Whether this process has the key, or is claiming it."""
        if (mine := self._held.get(key)) is not None:
            return Running(mine.record)
        return Running() if key in self._in_doubt else None

    async def _claim(self, claim: Claim, lost: Callable[[], None], again: bool) -> Held | Running | Record:
        if self._lease.over:  # in the database it may be valid: a request running there would look like a claim of ours
            raise StoreUnavailable(_OVER)
        worker, losses = self._lease.worker, self._losses

        async def doubted(_: CommitUnknown) -> None:
            self._doubt(claim.key, worker)  # it may be ours by now: then the next attempt takes it

        try:
            found = await decided(lambda: self._claimed(claim, worker, again), doubted, wait=_PATIENCE, busy=contended)
        except StoreUnavailable:
            raise
        except Contention as error:
            raise StoreUnavailable(str(error)) from error
        except BaseException as error:
            self._doubt(claim.key, worker)  # it may be committed
            if ends_this_task(error) or meaning(error) is not Meaning.DOUBT:
                raise
            raise StoreUnavailable(f"a claim got no answer: {typed_text(error)}") from error
        if not isinstance(found, Held):
            return found
        self._unfinished.drop(claim.key)
        if losses != self._losses:
            self._doubt(claim.key, worker)
            raise StoreUnavailable("the lease of this process was lost as the key was claimed")
        record = claim.record(State.PROCESSING)
        self._held[claim.key] = _Mine(found.token, record, lost)
        return found

    async def _claimed(self, claim: Claim, worker: int, again: bool) -> Held | Running | Record:
        with short():
            async with transaction(self._pool, group=1) as claims:
                given = {"claims": claimed([claim], await claims.scope_ids([claim])), "worker": worker}
                (answer,) = await claims.commit([("claim_request", given)])
        if not answer.ntuples:
            raise StoreUnavailable(_OVER)
        token, record, free = claimed_request(answer, claim.key)
        if token is not None:
            return Held(claim, token)
        if record is None:
            return Running()
        if record.state in ENDED:
            return record
        if free is None or claim.judge(record) is not Verdict.BUSY:
            return Running(record, lost=free is not None)
        taken = await self._commit(("take_request", {"key": claim.key, "worker": worker, "free": free, "again": again}))
        if not taken.ntuples:
            return Running(record, lost=not again)
        token, before, since = taken_request(taken)
        return Held(claim, token, again=before, since=since if before else None)

    async def _leased(self) -> None:
        if self._starting is None:
            if time.monotonic() < self._failed_at + _PAUSE:
                raise StoreUnavailable("no lease: the database could not be reached just now")
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(retrieve)
        # A caller that stops waiting does not stop it: of two registered at once, one would not be renewed.
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        try:
            await self._lease.start(self._lose)
        except BaseException as error:
            self._starting = None
            if isinstance(error, StoreUnavailable):
                self._failed_at = time.monotonic()
            raise

    def _lose(self) -> None:
        self._losses += 1
        held, self._held = self._held, {}
        for mine in held.values():
            mine.lost()

    # ------------------------------------------------------------------------------------------------------------ ends
    async def complete(self, held: Held, result: StoredResult, *, failed: bool = False) -> bool:
        state = State.FAILED if failed else State.COMPLETED

        async def complete() -> bool:
            try:
                stored = await self._completed(held.claim.key, held.token, result, state)
            except CannotKeep:
                await self.release(held)
                raise
            self._over(held)
            return stored

        return await self._unfinished.do(held.claim.key, complete)

    async def _completed(
        self, key: bytes, token: int, result: StoredResult, state: State, *, lost_by: str | None = None
    ) -> bool:
        """`lost_by`: None, or, if it may be stored only while the request is lost, the person who decided."""
        given: dict[str, Any] = {"key": key, "token": token, "state": int(state)} | kept_row(result)
        statement = "complete_request" if lost_by is None else "settle_lost_request"
        try:
            done = await self._commit((statement, given | ({} if lost_by is None else {"by": lost_by})))
        except psycopg.DataError as error:
            if error.sqlstate in _NO_SUCH_TEXT:
                raise CannotKeep(f"a response that this database cannot encode: {error_text(error)}") from error
            raise
        if done.ntuples:
            return True
        # Another owner has it, or this is a repetition after a COMMIT whose answer was lost.
        record = await self.peek(key)
        return record is not None and (record.state, record.result) == (state, result)

    async def release(self, held: Held, *, ran: bool = False) -> None:
        async def release() -> None:
            await self._drop(held.claim.key, held.token, None, None if ran else held.since, ran=ran)
            self._over(held)

        try:
            await self._unfinished.do(held.claim.key, release)
        except BaseException as error:  # the release is done later
            if ends_this_task(error):
                raise

    def _over(self, held: Held) -> None:
        self._unfinished.drop(held.claim.key)
        mine = self._held.get(held.claim.key)
        if mine is not None and mine.token == held.token:
            del self._held[held.claim.key]

    def _doubt(self, key: bytes, worker: int) -> None:
        """The key may be claimed in our name without our knowledge. Then nothing would end the claim while this process
        lives, so it is deleted later."""

        async def drop() -> None:
            if key in self._in_doubt:
                raise StoreUnavailable("it is being claimed again")
            if key in self._held:
                return
            self._dropping.add(key)
            try:
                await self._drop(key, None, worker)
            finally:
                self._dropping.discard(key)

        self._unfinished.add(key, drop)

    async def _drop(
        self, key: bytes, token: int | None, worker: int | None, since: datetime | None = None, *, ran: bool = False
    ) -> None:
        given: dict[str, Any] = {"key": key, "token": token, "worker": worker, "ran": ran}
        given["since"] = None if since is None else since.isoformat()
        await self._commit(("lock_key", {"key": key}), ("drop_request", given))

    # --------------------------------------------------------------------------------------------------------- the lost
    async def lost(self) -> list[LostRequest]:
        rows = await self._pool.read("lost_requests", {})
        return [LostRequest(key.hex(), *parts_of(scope), moment(since), token) for key, scope, since, token in rows]

    async def settle_lost(self, lost: LostRequest, result: StoredResult, *, by: str, failed: bool = False) -> bool:
        state = State.FAILED if failed else State.COMPLETED
        return await self._completed(bytes.fromhex(lost.key), lost.token, result, state, lost_by=by)

    async def release_lost(self, lost: LostRequest, *, by: str) -> bool:
        key = bytes.fromhex(lost.key)
        given = {"key": key, "token": lost.token, "by": by}
        return bool((await self._commit(("lock_key", {"key": key}), ("release_lost_request", given))).ntuples)

    async def _commit(self, *statements: Statement) -> PGresult:
        """Run them as a whole transaction; returns the answer to the last one."""
        with short():
            async with transaction(self._pool, group=1) as claims:
                return (await claims.commit(statements))[-1]
