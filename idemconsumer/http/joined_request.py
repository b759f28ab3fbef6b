"""Joined mode of a request: its effects through Tx, its record and its response are one commit (H2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from idemconsumer.errors import Contention
from idemconsumer.http.current import KEY, slot_for
from idemconsumer.http.exchanged import Answer, Response, RunApplication
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import TIMED_OUT, patience, refusal
from idemconsumer.logs import log
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import Point
from idemconsumer.ports.requests import Running
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.recent import Recent
from idemconsumer.rules.values import ENDED, Mark, Record, State
from idemconsumer.stores.claims import PostgresClaims
from idemconsumer.stores.decided import decided
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.sharing import short
from idemconsumer.user_code.call import call_in_transaction
from idemconsumer.user_code.time_limit import TimeLimit

if TYPE_CHECKING:  # the Redis driver is optional
    from idemconsumer.stores.redis.copies import Copies

_NONE_FREE: Final = "no connection to the database was free"
_ANOTHER: Final = Record(State.PROCESSING, b"")  # its fingerprint is none that a request can have


class _Undone(Exception):
    """The response means that nothing happened, so its transaction is rolled back. `kept`: it is stored all the
    same."""

    def __init__(self, response: Response, *, kept: bool) -> None:
        super().__init__(response.status)
        self.response = response
        self.kept = kept


class _TimedOut(Exception):
    pass


class Joined:
    """Runs requests in joined mode. Responses with `copies` in Redis are replayed without a query to Postgres (H33)."""

    def __init__(
        self,
        store: PostgresStore,
        at: Callable[[Point, str, Sequence[bytes]], None],
        copies: Copies | None = None,
    ) -> None:
        self._store = store
        self._at = at
        self._copies = copies
        self._recent = Recent()

    async def attempt(self, claim: Claim, policy: Policy, run: RunApplication) -> Answer | Record | Running:
        """Claim the key; if the claim succeeds, run the request and store the response. Otherwise return the record, or
        the request that holds the key now.

        Raises what the application raises; StoreUnavailable and Contention if nothing was done; CommitUnknown if it is
        not known whether the effect and the response were stored.
        """
        if self._copies is None:
            return await self._asked(claim, policy, run)
        look = await self._copies.look(claim)
        if look.found is not None:
            return look.found
        try:
            return await self._asked(claim, policy, run)
        finally:
            await self._copies.lift(claim, look)

    async def _asked(self, claim: Claim, policy: Policy, run: RunApplication) -> Answer | Record | Running:
        # If endpoints hold all connections, a repeated request gets its answer by the one for queries (H10).
        if (claim.key in self._recent or self._store.full) and (ended := await self._ended(claim)) is not None:
            return ended
        met = await self._attempt(replace(claim, shown=True), policy, run)
        if isinstance(met, Running):
            async with patience(_NONE_FREE):
                with short():
                    differs = await self._store.differs(claim)
                if differs:
                    return Running(_ANOTHER)
        else:
            self._recent.add(claim.key)
        return met

    async def unclaimed(self, policy: Policy, run: RunApplication) -> Answer:
        """The answer to a request without a key. Its effects are one commit, and nothing else is stored. Raises as
        `attempt`."""
        try:
            async with AsyncExitStack() as stack:
                async with patience(_NONE_FREE):
                    claims = await stack.enter_async_context(self._store.transaction(group=1))
                async with patience("the database does not answer"):
                    await claims.begin()
                response = await self._handled(claims, policy, run)
                await claims.complete((), ())
        except _TimedOut:
            log.warning("a request without a key was cut off", route=policy.name, timeout=policy.timeout)
            return refusal(TIMED_OUT)
        except _Undone as undone:
            response = undone.response
        return Answer(response, live=True)

    async def _ended(self, claim: Claim) -> Record | None:
        """The record of a request that has ended. A replay needs no transaction, lock or rollback."""
        async with patience(_NONE_FREE):
            (found,) = await self._store.peek([claim.key])
        return found if found is not None and found.state in ENDED else None

    async def _attempt(self, claim: Claim, policy: Policy, run: RunApplication) -> Answer | Record | Running:
        try:
            return await self._committed(claim, policy, run)
        except _TimedOut:
            log.warning("a request was cut off", route=policy.name, key=claim.key, timeout=policy.timeout)
            return refusal(TIMED_OUT)
        except _Undone as undone:
            if not undone.kept:
                return Answer(undone.response, live=True)
            return await self._reject(claim, policy, undone.response)

    async def _committed(self, claim: Claim, policy: Policy, run: RunApplication) -> Answer | Record | Running:
        asked_at = time.monotonic()
        async with AsyncExitStack() as stack:
            async with patience(_NONE_FREE):
                claims = await stack.enter_async_context(self._store.transaction(group=1))
            try:
                async with patience("the database does not answer"):
                    (found,) = await claims.claim([claim])
            except Contention:
                return Running()
            if found is not Mark.CLAIMED:
                return found if isinstance(found, Record) else Running()
            self._at(Point.CLAIMED, policy.name, (claim.key,))
            response = await self._handled(claims, policy, run)
            self._at(Point.SEALING, policy.name, (claim.key,))
            result = response.stored()
            await claims.complete([(claim.key, result)], ())
        self._at(Point.COMMITTED, policy.name, (claim.key,))
        await self._copy(claim, State.COMPLETED, result, asked_at)
        return Answer(response, live=True)

    async def _handled(self, claims: PostgresClaims, policy: Policy, run: RunApplication) -> Response:
        """The response, if its transaction may be committed. Raises _Undone otherwise."""
        assert policy.timeout is not None
        limit = TimeLimit(policy.timeout)

        def accept(response: Response) -> Response:
            slot.end()
            stays = policy.keeps(response)
            if not stays or response.status >= 400:
                raise _Undone(response, kept=stays)
            claims.check()  # J8
            return response

        with slot_for(policy.name, KEY.get(), joined=True) as slot:
            slot.open(claims.tx())
            try:
                return await call_in_transaction(claims, run(), limit, accept)
            except TimeoutError as error:
                if limit.caused(error):
                    raise _TimedOut from error
                raise

    async def _reject(self, claim: Claim, policy: Policy, response: Response) -> Answer | Record | Running:
        """Store the response as FAILED in a commit of its own, after the rollback. A rival request may come first."""
        self._at(Point.REJECTING, policy.name, (claim.key,))
        asked_at, result = time.monotonic(), response.stored()

        async def reject() -> Record | None:
            # If the time is over, a COMMIT that was sent still ends first; in either case the request had no effect.
            async with patience(_NONE_FREE):
                with short():
                    return await self._store.reject(claim, result)

        try:
            standing = await decided(reject)
        except Contention:
            return Running()
        self._at(Point.REJECTED, policy.name, (claim.key,))
        if standing is not None:
            return standing
        await self._copy(claim, State.FAILED, result, asked_at)
        return Answer(response, live=True)

    async def _copy(self, claim: Claim, state: State, result: StoredResult, asked_at: float) -> None:
        """Copy a committed response. `asked_at`: a time before the claim, from which the copy's expiry counts."""
        if self._copies is not None:
            await self._copies.keep(claim, claim.record(state, result), asked_at)
